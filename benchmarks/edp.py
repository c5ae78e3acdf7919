"""EDP on this machine: its speed against one process, and accuracy against the staleness exponent.

Every cluster is what `--local` starts: a process each for the server and the workers, with one compute
thread each, from the files `server.py` and `worker.py`; runs and secret lie in a folder of their own. On
Linux the processes are forked from one that has imported torch, which only makes them start sooner.

* `throughput`: samples/s with 1, 2 and 3 workers and in a single process (with one thread, the reference,
  and `unbound`, with PyTorch's choice of threads); a model is named by its data and hidden width. The time
  is from the first to the last applied step by the timestamps in `metrics.jsonl`; nothing is evaluated in
  between. Each round runs everything once, in alternating order; a ratio is the median of the rounds'
  ratios. The server's CPU time is read from outside about every 20 ms and interpolated at the first and
  the last step, so that start-up and the end are left out. Workers and server share the machine's cores.
* `staleness`: validation accuracy of 3 workers against `a` in s(τ) = (1+τ)^-a, with fp32 and int8, for a
  few seeds (weights, split and order), and of the single process with the same seeds; τ is the mean over
  all pushes, the bytes are those that the server's sockets received.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import psutil

from common import (
    DEADLINE_S,
    DEFAULT_DATA,
    NEVER,
    PROJECT,
    Cluster,
    cpu_seconds,
    report,
    say,
    seconds_of,
    steps_of,
)
from processes import Child
from smolcluster.configs.resolve import load_settings
from smolcluster.observability.sinks.jsonl import MetricLine
from smolcluster.runs.summary import Summary, read_summary

NUM_WORKERS = (1, 2, 3)
EXPONENTS = (0.0, 0.5, 1.0)
CODECS = ("fp32", "int8")
FIRST_SEED = 42
SAMPLE_EVERY_S = 0.02
WORKERS_OWN = ("dataset.root=", "dataset.download=")
"""Overrides that a worker takes, too."""


@dataclass(frozen=True)
class Run:
    """A finished run; `cpu` are pairs of a time since 1970 and the server's CPU seconds until then."""

    summary: Summary
    steps: list[MetricLine]
    cpu: list[tuple[float, float]]

    @property
    def samples_per_s(self) -> float:
        """Samples applied after the first step, a second."""
        first, last = self.steps[0], self.steps[-1]
        applied = [line.record.values["samples_applied"] for line in (first, last)]
        return (applied[1] - applied[0]) / (seconds_of(last) - seconds_of(first))

    @property
    def mean_staleness(self) -> float:
        return statistics.fmean(line.record.values.get("staleness", 0.0) for line in self.steps)

    @property
    def cpu_s_per_push(self) -> float:
        """The server's CPU seconds from the first to the last applied push, a push."""
        times, seconds = zip(*self.cpu, strict=True)
        start, stop = np.interp([seconds_of(self.steps[i]) for i in (0, -1)], times, seconds)
        return float(stop - start) / (len(self.steps) - 1)


class Bench:
    """Makes runs, one after the other, in folders below `folder`; MNIST, if any, lies in `data`."""

    def __init__(self, folder: Path, data: Path) -> None:
        self.data = data
        self._folder = folder
        self._num_runs = 0

    def cluster(self, num_workers: int, overrides: Sequence[str]) -> Run:
        own = [text for text in overrides if text.startswith(WORKERS_OWN)]
        with self._next(num_workers) as cluster:
            cluster.serve(*overrides, f"min_workers={num_workers}")
            for worker_id in range(1, num_workers + 1):
                cluster.work(worker_id, *own)
            return finished(cluster)

    def single(self, overrides: Sequence[str]) -> Run:
        with self._next() as cluster:
            train = str(PROJECT / "src" / "smolcluster" / "train.py")
            flags = [word for text in overrides for word in ("--override", text)]
            cluster.owner = cluster.start(sys.executable, train, "--config", "digits", *flags)
            return finished(cluster)

    def _next(self, num_workers: int = 1) -> Cluster:
        self._num_runs += 1
        return Cluster(self._folder / str(self._num_runs), "edp", num_workers, forked=True)


def finished(cluster: Cluster) -> Run:
    """The run of processes that must all end well."""
    cpu = watch(cluster.owner)
    run = cluster.finish()
    for child in cluster.children:
        if code := child.wait():
            raise SystemExit(f"{child.argv} ended with {code}: {child.output}")
    return Run(read_summary(run.summary), steps_of(run), cpu)


def watch(child: Child) -> list[tuple[float, float]]:
    """Wait for the end of the process, noting its CPU time on the way."""
    noted: list[tuple[float, float]] = []
    end = time.monotonic() + DEADLINE_S
    while child.process.poll() is None and time.monotonic() < end:
        with suppress(psutil.Error):  # it may have ended between two lines
            noted.append((time.time(), cpu_seconds(child.process.pid)))
        time.sleep(SAMPLE_EVERY_S)
    return noted


def tasks(data: Path, num_epochs: dict[str, int]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The data sets that are there, with the overrides that train on them."""
    yield "digits", (f"num_epochs={num_epochs['digits']}",)
    if (data / "MNIST" / "raw").is_dir():
        place = (f"dataset.root={data}", "dataset.download=false")
        yield "MNIST", ("dataset.name=MNIST", *place, f"num_epochs={num_epochs['MNIST']}")


def throughput(bench: Bench, rounds: int, *, quick: bool) -> list[dict[str, object]]:
    """Measure speeds: a dict for each model and number of processes."""
    small, *larger = tasks(bench.data, {"digits": 10 if quick else 60, "MNIST": 3})
    name, overrides = small if quick or not larger else larger[0]
    models = {
        f"{small[0]} 128": small[1],
        f"{name} 2048": (*overrides, "model.hidden=2048"),
    }
    measured: list[dict[str, object]] = []
    for model, model_overrides in models.items():
        overrides = (*model_overrides, f"eval_steps={NEVER}")
        runs: dict[str, list[Run]] = {label: [] for label in labels()}
        for number in range(rounds):
            for label in reversed(runs) if number % 2 else runs:
                run = one_speed(bench, label, overrides)
                runs[label].append(run)
                say(f"throughput: {model}: {label}: {run.samples_per_s:,.0f} samples/s")
        measured += speeds(model, runs)
    return measured


def labels() -> list[str]:
    """What is measured in each round; the first one is the reference."""
    clusters = [f"{count} worker{'s'[: count > 1]}" for count in NUM_WORKERS]
    return ["single", "unbound", *clusters]


def one_speed(bench: Bench, label: str, overrides: Sequence[str]) -> Run:
    """One run of what `label` says."""
    if label == "single":
        return bench.single((*overrides, "threads=1"))
    if label == "unbound":
        return bench.single(overrides)
    return bench.cluster(int(label.split(maxsplit=1)[0]), overrides)


def speeds(model: str, runs: dict[str, list[Run]]) -> Iterator[dict[str, object]]:
    """Medians over the rounds, and of the ratios to the round's single process."""
    reference = [run.samples_per_s for run in next(iter(runs.values()))]
    for label, of_label in runs.items():
        rates = [run.samples_per_s for run in of_label]
        ratios = [rate / other for rate, other in zip(rates, reference, strict=True)]
        found: dict[str, object] = {
            "model": model,
            "processes": label,
            "samples_per_s": round(statistics.median(rates), 1),
            "ratio_to_single": round(statistics.median(ratios), 3),
            "ratios": [round(ratio, 3) for ratio in ratios],
        }
        if of_label[0].summary.workers:
            cpu_s = statistics.median(run.cpu_s_per_push for run in of_label)
            found["server_cpu_s_per_push"] = round(cpu_s, 6)
            found["mean_staleness"] = mean_staleness(of_label)
        yield found


def throughput_rows(measured: Sequence[dict[str, object]]) -> list[tuple[str, ...]]:
    """Lay the speeds out in rows, the first one the heading."""
    heading = ("model", "processes", "samples/s", "ratio", "min-max", "CPU a push", "τ")
    rows: list[tuple[str, ...]] = [heading]
    for found in measured:
        ratios = found["ratios"]
        spread = f"{min(ratios):.2f}-{max(ratios):.2f}" if isinstance(ratios, list) else ""
        cpu_s = found.get("server_cpu_s_per_push")
        rows.append(
            (
                str(found["model"]),
                str(found["processes"]),
                f"{found['samples_per_s']:,.0f}",
                f"{found['ratio_to_single']:.2f}",
                spread,
                f"{cpu_s * 1e3:.2f} ms" if isinstance(cpu_s, float) else "",
                str(found.get("mean_staleness", "")),
            )
        )
    return rows


def staleness(bench: Bench, num_seeds: int, *, quick: bool) -> list[dict[str, object]]:
    """Measure accuracies: a dict for each data set, codec and exponent."""
    shipped_epochs = load_settings("edp", "digits", environ={}).train.num_epochs
    epochs = {"digits": 10 if quick else shipped_epochs, "MNIST": 5}
    chosen = list(tasks(bench.data, epochs))[: 1 if quick else None]
    measured: list[dict[str, object]] = []
    for dataset, overrides in chosen:
        runs: dict[tuple[str, float | None], list[Run]] = {}
        for seed in range(FIRST_SEED, FIRST_SEED + num_seeds):
            for codec, exponent in [("single", None), *settings_of_staleness()]:
                run = one_accuracy(bench, codec, exponent, (*overrides, f"seed={seed}"))
                runs.setdefault((codec, exponent), []).append(run)
                say(
                    f"staleness: {dataset}: seed {seed}, {codec}, a {exponent}: "
                    f"accuracy {accuracy(run):.4f}, mean τ {run.mean_staleness:.2f}"
                )
        measured += accuracies(dataset, runs)
    return measured


def settings_of_staleness() -> list[tuple[str, float | None]]:
    """Codecs and exponents in the order in which they are run for each seed."""
    return [(codec, exponent) for exponent in EXPONENTS for codec in CODECS]


def one_accuracy(bench: Bench, codec: str, exponent: float | None, overrides: Sequence[str]) -> Run:
    """One run to its end: of the single process when there is no exponent."""
    if exponent is None:
        return bench.single((*overrides, "threads=1"))
    rule = (f"codec={codec}", f"staleness.exponent={exponent}")
    return bench.cluster(max(NUM_WORKERS), (*overrides, *rule))


def accuracy(run: Run) -> float:
    return run.summary.final.val_accuracy or 0.0


def accuracies(
    dataset: str, runs: dict[tuple[str, float | None], list[Run]]
) -> Iterator[dict[str, object]]:
    """Medians over the seeds."""
    for (codec, exponent), of_setting in sorted(runs.items(), key=str):
        found = [accuracy(run) for run in of_setting]
        losses = [run.summary.final.val_loss or 0.0 for run in of_setting]
        yield {
            "dataset": dataset,
            "codec": codec,
            "exponent": exponent,
            "val_accuracy": round(statistics.median(found), 4),
            "val_accuracies": [round(value, 4) for value in found],
            "val_loss": round(statistics.median(losses), 4),
            "mean_staleness": mean_staleness(of_setting),
            "bytes_received": round(
                statistics.fmean(run.summary.bytes.received for run in of_setting)
            ),
        }


def staleness_rows(measured: Sequence[dict[str, object]]) -> list[tuple[str, ...]]:
    """Lay the accuracies out in rows, the first one the heading."""
    heading = ("data", "codec", "a", "median", "min-max", "loss", "τ", "MB in")
    rows: list[tuple[str, ...]] = [heading]
    for found in measured:
        values = found["val_accuracies"]
        spread = f"{min(values):.4f}-{max(values):.4f}" if isinstance(values, list) else ""
        received = found["bytes_received"]
        rows.append(
            (
                str(found["dataset"]),
                str(found["codec"]),
                "" if found["exponent"] is None else str(found["exponent"]),
                f"{found['val_accuracy']:.4f}",
                spread,
                f"{found['val_loss']:.4f}",
                f"{found['mean_staleness']:.2f}",
                f"{received / 1e6:.1f}" if isinstance(received, int) else "",
            )
        )
    return rows


def mean_staleness(runs: Sequence[Run]) -> float:
    return round(statistics.fmean(run.mean_staleness for run in runs), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of EDP, and accuracy against staleness.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--part", choices=("throughput", "staleness", "all"), default="all")
    parser.add_argument("--rounds", type=int, help="paired rounds of throughput; default: 5")
    parser.add_argument("--seeds", type=int, help="seeds of staleness; default: 5")
    parser.add_argument(
        "--data", type=Path, default=DEFAULT_DATA, metavar="DIR", help="folder that holds MNIST/raw"
    )
    parser.add_argument("--quick", action="store_true", help="digits only, short, once each")
    arguments = parser.parse_args()
    once = 1 if arguments.quick else 5
    rounds, num_seeds = arguments.rounds or once, arguments.seeds or once
    results: dict[str, object] = {"cores": os.cpu_count(), "load_before": os.getloadavg()}
    tables: list[tuple[str, list[tuple[str, ...]]]] = []
    with TemporaryDirectory(prefix="smolcluster-edp-") as folder:
        bench = Bench(Path(folder), arguments.data.absolute())
        if arguments.part != "staleness":
            speed = throughput(bench, rounds, quick=arguments.quick)
            results["throughput"] = speed
            tables.append((f"Throughput, median of {rounds} rounds", throughput_rows(speed)))
        if arguments.part != "throughput":
            found = staleness(bench, num_seeds, quick=arguments.quick)
            results["staleness"] = found
            title = f"Accuracy against a, 3 workers, median of {num_seeds} seeds"
            tables.append((title, staleness_rows(found)))
    results["load_after"] = os.getloadavg()
    if arguments.json:
        report("", [], results, as_json=True)
        return
    for title, rows in tables:
        report(title, rows, results, as_json=False)
    loads = f"{results['load_before']} before, {results['load_after']} after"
    print(f"{results['cores']} cores; load average (1, 5, 15 minutes) {loads}")


if __name__ == "__main__":
    main()
