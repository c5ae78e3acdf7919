"""Weights & Biases: online with an API key or a login, offline otherwise; never in the way.

Each process of a run is a run in W&B, and their group is the run. The server's curves are drawn over its
`step`, with what workers report of themselves (`rank0/…`) and counts of what happened (`events/…`); a
worker's own run has the same reports as `worker/…` over the steps that it has taken itself, `worker/step`.

W&B runs in a child process (`wandb_child.py`), which a thread feeds through a pipe, twice a second. So
importing wandb, its exit hooks (which can hold a process for 90 s when the network is dead), its
prompts and its output cannot touch training, and the deadline at the end holds: the child's process
group is ended. If any of it fails, one warning says so and the run goes on. The API key is not read here:
the child inherits the environment, where wandb finds it or its own login.
"""

import contextlib
import netrc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, Literal, cast
from urllib.parse import urlsplit

from smolcluster.configs.schema import RunConfig
from smolcluster.observability.metrics import MetricRecord
from smolcluster.observability.sinks.wandb_child import KEPT
from smolcluster.runs.events import (
    BeginningEnded,
    EpochFinished,
    Evaluated,
    Event,
    RunEnded,
    RunStarted,
    kind_of,
)
from smolcluster.runs.files import json_line
from smolcluster.runs.paths import RunPaths
from smolcluster.utils.cadence import Cadence
from smolcluster.utils.units import format_bytes

MAX_WAITING = 20_000
LAYERS = "grad_norm/"
NUM_STEPS_FIRST, STEP_EVERY_S = 50_000, 5.0
"""So many steps are all reported, later one in so many seconds: a week takes 300 MB."""
MAX_NBYTES = 512 * 1024 * 1024
"""Of values that W&B is given, which it keeps in a file of about that size, also where it is online."""
WRITE_EVERY_S = 0.5
NOT_COUNTED = (RunStarted, Evaluated, EpochFinished, BeginningEnded, RunEnded)
"""The events that are not counted: what they say is a metric already, or is said once."""
LEFT_OUT = frozenset({"start", "stop", "total_samples", "total_steps"})
"""Values of a step that make no curve."""
Mode = Literal["online", "offline", "disabled"]


def wandb_for(
    run: RunConfig,
    algorithm: str,
    *,
    role: str,
    node: str,
    rank: int | None,
    paths: RunPaths,
    warn: Callable[[str], None],
    environ: Mapping[str, str] = os.environ,
) -> "WandbSink":
    """The sink of one process of a run; `algorithm` is its title, `rank` a worker's.

    Its name in W&B is `EDP-worker-mini2_rank0_lr0.001_bs32`, where the last is a worker's batch, even if a
    step has several; a server's has no rank part.
    """
    place = "" if rank is None else f"_rank{rank}"
    rates = f"lr{run.train.learning_rate:g}_bs{run.train.samples_per_push}"
    start = {
        "project": run.train.logging.project_name,
        "group": run.run_id,
        "name": f"{algorithm}-{role}-{node}{place}_{rates}",
        "job_type": role,
        "config": run.model_dump(mode="json") | {"role": role, "node": node, "rank": rank},
    }
    return WandbSink(paths.root, start, warn=warn, environ=environ)


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
    """Reports records to W&B; `log` keeps them for its thread and returns at once.

    `folder` is the run's folder, where all that wandb writes goes; `start` are the words of `wandb.init`.
    `warn` is called with one sentence, once for each thing that can go wrong, where the user has an account
    or has chosen a mode. `close` takes at most about `finish_timeout_s` seconds; what was not uploaded by
    then stays in the folder for `wandb sync`.
    """

    def __init__(
        self,
        folder: Path,
        start: Mapping[str, Any],
        *,
        warn: Callable[[str], None],
        environ: Mapping[str, str] = os.environ,
        finish_timeout_s: float = 5.0,
    ) -> None:
        mode = wandb_mode(environ)
        self._folder = folder / "wandb"
        caches = {
            f"WANDB_{name.upper()}_DIR": f"{self._folder / name}" for name in ("cache", "data")
        }
        self._environ = caches | dict(environ)
        """With wandb's caches in the run's folder unless the user chose."""
        self._output = self._folder / f"{re.sub(r'[^A-Za-z0-9._-]', '_', start['name'])}.log"
        self._role = start["job_type"]
        is_chosen = mode == "online" or bool(environ.get("WANDB_MODE"))
        # Who has no account misses nothing.
        self._warn: Callable[[str], None] = warn if is_chosen else lambda _: None
        self._timeout_s = finish_timeout_s
        self._cadence = Cadence(NUM_STEPS_FIRST, STEP_EVERY_S)
        self._newest = MetricRecord("step", 0, 0)
        self._counts_cadence = Cadence(NUM_STEPS_FIRST, STEP_EVERY_S)
        self._counts: Counter[str] = Counter()
        self._reported: Counter[str] = Counter()
        self._taking = threading.Lock()
        self._waiting: deque[MetricRecord] = deque()
        self._closing = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        self._off = mode == "disabled"
        self._nbytes = 0
        self._late = False
        self._slow = False
        own = {"mode": mode, "dir": str(folder), "finish_timeout_s": finish_timeout_s}
        self._first_line = json_line({**start, **own})
        self._thread = threading.Thread(target=self._feed, name="wandb", daemon=True)
        if not self._off:
            self._thread.start()

    def log(self, record: MetricRecord) -> None:
        """Take one record, whose values must not change any more."""
        with self._taking:
            is_due = self._cadence.take() or _is_rare(record)
        if self._off or not is_due:
            return
        if len(self._waiting) < MAX_WAITING:
            self._newest = record
            self._waiting.append(record)
        elif not self._slow:
            self._slow = True
            self._warn("Weights & Biases is too slow: it misses some records")

    def happened(self, event: Event) -> None:
        """Count an event; the thread reports the counts when they have changed."""
        if not isinstance(event, NOT_COUNTED):
            with self._taking:
                self._counts[f"events/{kind_of(type(event))}"] += 1

    def close(self) -> None:
        """Hand over what waits and end W&B, within the deadline."""
        if self._off:
            return
        deadline = time.monotonic() + self._timeout_s
        self._closing.set()
        self._thread.join(max(0.0, deadline - time.monotonic()))
        self._off = True
        if self._thread.is_alive():
            self._late = True
            self._warn(
                f"Weights & Biases did not finish in {self._timeout_s:g} s; "
                f"upload what is left with: wandb sync {self._folder}"
            )
            if self._child is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._child.pid, signal.SIGKILL)
            self._thread.join(1.0)

    def _feed(self) -> None:
        """The thread: start the child, pass it what has come, again and again, wait for its end."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with self._output.open("wb") as output:
                child = self._start(output)
        except OSError as error:
            self._give_up(str(error))
            return
        self._child = child
        with contextlib.suppress(BrokenPipeError), cast(IO[bytes], child.stdin) as pipe:
            _write(pipe, self._first_line)
            while child.poll() is None:
                is_last = self._closing.wait(WRITE_EVERY_S)
                _write(pipe, self._bounded(self._take(is_last=is_last)))
                if is_last:
                    break
        code = child.wait()
        if code == KEPT:
            self._warn(
                "Weights & Biases could not be reached; upload the run later with: "
                f"wandb sync {self._folder}"
            )
        elif code != 0:
            self._give_up(_last_line(self._output))

    def _take(self, *, is_last: bool) -> bytes:
        """A line for each record that waits, and one for the counts if they have changed."""
        newest = self._newest
        records = [self._waiting.popleft() for _ in range(len(self._waiting))]
        with self._taking:
            counts = self._counts.copy()
        if counts != self._reported and (is_last or self._counts_cadence.take()):
            self._reported = counts
            records.append(MetricRecord("step", newest.step, newest.epoch, counts))
        return b"".join(json_line(values_of(record, self._role)) for record in records)

    def _bounded(self, lines: bytes) -> bytes:
        """The lines; none once W&B has been given as many as its file may hold, which is said once."""
        had_room = self._nbytes <= MAX_NBYTES
        self._nbytes += len(lines)
        if self._nbytes <= MAX_NBYTES:
            return lines
        if had_room:
            self._warn(
                f"Weights & Biases gets no more values, as its file has {format_bytes(MAX_NBYTES)} of them; "
                "the run's metrics.jsonl goes on"
            )
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


def values_of(record: MetricRecord, role: str) -> dict[str, Any]:
    """A record as W&B gets it, in the run of a process of this role."""
    if role == "worker":
        own = {f"worker/{name}": value for name, value in record.values.items()}
        return {"worker/step": record.step} | own
    ranks = f"rank{record.rank}/"
    prefix = {"worker": ranks, "rank": ranks, "server": "server/"}.get(record.kind, "")
    values = {
        f"{prefix}{name}": value for name, value in record.values.items() if name not in LEFT_OUT
    }
    return {"step": record.step, "epoch": record.epoch} | values


def _write(pipe: IO[bytes], lines: bytes) -> None:
    if lines:
        pipe.write(lines)
        pipe.flush()


def _is_rare(record: MetricRecord) -> bool:
    """Whether it is more than a plain step."""
    return record.kind != "step" or any(name.startswith(LAYERS) for name in record.values)


def _last_line(path: Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        return str(error)
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")
