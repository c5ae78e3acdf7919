"""Where a run keeps its files, and how runs are named and found.

<runs>/<run id>/config.yaml  status.json  events.jsonl  metrics.jsonl  series.json  spans.jsonl
                summary.json  curves.png  report.html  sample.txt  trace.json  launch.json
                advice.json  plan.json  logs/  checkpoints/  launch/  own/  profile/  tensorboard/  wandb/
                pids/  exits/  asked/  promtail.log  joining.lock  starting.lock
<runs>/latest -> the newest run that has begun: a server that listens, or a single process that trains
"""

import os
import re
import secrets
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from smolcluster.errors import ConfigError
from smolcluster.utils.folders import checkout
from smolcluster.utils.words import as_command

LATEST = "latest"
RUNS_DIR = "SMOLCLUSTER_RUNS_DIR"
ADVICE_FILE = "advice.json"
CHECKPOINT = re.compile(r"step-(\d{8,16})")
"""The name of a checkpoint's folder, with its step."""
NUM_SHOWN = 5
"""Of the runs that there are, where one is not."""


class _In:
    """A file or folder in a run's folder, by its name there."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: "RunPaths", owner: object = None) -> Path:
        return run.root / self._name


@dataclass(frozen=True)
class RunPaths:
    """The files of one run, whose folder is `root`."""

    root: Path

    config = _In("config.yaml")
    """The resolved configuration, without the machines' `env`."""
    status = _In("status.json")
    """How the run stands, and who takes part; written every second while it lives."""
    events = _In("events.jsonl")
    """What happened, one JSON object a line."""
    metrics = _In("metrics.jsonl")
    """What was measured, one JSON object a line."""
    series = _In("series.json")
    """Its curves in at most 200 kB; replaced every ten seconds."""
    spans = _In("spans.jsonl")
    """What its processes did when, of the first steps of every ten seconds, one JSON object a line."""
    trace = _In("trace.json")
    """Some of these for Chrome and Perfetto; written by `smolcluster trace`."""
    summary = _In("summary.json")
    """What came of it: accuracy or perplexity, samples, bytes, each worker's share; written at a good end."""
    curves = _In("curves.png")
    """Its learning curves as a picture; drawn at the end."""
    report = _In("report.html")
    """All of it on one page, for a browser; written at the end, and whenever it is asked for."""
    sample = _In("sample.txt")
    """Text that the trained model wrote; only of language models."""
    processes = _In("processes.json")
    """The launcher's children, in runs of earlier versions."""
    launched = _In("launch.json")
    """Its processes, and where they are; on the machine that launched them."""
    advice = _In(ADVICE_FILE)
    """What was predicted; written by `launch --auto`."""
    plan = _In("plan.json")
    """Which machine has which layers; written by pipelines."""
    standing = _In(".standing.json")
    """How a run on other machines stood when these were asked last; on the machine that launched it."""
    tensorboard = _In("tensorboard")
    """TensorBoard's event files; with `tensorboard: true`."""
    wandb = _In("wandb")
    """What Weights & Biases keeps."""
    logs = _In("logs")
    """A log file a process, in JSON lines, with tracebacks; `.shipped.json` says how much Loki has."""
    checkpoints = _In("checkpoints")
    """`step-…/{model.safetensors, optimizer.safetensors, state.json}`, and the links `latest` and `best`."""
    launch = _In("launch")
    """What each machine was told at the launch, and the code of a workload of one's own."""
    own = _In("own")
    """What a worker keeps for itself: with DiLoCo the state of its optimizer."""
    profile = _In("profile")
    """Traces of torch.profiler; of a mesh, with `profile`."""
    pids = _In("pids")
    """The id of each process in a tmux session."""
    exits = _In("exits")
    """The exit code of each process that has ended."""
    asked = _In("asked")
    """A file for each process that was asked to end, which may say why."""
    shipper_log = _In("promtail.log")
    """What troubles the shipper that brings the logs to Loki."""
    lock = _In(".lock")
    """Locked by the process that writes the run."""
    joining = _In("joining.lock")
    """Locked by a `join`, on the machine that launched the run."""
    starting = _In("starting.lock")
    """Locked by a `resume` until the run has started, on the machine that launched it."""

    @property
    def run_id(self) -> str:
        return self.root.name

    def own_folder(self, component: str, node: str, rank: int | None = None) -> Path:
        """Where one process keeps what nobody else reads, such as `own/worker-rank0-mini2`."""
        return self.own / log_stem(component, node, rank)

    def log_file(self, component: str, node: str, rank: int | None = None) -> Path:
        """The log file of one process, such as `logs/worker-rank0-mini2.log`."""
        return self.logs / f"{log_stem(component, node, rank)}.log"


def log_stem(component: str, node: str, rank: int | None = None) -> str:
    """A process's name in files and labels: `server-mini1`, `worker-rank0-mini2`."""
    parts = [component, node] if rank is None else [component, f"rank{rank}", node]
    return re.sub(r"[^A-Za-z0-9._-]", "_", "-".join(parts))


def parse_log_stem(stem: str) -> tuple[str, str, int | None] | None:
    """Component, node and rank of a log file's name; None: no process is called like that."""
    found = re.fullmatch(r"([a-z]+)(?:-rank(\d{1,9}))?-(.+)", stem)
    return found and (found[1], found[3], None if found[2] is None else int(found[2]))


def process_title(role: str, node: str, rank: int | None = None) -> str:
    """A process's name for people: `server mini1`, `worker 1 (pi5)` of rank 0; of a mesh `rank 1 (pi5)`.

    A node that is called as its worker, such as worker1, is left out: `worker 1`. A mesh's run is owned by
    its rank 0, which has no number in the files of the run.
    """
    if role == "rank":
        return f"rank {rank or 0} ({node})"
    if rank is None:
        return f"{role} {node}"
    title = f"{role} {rank + 1}"
    return title if node == title.replace(" ", "") else f"{title} ({node})"


def runs_root(runs_dir: Path | None = None) -> Path:
    """The folder of all runs: `runs_dir`, else `runs/` of the checkout or working directory."""
    if runs_dir is not None:
        return runs_dir.expanduser().absolute()
    return (checkout() or Path.cwd()) / "runs"


def all_runs() -> Path:
    """The folder of all runs where nothing but the environment states one."""
    stated = os.environ.get(RUNS_DIR)
    return runs_root(Path(stated) if stated else None)


def new_run_id(algorithm: str, now: datetime, suffix: str | None = None) -> str:
    """A run id such as `edp-20261120-135025-3f9c`; `suffix` is random unless given."""
    return f"{algorithm}-{now:%Y%m%d-%H%M%S}-{suffix or secrets.token_hex(2)}"


def check_run_id(run_id: str) -> str:
    """Return a run id that can be a folder's name.

    Raises:
        ConfigError: it has characters that could lead out of the folder of runs, or is `latest`.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", run_id) or run_id == LATEST:
        raise ConfigError(
            f"run id {run_id[:120]!r} cannot name a folder: use up to 100 letters, digits, "
            f"'.', '_' and '-', beginning with a letter or digit, and not {LATEST!r}"
        )
    return run_id


OWNER_ONLY = 0o700
"""A run's folder holds data, settings and addresses: other users of a machine have no business there."""


def create_run(root: Path, run_id: str, *, newest: bool = True) -> RunPaths:
    """Make a run's folder under `root` (it may exist) and, if `newest`, let `latest` point to it.

    Raises:
        ConfigError: the id cannot name a folder, the folder cannot be made, or what is written there would be
            written elsewhere.
    """
    paths = RunPaths(root / check_run_id(run_id))
    try:
        _check_links(paths)
        root.mkdir(parents=True, exist_ok=True)
        paths.root.mkdir(mode=OWNER_ONLY, exist_ok=True)
        paths.logs.mkdir(exist_ok=True)
        if newest:
            point_latest(root, run_id)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"cannot make the run's folder {paths.root}: {reason}; "
            "set runs_dir to a place that can be written"
        ) from error
    return paths


def _check_links(paths: RunPaths) -> None:
    """Refuse a folder, which somebody may have handed over, whose files are links to others of this user's.

    Checkpoints may be on another disk, and what W&B keeps is its own.
    """
    for folder in (paths.root, paths.logs, paths.launch):
        for path in folder.iterdir() if folder.is_dir() else ():
            is_ours = path not in (paths.checkpoints, paths.wandb)
            if (
                is_ours
                and path.is_symlink()
                and not path.resolve().is_relative_to(paths.root.resolve())
            ):
                raise ConfigError(
                    f"{path} is a link to {path.resolve()}, outside the run's folder: remove it"
                )


def latest_of(root: Path) -> str | None:
    """The id of the run that `latest` points to; None: to none."""
    try:
        return (root / LATEST).readlink().name
    except OSError:
        return None


def point_latest(root: Path, run_id: str | None) -> None:
    """Let `latest` point to this run; None: to none.

    Raises:
        OSError: it cannot be made or removed.
    """
    if run_id is None:
        (root / LATEST).unlink(missing_ok=True)
        return
    beside = root / f".{LATEST}-{secrets.token_hex(4)}"
    beside.symlink_to(run_id)
    beside.replace(root / LATEST)


def take_back_latest(paths: RunPaths, before: str | None) -> None:
    """Let `latest` point to the run `before` again if it points to this one, whose start has failed."""
    root = paths.root.parent
    if before is not None and latest_of(root) == paths.run_id:
        with suppress(OSError):
            point_latest(root, before)


def is_run_folder(path: Path) -> bool:
    """Whether a folder can be a run's, by its name; a link to one is none."""
    with suppress(ConfigError, OSError):
        return bool(check_run_id(path.name)) and not path.is_symlink() and path.is_dir()
    return False


def runs_in(root: Path) -> list[RunPaths]:
    """The runs in a folder, in no order."""
    with suppress(OSError):
        return [RunPaths(path) for path in root.iterdir() if is_run_folder(path)]
    return []


def find_run(root: Path, name: str = LATEST) -> RunPaths:
    """The run of that id, or the one that `latest` points to: the newest that has begun.

    Raises:
        ConfigError: there is no such run under `root`.
    """
    run_id = name if name == LATEST else check_run_id(name)
    folder = root / run_id
    if not folder.is_dir():
        known = sorted(path.name for path in root.glob("[!.]*/") if not path.is_symlink())
        older = "… " if len(known) > NUM_SHOWN else ""
        missing = "no run that has begun" if name == LATEST else f"no run {name!r}"
        names = f"{older}{', '.join(known[-NUM_SHOWN:])}"
        first = f"none; {as_command('launch', '--help')} tells how to begin one"
        raise ConfigError(f"{missing} under {root} (known: {names or first})")
    return RunPaths(folder.resolve())
