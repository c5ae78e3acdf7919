"""Serves the page on this machine until it is interrupted."""

import asyncio
import errno
import secrets
import socket
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from html import escape
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from smolcluster.errors import ConfigError, PortBusy
from smolcluster.observability.dashboard.app import Views, Write, make_app
from smolcluster.observability.dashboard.guard import Guard, access_for
from smolcluster.utils.units import format_address

if TYPE_CHECKING:
    from tempfile import _TemporaryFileWrapper

PORT = 8265
SHUTDOWN_S = 1
SEND_NBYTES = 1 << 17
"""What the system keeps of an answer that is not read: little, so that it is noticed."""
MAX_CONNECTIONS = 200
STALL_S = 10.0
"""After at most twice this, seconds, half a request or an answer that nobody reads is cut."""
Standing = tuple[Any, int]


def serve(
    views: Views,
    chosen: str,
    write: Write,
    *,
    host: str,
    port: int | None,
    say: Callable[[str], None],
    opens_by: Sequence[Path] = (),
) -> None:
    """Serve until Ctrl-C.

    Args:
        views: the runs.
        chosen: the run that is shown first.
        write: goes on from a text.
        host: the address to listen on.
        port: the port; None: the usual one, or any that is free.
        say: tells the person a line.
        opens_by: open a browser, by way of a file in one of these folders.

    Raises:
        PortBusy: somebody else listens there.
        ConfigError: this machine has no such address, or none of these folders can be written.
    """
    listener = bound(host, port)
    own_port = listener.getsockname()[1]
    token = secrets.token_urlsafe(24)
    access = access_for(host, socket.gethostname(), token)
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host  # noqa: S104 - compared, not bound
    address = f"http://{format_address(shown, own_port)}/#token={token}"
    say(f"dashboard: {address}")
    say("Ctrl-C ends it; training goes on")
    config = server_config(Guard(make_app(views, write, chosen), access))
    with listener, ExitStack() as until_then:
        if opens_by:
            until_then.enter_context(opened(address, opens_by))
        try:
            uvicorn.Server(config).run(sockets=[listener])
        except KeyboardInterrupt:
            return


def server_config(app: ASGIApp) -> uvicorn.Config:
    """How the application is served."""
    return uvicorn.Config(
        app,
        http=CutWhenStalled,
        log_level="critical",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=SHUTDOWN_S,
        proxy_headers=False,
    )


def bound(host: str, port: int | None) -> socket.socket:
    """A socket that listens there; where no port is stated the usual one, or any that is free.

    Raises:
        PortBusy: somebody else listens there.
        ConfigError: this machine has no such address.
    """
    try:
        return _bound(host, PORT if port is None else port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE and port is None:
            return _bound(host, 0)
        if error.errno == errno.EADDRINUSE:
            raise PortBusy(
                f"port {port} on {host} is taken: leave --port out, or choose another one"
            ) from error
        reason = (error.strerror or str(error)).partition(" (while")[0]
        raise ConfigError(
            f"cannot listen on {format_address(host, port or PORT)}: {reason}; "
            "choose another --host or --port"
        ) from error


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    takes_both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    listener = socket.create_server((host, port), family=family, dualstack_ipv6=takes_both)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_NBYTES)
    return listener


@contextmanager
def opened(address: str, folders: Sequence[Path]) -> Iterator[None]:
    """Open the address in a browser, by way of a file: command lines can be read by everybody.

    The file is there as long as the block lasts, in the first of `folders` that can be written and that a
    browser in a sandbox (snap, Flatpak) may read: in the home folder, and not below a hidden one.

    Raises:
        ConfigError: none of them can be written.
    """
    target = escape(address, quote=True)
    with _page_in(folders) as file:
        file.write(f'<!doctype html><meta http-equiv="refresh" content="0;url={target}">\n')
        file.flush()
        webbrowser.open(Path(file.name).as_uri())
        yield


def _page_in(folders: Sequence[Path]) -> "_TemporaryFileWrapper[str]":
    for folder in sorted(folders, key=lambda each: not _is_plainly_at_home(each)):
        with suppress(OSError):
            return NamedTemporaryFile("w", prefix="dashboard-", suffix=".html", dir=folder)
    raise ConfigError(
        f"--open needs a file in {' or '.join(map(str, folders))}, which cannot be written: leave it out"
    )


def _is_plainly_at_home(folder: Path) -> bool:
    """Whether it is in the home folder, and neither it nor one above it there is hidden."""
    home = Path.home().resolve()
    folder = folder.resolve()
    return folder.is_relative_to(home) and not any(
        part.startswith(".") for part in folder.relative_to(home).parts
    )


class CutWhenStalled(H11Protocol):
    """A browser's connection, which is cut when nothing moves on it; `uvicorn.Config(http=...)` takes it.

    uvicorn waits without end for the rest of a request, and for a client that does not read its answer.
    """

    since = 0.0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Make room for it, and look at it now and then."""
        super().connection_made(transport)
        self.since = self.loop.time()
        if len(self.connections) > MAX_CONNECTIONS:
            own = (each for each in self.connections if isinstance(each, CutWhenStalled))
            idle = [each for each in own if not each.is_answering]
            min(idle, key=lambda each: each.since).transport.abort()
        self._look(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    @property
    def is_answering(self) -> bool:
        """Whether a request has come whole and its answer has not gone whole."""
        return self.cycle is not None and not self.cycle.response_complete

    def _look(self, before: Standing | None) -> None:
        """Cut the connection if it stands as it did at the last look."""
        now = self._standing()
        if now is not None and now == before:
            self.transport.abort()
        else:
            self._timer = self.loop.call_later(STALL_S, self._look, now)

    def _standing(self) -> Standing | None:
        """What changes when something moves; None: an answer is being computed, which may take long."""
        unsent = self.transport.get_write_buffer_size()
        return None if self.is_answering and not unsent else (self.cycle, unsent)
