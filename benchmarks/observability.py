"""What it costs to be observed, with everything on: files, status, spans, Weights & Biases offline, /metrics.

* `calls`: microseconds a step that reports take of the training thread: of a worker, which times its phases
  and is asked for a report every second; of a server, which writes down every step. The aim is 50.
* `step`: one process trains a GPT whose step takes about 100 ms, everything on against nothing on, in
  processes of their own, side by side in each round. The aim is a ratio below 1.03.
* `week`: what a week of a step a second leaves on the disk of a server and three workers, reckoned from the
  sizes of lines that a short run has written. The aim is 1 GB.
"""

import argparse
import json
import logging
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from common import free_port, report
from smolcluster.algorithms.context import ServerContext
from smolcluster.algorithms.observed import metrics_served
from smolcluster.configs.resolve import load_settings
from smolcluster.configs.schema import Settings
from smolcluster.observability.logs import NodeLog
from smolcluster.observability.metrics import Metrics
from smolcluster.observability.sinks.wandb import NUM_STEPS_FIRST, STEP_EVERY_S
from smolcluster.observability.spans import MAX_NBYTES
from smolcluster.runs.events import EventLog
from smolcluster.runs.files import NUM_OLD_FILES
from smolcluster.runs.launched import Process
from smolcluster.runs.paths import RunPaths, create_run
from smolcluster.server.process_stats import KEPT_EVERY_S, ProcessStats
from smolcluster.server.records import Records, open_records
from smolcluster.server.report import LAYERED_EVERY_S, NUM_LAYERED_FIRST, Report
from smolcluster.training.build import TrainingContext, build
from smolcluster.training.loop import training_steps
from smolcluster.utils.meter import PHASES, Meter

RUN_ID = "observed"
WARM_UP = 3
WEEK_S = 7 * 24 * 3600
LINES = 3000
"""Steps from which sizes are reckoned; enough for lines without norms of layers."""
NUM_PROCESSES = 4
LINK_NBYTES = 80
"""Of a worker's line, for what a server's lacks: the round trip, the clock, the codec."""
GPT_LAYERS = 76
"""Parameters of a GPT of six layers, whose norms have a name each."""
NUM_FILES = NUM_OLD_FILES + 1
SMALL = ("model.hidden=32",)
TEXT = ("batch_size=8", "model.num_layers=4", "model.model_dim=128", "model.max_seq_len=128")


@contextmanager
def observed(
    settings: Settings, training: TrainingContext, folder: Path, *, on: bool
) -> Iterator[Report]:
    """A run's report, with everything on or nothing."""
    run = settings.run_config(RUN_ID, "single")
    log = NodeLog("trainer", "here")
    paths = create_run(folder, run.run_id)
    if not on:
        events = EventLog(paths.events, "off", warn=print)
        records = Records(Metrics(), events, "off")
        yield _context(settings, training, records, log.logger).new_report()
        events.close()
        return
    with (
        open_records(paths, run, role="trainer", node="here", log=log, progress=None) as records,
        metrics_served(
            settings,
            Process(role="trainer", node="here"),
            training.replica.meter,
            log.logger,
            run_id=lambda: RUN_ID,
            status=lambda: None if records.status is None else records.status.newest,
        ),
        scraped(settings.cluster.metrics_port),
    ):
        yield _context(settings, training, records, log.logger).new_report()


def _context(
    settings: Settings, training: TrainingContext, records: Records, log: logging.Logger
) -> ServerContext:
    return ServerContext(
        settings=settings,
        run=settings.run_config(RUN_ID, "single"),
        training=training,
        node="here",
        secret=None,
        incarnation=records.incarnation,
        records=records,
        log=log,
    )


@contextmanager
def scraped(port: int | None) -> Iterator[None]:
    """Prometheus's part: everything is asked for once a second."""
    done = threading.Event()

    def scrape() -> None:
        while not done.wait(1.0):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
                answer.read()

    thread = threading.Thread(target=scrape, daemon=True)
    thread.start()
    yield
    done.set()
    thread.join()


def week_bytes() -> dict[str, float]:
    """Bytes that a week leaves: of metrics, and of Weights & Biases' files; spans and logs are rotated."""
    with TemporaryDirectory() as folder:
        server_us(LINES, Path(folder))
        run = RunPaths(Path(folder) / RUN_ID)
        lines = [(json.loads(line), len(line)) for line in run.metrics.open()]
        [log] = run.root.glob("wandb/offline-run-*/*.wandb")
        wandb_row = log.stat().st_size / len(lines)
    steps = [(line, size) for line, size in lines if line["kind"] == "step"]
    layered = statistics.mean(size for _, size in steps[:NUM_LAYERED_FIRST])
    plain = statistics.mean(size for _, size in steps[NUM_LAYERED_FIRST + 1 :])
    vital = statistics.mean(size for line, size in lines if line["kind"] == "server") + LINK_NBYTES
    num_layers = sum(name.startswith("grad_norm/") for name in steps[0][0])
    per_layer = (layered - plain) / num_layers
    num_vitals = NUM_PROCESSES * WEEK_S / KEPT_EVERY_S
    num_layered = NUM_LAYERED_FIRST + WEEK_S / LAYERED_EVERY_S
    num_rows = NUM_STEPS_FIRST + WEEK_S / STEP_EVERY_S
    return {
        "steps": plain * WEEK_S,
        "layers": per_layer * GPT_LAYERS * num_layered,
        "process_stats": vital * num_vitals,
        "wandb": wandb_row * (num_rows + 2 * num_vitals),
        "spans": NUM_FILES * MAX_NBYTES,
    }


def settings_for(train: str, folder: Path, *overrides: str) -> Settings:
    """What one process trains, with a port of its own."""
    places = (f"metrics_port={free_port()}", f"runs_dir={folder}")
    return load_settings("edp", train, None, [*places, *overrides], environ={}, local=True)


def bench_of(settings: Settings) -> TrainingContext:
    """What is trained, on one thread of the CPU."""
    torch.set_num_threads(1)
    place = settings.node.dataset
    return build(settings.train, settings.cluster.seed, place, torch.device("cpu"))


def server_us(num_steps: int, folder: Path) -> float:
    """Microseconds that a server's step takes to be reported, the mean of so many."""
    settings = settings_for("digits", folder, "num_epochs=1000000", *SMALL)
    training = bench_of(settings)
    costs = []
    with observed(settings, training, folder, on=True) as made:
        steps = training_steps(training, settings.train, layer_norms=made.layer_norms)
        for step in islice(steps, num_steps):
            began = time.perf_counter()
            made.step_taken(step)
            made.tick()
            costs.append(time.perf_counter() - began)
    return 1e6 * statistics.mean(costs[WARM_UP:])


def worker_us(num_steps: int) -> float:
    """Microseconds that a worker's step takes to be timed, while a thread asks for reports."""
    meter, done = Meter(), threading.Event()
    process_stats = ProcessStats(meter)

    def ask() -> None:
        while not done.wait(1.0):
            process_stats.report()

    thread = threading.Thread(target=ask)
    thread.start()
    began = time.perf_counter()
    for _ in range(num_steps):
        for phase in PHASES:
            with meter(phase):
                pass
        meter.step_done(32)
    cost = (time.perf_counter() - began) / num_steps
    done.set()
    thread.join()
    return 1e6 * cost


def step_s(num_steps: int, *, on: bool) -> float:
    """Seconds of a step of a GPT, the median of so many, in this process."""
    with TemporaryDirectory() as folder:
        settings = settings_for("stdlib", Path(folder), "num_epochs=1000", *TEXT)
        training = bench_of(settings)
        costs = []
        with observed(settings, training, Path(folder), on=on) as made:
            steps = training_steps(training, settings.train, layer_norms=made.layer_norms)
            for _ in range(num_steps):
                began = time.perf_counter()
                made.step_taken(next(steps))
                made.tick()
                costs.append(time.perf_counter() - began)
    return statistics.median(costs[len(costs) // 2 :])  # by then all that is loaded for it has been


def step_s_of_a_process(num_steps: int, *, on: bool) -> float:
    """The same in a process of its own."""
    child = [sys.executable, __file__, "--steps", str(num_steps), "--child", "on" if on else "off"]
    done = subprocess.run(child, check=True, capture_output=True, text=True, timeout=600)
    return float(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", choices=("on", "off"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(step_s(args.steps, on=args.child == "on")))
        return
    with TemporaryDirectory() as folder:
        worker, server = worker_us(200_000), server_us(100 * args.steps, Path(folder))
    week = week_bytes()
    pairs = []
    for number in range(args.rounds):
        order = (True, False) if number % 2 else (False, True)
        pair = {on: step_s_of_a_process(args.steps, on=on) for on in order}
        pairs.append((pair[False], pair[True]))
    off, on = (statistics.median(side) for side in zip(*pairs, strict=True))
    ratio = statistics.median(with_all / without for without, with_all in pairs)
    rows = [
        ("what", "measured", "aim"),
        ("a worker's step is timed", f"{worker:.1f} µs", "50 µs"),
        ("a server's step is reported", f"{server:.1f} µs", "50 µs"),
        (
            f"a step of {1e3 * off:.0f} ms, everything on",
            f"{1e3 * on:.1f} ms, {ratio:.3f}x",
            "1.03x",
        ),
        (
            "a week at a step a second",
            f"{sum(week.values()) / 1e6:.0f} MB: "
            + ", ".join(f"{name} {size / 1e6:.0f}" for name, size in week.items()),
            "1,000 MB",
        ),
    ]
    results = {"week_bytes": week} | {
        "worker_us": worker,
        "server_us": server,
        "off_s": off,
        "on_s": on,
        "ratio": ratio,
    }
    report("What it costs to be observed", rows, results, as_json=args.json)


if __name__ == "__main__":
    main()
