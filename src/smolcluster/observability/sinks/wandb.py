"""Weights & Biases: online with an API key or a login, offline otherwise; never in the way.

W&B runs in a child process (`wandb_child.py`), which a thread feeds through a pipe. So importing
wandb, its exit hooks (which can hold a process for 90 s when the network is dead), its prompts and
its output cannot touch training, and the deadline at the end holds: the child's process group is
ended. If any of it fails, one warning says so and the run goes on. The API key is not read here:
the child inherits the environment, where wandb finds it or its own login.
"""

import contextlib
import netrc
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, Literal, cast
from urllib.parse import urlsplit

from smolcluster.observability.metrics import MetricRecord
from smolcluster.runs.files import json_line

MAX_WAITING = 20_000
Mode = Literal["online", "offline", "disabled"]


def run_name(
    *,
    algorithm: str,
    role: str,
    hostname: str,
    rank: int | None,
    learning_rate: float,
    batch_size: int,
) -> str:
    """The run's name in W&B: `EDP-worker-mini2_rank0_lr0.001_bs32`; a server has no rank part."""
    who = f"{algorithm}-{role}-{hostname}"
    place = "" if rank is None else f"_rank{rank}"
    return f"{who}{place}_lr{learning_rate:g}_bs{batch_size}"


def wandb_mode(environ: Mapping[str, str]) -> Mode:
    """`WANDB_MODE` if it is set; else online with an API key or a login, and offline without."""
    asked = environ.get("WANDB_MODE", "").lower()
    if asked == "disabled" or environ.get("WANDB_DISABLED", "").lower() in ("1", "true", "yes"):
        return "disabled"
    if asked in ("offline", "dryrun"):
        return "offline"
    if asked or environ.get("WANDB_API_KEY") or environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return "online"
    return "online" if _has_login(environ) else "offline"


def _has_login(environ: Mapping[str, str]) -> bool:
    """Whether `wandb login` has left an entry for the W&B host in the user's netrc."""
    host = urlsplit(environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    home = Path(environ.get("HOME") or Path.home())
    named = environ.get("NETRC")
    for path in [Path(named)] if named else [home / ".netrc", home / "_netrc"]:
        try:
            return host in netrc.netrc(str(path)).hosts
        except (OSError, netrc.NetrcParseError, UnicodeError):
            continue
    return False


class WandbSink:
    """Reports records to W&B; `log` puts them in a queue and returns at once.

    `folder` is the run's folder, where all that wandb writes goes; `run_id` becomes the group.
    `warn` is called with one sentence, once for each thing that can go wrong. `close` takes at most
    about `finish_timeout_s` seconds; what was not uploaded by then stays in the folder for `wandb
    sync`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        project: str,
        run_id: str,
        name: str,
        config: Mapping[str, Any],
        warn: Callable[[str], None],
        environ: Mapping[str, str] = os.environ,
        finish_timeout_s: float = 5.0,
    ) -> None:
        mode = wandb_mode(environ)
        self._folder = folder / "wandb"
        self._environ = _child_environment(environ, self._folder)
        self._output = self._folder / f"{re.sub(r'[^A-Za-z0-9._-]', '_', name)}.log"
        self._warn = warn
        self._timeout_s = finish_timeout_s
        self._queue: queue.Queue[bytes | None] = queue.Queue(MAX_WAITING)
        self._child: subprocess.Popen[bytes] | None = None
        self._off = mode == "disabled"
        self._late = False
        self._slow = False
        start: dict[str, Any] = {"mode": mode, "project": project, "group": run_id, "name": name}
        start |= {"dir": str(folder), "config": dict(config), "finish_timeout_s": finish_timeout_s}
        self._put(json_line(start))
        self._thread = threading.Thread(target=self._feed, name="wandb", daemon=True)
        if not self._off:
            self._thread.start()

    def log(self, record: MetricRecord) -> None:
        """Take one record; the values of a worker's report are named `rank0/…`."""
        prefix = f"rank{record.rank}/" if record.kind == "worker" else ""
        values = {f"{prefix}{name}": value for name, value in record.values.items()}
        self._put(json_line({"step": record.step, "epoch": record.epoch} | values))

    def tick(self) -> None:
        """Nothing is due: the thread does it all."""

    def close(self) -> None:
        """Hand over what is queued and end W&B, within the deadline."""
        if self._off:
            return
        deadline = time.monotonic() + self._timeout_s
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=self._timeout_s)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        self._off = True
        if self._thread.is_alive():
            self._late = True
            self._warn(
                f"Weights & Biases did not finish in {self._timeout_s:g} s; "
                f"upload what is left with: wandb sync {self._folder}"
            )
            if self._child is not None:
                _end_group(self._child)
            self._thread.join(1.0)

    def _put(self, line: bytes) -> None:
        if self._off:
            return
        try:
            self._queue.put_nowait(line)
        except queue.Full:
            if not self._slow:
                self._slow = True
                self._warn("Weights & Biases is too slow: it misses some records")

    def _feed(self) -> None:
        """The thread: start the child, pass it every line, wait for its end."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with self._output.open("wb") as output:
                child = self._start(output)
        except OSError as error:
            self._give_up(str(error))
            return
        self._child = child
        with contextlib.suppress(BrokenPipeError), cast(IO[bytes], child.stdin) as pipe:
            while child.poll() is None and (line := self._next_line()) is not None:
                pipe.write(line)
                pipe.flush()
        if child.wait() != 0:
            self._give_up(_last_line(self._output))

    def _next_line(self) -> bytes | None:
        """The next line, None at the end; nothing after a second, so that a dead child is noticed."""
        try:
            return self._queue.get(timeout=1.0)
        except queue.Empty:
            return b""

    def _start(self, output: IO[bytes]) -> subprocess.Popen[bytes]:
        script = Path(__file__).with_name("wandb_child.py")
        return subprocess.Popen(  # noqa: S603
            [sys.executable, "-P", str(script)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            cwd=self._folder.parent,
            env=self._environ,
            start_new_session=True,
        )

    def _give_up(self, reason: str) -> None:
        self._off = True
        if not self._late:
            self._warn(f"Weights & Biases is off: {reason or 'it ended'}; see {self._output}")


def _child_environment(environ: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The environment, with wandb's caches in the run's folder unless the user chose."""
    places = {"WANDB_CACHE_DIR": str(folder / "cache"), "WANDB_DATA_DIR": str(folder / "data")}
    return places | dict(environ)


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """End the child and what it started: it leads its own process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)


def _last_line(path: Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        return str(error)
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")
