"""Serves the page on this machine until it is interrupted."""

import errno
import secrets
import socket
import tempfile
import webbrowser
from collections.abc import Callable
from html import escape
from pathlib import Path

import uvicorn

from smolcluster.errors import ConfigError, PortBusy
from smolcluster.observability.dashboard.app import Views, make_app
from smolcluster.observability.dashboard.guard import Guard, access_for
from smolcluster.utils.units import format_address

PORT = 8265
SHUTDOWN_S = 1


def serve(
    views: Views,
    chosen: str,
    *,
    host: str,
    port: int | None,
    say: Callable[[str], None],
    opens: bool,
) -> None:
    """Serve until Ctrl-C.

    Args:
        views: the runs.
        chosen: the run that is shown first.
        host: the address to listen on.
        port: the port; None: the usual one, or any that is free.
        say: tells the person a line.
        opens: open a browser.

    Raises:
        PortBusy: somebody else listens there.
        ConfigError: this machine has no such address.
    """
    listener = bound(host, port)
    own_port = listener.getsockname()[1]
    token = secrets.token_urlsafe(24)
    access = access_for(host, own_port, socket.gethostname(), token)
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host  # noqa: S104 - compared, not bound
    address = f"http://{format_address(shown, own_port)}/?token={token}"
    say(f"dashboard: {address}")
    say("Ctrl-C ends it; training goes on")
    config = uvicorn.Config(
        Guard(make_app(views, chosen), access),
        log_level="critical",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=SHUTDOWN_S,
        proxy_headers=False,
    )
    with listener, tempfile.TemporaryDirectory(prefix="smolcluster-") as folder:
        if opens:
            open_browser(address, Path(folder))
        try:
            uvicorn.Server(config).run(sockets=[listener])
        except KeyboardInterrupt:
            return


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
        reason = error.strerror or str(error)
        raise ConfigError(
            f"cannot listen on {format_address(host, port or PORT)}: {reason}; "
            "choose another --host or --port"
        ) from error


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()
    except BaseException:
        listener.close()
        raise
    return listener


def open_browser(address: str, folder: Path) -> None:
    """Open the address in a browser, by way of a file: command lines can be read by everybody."""
    file = folder / "dashboard.html"
    file.touch(mode=0o600)
    target = escape(address, quote=True)
    file.write_text(f'<!doctype html><meta http-equiv="refresh" content="0;url={target}">\n')
    webbrowser.open(file.as_uri())
