"""Training a model of one's own: what it costs beside the built-in ones. One part at a time, by `--part`.

restart: a worker is killed in mid-run, beside another one that trains on: how long until its next push
         counts. Beside it one `import torch` alone, which is the most of it.
attach:  a loop of one's own with EDP and int8, whose steps take 100 ms, beside the same loop without a
         cluster, in turns; the server is a process of its own.
served:  samples of 150 kB over loopback from the server, against workers that have them.
prefetch: a loader that takes half a step, against one that takes no time.
ways:    examples/own_model said in three ways, with 1, 2 and 4 workers of SyncPS, one of which is killed.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

import psutil
import torch
from torch import nn

import smolcluster
from common import NEVER, Cluster, free_port, report, say, seconds_of, steps_of
from own_data import BATCH
from processes import Child, Processes
from smolcluster.algorithms.supervision import FIRST_DELAY_S
from smolcluster.configs.spec import get_algorithm
from smolcluster.errors import SmolclusterError
from smolcluster.runs.paths import find_run
from smolcluster.runs.summary import Summary, read_summary
from smolcluster.wire.security import ensure_secret

RESTART_TARGET_S = 10.0
RESTART_LIMIT_S = 300.0
OWN_MODEL = Path(__file__).resolve().parents[1] / "examples" / "own_model"
EPOCHS, NUM_WORKERS, KILLED_AT, WAYS_LIMIT_S = 40, (1, 2, 4), 200, 300.0
ATTACH_TARGET, STEP_S, TURN = 0.05, 0.1, 10
SERVED_TARGET, PREFETCH_TARGET = 0.9, 0.9
OWN_DATA = Path(__file__).with_name("own_data.py")


@dataclass(frozen=True)
class Measured:
    """What a part has found: a table whose first row is its heading, and the same for programs."""

    rows: Sequence[Sequence[str]]
    results: Mapping[str, object]


def restart(rounds: int) -> Measured:
    """Kill a supervised worker of two, again and again."""
    times, imports = [], []
    with (
        tempfile.TemporaryDirectory() as folder,
        Cluster(Path(folder), "edp", num_workers=2) as cluster,
    ):
        cluster.serve(f"num_epochs={NEVER}", f"eval_steps={NEVER}", "min_workers=2")
        program = (str(get_algorithm("edp").worker), "--restarts", str(rounds + 1))
        supervisors = [cluster.work(number, program=program) for number in (1, 2)]
        cluster.wait_for_step(50)
        for number in range(rounds):
            (worker,) = psutil.Process(supervisors[0].process.pid).children()
            killed_at = time.time()
            worker.kill()
            back_at = cluster.wait_until(
                partial(_next_push, cluster, killed_at), limit_s=RESTART_LIMIT_S
            )
            times.append(back_at - killed_at)
            say(f"round {number + 1} of {rounds}: training again after {times[-1]:.1f} s")
            imports.append(_import_s())
    median, import_s = statistics.median(times), statistics.median(imports)
    rows = [
        ("", "s (median)", "target"),
        ("import torch alone", f"{import_s:.1f}", ""),
        ("from the kill to its next push", f"{median:.1f}", f"<= {RESTART_TARGET_S:g}"),
    ]
    return Measured(rows, {"restart_s": times, "import_s": imports, "target_s": RESTART_TARGET_S})


def _next_push(cluster: Cluster, killed_at: float) -> float | None:
    """When the first push of the first worker's next life was applied, seconds since 1970.

    One that was on its way may still count after the kill, but not for as long as the supervisor's pause.
    """
    later = [
        line for line in steps_of(cluster.run, killed_at + FIRST_DELAY_S) if line.record.rank == 0
    ]
    return seconds_of(later[0]) if later else None


def _import_s() -> float:
    began = time.perf_counter()
    psutil.Popen([sys.executable, "-c", "import torch"]).wait()
    return time.perf_counter() - began


def attach(rounds: int) -> Measured:
    """Time steps of 100 ms, attached and plain, in turns of `TURN` steps."""
    with tempfile.TemporaryDirectory() as name, Processes(Path(name)) as processes:
        folder = Path(name)
        file = folder / "cluster.yaml"
        file.write_text(
            "host_ip: {home: 127.0.0.1, ann: 127.0.0.1}\nserver: home\nworkers: [ann]\nnum_workers: 1\n"
            f"algorithm: edp\nport: {free_port()}\nmetrics_port: null\ncodec: int8\n"
        )
        secret = ensure_secret(folder / "secret")
        command = ("-m", "smolcluster.cli", "serve", str(file), "--no-progress", "--override")
        processes.start(
            *(sys.executable, *command, f"secret_file={secret.path}", f"runs_dir={folder}/runs"),
            *("threads=1", "num_epochs=1000"),
            forked=False,
        )
        torch.set_num_threads(1)
        times: dict[bool, list[float]] = {True: [], False: []}
        loops = {is_attached: Loop() for is_attached in times}
        own = loops[True]
        overrides = (f"runs_dir={folder}/runs",)
        with smolcluster.attach(
            *(own.model, own.optimizer, file),
            name="ann",
            num_samples=1_000_000,
            secret=secret,
            overrides=overrides,
        ):
            for _ in range(3):
                own.step()
            for _ in range(rounds):
                for is_attached, loop in loops.items():
                    times[is_attached] += [loop.step() for _ in range(TURN)]
    attached, plain = (1e3 * statistics.median(times[each]) for each in (True, False))
    more = attached / plain - 1
    num_params = sum(param.numel() for param in own.model.parameters())
    rows = [
        (f"{num_params / 1e6:.1f} million weights", "ms a step (median)", "target"),
        ("the plain loop", f"{plain:.1f}", ""),
        ("attached, EDP, int8", f"{attached:.1f}", ""),
        ("more", f"{more:.1%}", f"<= {ATTACH_TARGET:.0%}"),
    ]
    return Measured(rows, {"plain_ms": plain, "attached_ms": attached, "target": ATTACH_TARGET})


class Loop:
    """A training loop whose steps take 100 ms: what its own computing leaves of them it sleeps."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self._inputs = torch.randn(32, 256)

    def step(self) -> float:
        """Make one step; returns how long it took, in seconds."""
        began = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        loss = (self.model(self._inputs) - self._inputs).square().mean()
        loss.backward()
        computed_s = time.perf_counter() - began
        time.sleep(max(0.0, STEP_S - computed_s))
        self.optimizer.step()
        return time.perf_counter() - began


def served(rounds: int) -> Measured:
    return _compared(
        rounds,
        ("samples that workers have", ()),
        ("samples of 150 kB that the server sends", ("dataset.source=server",)),
        SERVED_TARGET,
    )


def prefetch(rounds: int) -> Measured:
    """The step is measured first; a sample then takes half of what the step takes for it."""
    step_s = BATCH / _samples_per_s()
    load_ms = 1000 * step_s / 2 / BATCH
    return _compared(
        rounds,
        ("a loader that takes no time", ()),
        (
            f"one that takes half a step of {step_s:.3f} s",
            (f"workload_args.load_ms={load_ms:.4f}",),
        ),
        PREFETCH_TARGET,
    )


def _compared(
    rounds: int,
    first: tuple[str, Sequence[str]],
    second: tuple[str, Sequence[str]],
    target: float,
) -> Measured:
    """Speeds of the same run with two settings, in turn."""
    pairs = []
    for number in range(rounds):
        pairs.append((_samples_per_s(*first[1]), _samples_per_s(*second[1])))
        say(f"round {number + 1} of {rounds}: {pairs[-1][0]:.0f} and {pairs[-1][1]:.0f} samples/s")
    speeds = [statistics.median(each) for each in zip(*pairs, strict=True)]
    ratio = statistics.median(later / earlier for earlier, later in pairs)
    rows = [
        ("", "samples/s (median)", "target"),
        (first[0], f"{speeds[0]:.0f}", ""),
        (second[0], f"{speeds[1]:.0f}", ""),
        ("ratio (median of rounds)", f"{ratio:.3f}", f">= {target:g}"),
    ]
    return Measured(rows, {"samples_per_s": pairs, "ratio": ratio, "target": target})


def _samples_per_s(*overrides: str) -> float:
    """Of EDP with one worker, between its steps 20 and 100."""
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder), "edp") as cluster:
        flags = ("--workload", f"{OWN_DATA}:images")
        settings = (f"batch_size={BATCH}", f"num_epochs={NEVER}", "track_gradients=false")
        cluster.serve(*settings, *overrides, flags=flags)
        cluster.work(1, program=(str(get_algorithm("edp").worker), *flags))
        cluster.wait_for_step(100)
        steps = {line.record.step: seconds_of(line) for line in steps_of(cluster.run)}
        return 80 * BATCH / (steps[100] - steps[20])


def ways(_: int) -> Measured:
    """Train the example of a model of one's own by every way, and kill one of the workers in mid-run."""
    rows: list[Sequence[str]] = [
        ("way", "workers", "steps", "samples", "train loss", "validation loss")
    ]
    results = {}
    for way, start in WAYS.items():
        for num_workers in NUM_WORKERS:
            with tempfile.TemporaryDirectory() as folder, Processes(Path(folder)) as processes:
                summary = _with_a_kill(processes, start(processes, num_workers))
            final = summary.final
            losses = [
                "" if each is None else f"{each:.4f}" for each in (final.train_loss, final.val_loss)
            ]
            of_samples = f"{summary.samples_applied:,} of {EPOCHS * summary.train_samples:,}"
            rows.append((way, str(num_workers), f"{summary.steps:,}", of_samples, *losses))
            results[f"{way}, {num_workers}"] = summary.model_dump(mode="json")
            say(" · ".join(rows[-1]))
    return Measured(rows, results)


def _launched(what: str, target: str, processes: Processes, num_workers: int) -> "Started":
    flags = ("--local", "--no-tmux", "--workers", str(num_workers), what, str(OWN_MODEL / target))
    settings = (f"port={free_port()}", f"num_epochs={EPOCHS}", "threads=1", "learning_rate=0.001")
    child = processes.start(
        *(sys.executable, "-m", "smolcluster.cli", "launch", "syncps", *flags),
        *("--override", *settings, "optimizer=adam", "gradient_clipping.enabled=false"),
        forked=False,
    )
    name = "worker.py" if what == "--workload" else target
    return Started(child, lambda: _leaf(child, name).kill())


def _orchestrated(processes: Processes, num_workers: int) -> "Started":
    program, port = str(OWN_MODEL / "orchestrate.py"), ("--master-port", str(free_port()))

    def worker(number: int) -> Child:
        options = (*port, "--gpu-id", str(number))
        return processes.start(sys.executable, program, "worker", *options, forked=False)

    how = ("--workers", str(num_workers), "--epochs", str(EPOCHS))
    owner = processes.start(sys.executable, program, *port, *how, forked=False)
    workers = [worker(number) for number in range(num_workers)]

    def kill() -> None:
        workers[0].kill()
        workers[0].wait()
        worker(0)

    return Started(owner, kill)


@dataclass(frozen=True)
class Started:
    """A run's first process, and what kills one of its workers, which comes back."""

    owner: Child
    kill: Callable[[], None]


def _leaf(above: Child, name: str) -> psutil.Process:
    """A process below, of that program, which has none below it: no supervisor."""
    for process in psutil.Process(above.process.pid).children(recursive=True):
        is_named = any(part.endswith(name) for part in process.cmdline())
        if is_named and not process.children():
            return process
    raise SystemExit(f"{name} does not run")


def _with_a_kill(processes: Processes, started: Started) -> Summary:
    """Let the run go on to its end; a worker is killed after some steps."""
    deadline = time.monotonic() + WAYS_LIMIT_S
    while not _has_come_to(processes.runs, KILLED_AT):
        if started.owner.process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(started.owner.output)
        time.sleep(0.05)
    started.kill()
    if started.owner.process.wait(WAYS_LIMIT_S):
        raise SystemExit(started.owner.output)
    return read_summary(find_run(processes.runs).summary)


def _has_come_to(runs: Path, step: int) -> bool:
    with suppress(OSError, SmolclusterError):
        return len(steps_of(find_run(runs))) >= step
    return False


WAYS: Mapping[str, Callable[[Processes, int], Started]] = MappingProxyType(
    {
        "named": partial(_launched, "--workload", "train.py:workload"),
        "orchestrator": _orchestrated,
        "attach": partial(_launched, "--script", "loop.py"),
    }
)
PARTS: Mapping[str, Callable[[int], Measured]] = MappingProxyType(
    {"restart": restart, "attach": attach, "served": served, "prefetch": prefetch, "ways": ways}
)


def main() -> None:
    parser = argparse.ArgumentParser(description="What training a model of one's own costs.")
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    measured = PARTS[options.part](options.rounds)
    title = f"own model: {options.part}"
    report(title, measured.rows, measured.results, as_json=options.json)


if __name__ == "__main__":
    main()
