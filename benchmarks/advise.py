"""What is predicted of clusters beside what they do: machines of a stated speed, links of a stated bandwidth.

Each shape is a server and workers, a process and a network namespace each (Linux, root). Their links are
measured as `smolcluster advise` measures them; batches take a stated time (paced.py), so that a few cores
are enough. Then each algorithm trains for `--seconds`, after `--warm-up` that do not count, and its samples
a second are compared with what its `costs.py` predicts. What is trained is a perceptron of 1.8 million
weights on the digits, in batches of 4.

    python benchmarks/advise.py
    python benchmarks/advise.py --shapes home far --algorithms edp --seconds 30
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import exchange
import paced
from common import NEVER, free_port, report, say
from exchange import Children, hosts_of
from paced import Machine
from smolcluster.algorithms.planning.costs import Forecast, Job, Site, costs_of
from smolcluster.configs.resolve import load_settings
from smolcluster.configs.schema import Settings
from smolcluster.configs.spec import algorithms, get_algorithm
from smolcluster.launch.advise.command import site_of
from smolcluster.launch.advise.speed import Speed
from smolcluster.launch.host import Host
from smolcluster.launch.links import measure_all_ways
from smolcluster.runs.files import or_none
from smolcluster.runs.paths import find_run
from smolcluster.runs.status import read_status

BATCH_SIZE = 4
NUM_PARAMS = 65 * 24_000 + 24_001 * 10
UPDATE_S = 0.01
"""Clipping and an Adam step of so many weights on a core; of workers it is part of their pace."""
OWN_KEYS = {"codec_up": "int4", "codec_down": "int4"}
"""Of algorithms that have local steps, as the shipped configuration has them."""
START_S = 240.0


@dataclass(frozen=True)
class Shape:
    """A cluster: seconds a batch and Mbit/s of each worker, and of the server's link."""

    name: str
    title: str
    workers: tuple[tuple[float, float], ...]
    server_mbit: float


SHAPES = (
    Shape(
        "home",
        "3 of 0.35 s and 50 Mbit/s, one of 0.9 s and 10",
        (*[(0.35, 50.0)] * 3, (0.9, 10.0)),
        50.0,
    ),
    Shape("cable", "2 of 0.35 s, 200 Mbit/s", ((0.35, 200.0),) * 2, 200.0),
    Shape("wifi", "3 of 0.5 s, 20 Mbit/s", ((0.5, 20.0),) * 3, 20.0),
    Shape(
        "unequal", "one of 0.2 s, 2 of 1 s, 100 Mbit/s", ((0.2, 100.0), *[(1.0, 100.0)] * 2), 100.0
    ),
    Shape("far", "2 of 0.5 s and 5 Mbit/s", ((0.5, 5.0),) * 2, 50.0),
)


class InNamespace(Host):
    """A host of `smolcluster advise` that is a network namespace of this machine."""

    def argv(self, script: str, **_: bool) -> list[str]:
        return ["ip", "netns", "exec", str(self.destination), "sh", "-c", script]


@dataclass(frozen=True)
class Result:
    """Samples a second of an algorithm on a shape."""

    shape: str
    algorithm: str
    predicted: float
    measured: float
    alone: float
    broken: float
    """Share of the batches that took longer than their machine's pace: these cores were too busy for it."""

    @property
    def off(self) -> float:
        return self.predicted / self.measured - 1


def machines_of(shape: Shape, hosts: Sequence[exchange.Host]) -> list[Machine]:
    """The server, then the workers, whose links are shaped here."""
    links = [shape.server_mbit, *(mbit for _, mbit in shape.workers)]
    for place, (host, mbit) in enumerate(zip(hosts, links, strict=True), 1):
        exchange.shape(host, place, mbit)
    names = ["server", *(f"worker{number}" for number in range(1, len(hosts)))]
    times = [0.0, *(batch_s for batch_s, _ in shape.workers)]
    return [Machine(*each) for each in zip(names, hosts, times, strict=True)]


def files(folder: Path, machines: Sequence[Machine]) -> list[str]:
    """Write the configuration of a run; returns the server's arguments, of which a worker takes two."""
    cluster = {"checkpoint_steps": None, "codec": "int8", **OWN_KEYS}
    train = {
        "model": {"hidden": 24_000, "input_dim": 64},
        "dataset": {"name": "digits"},
        "batch_size": BATCH_SIZE,
        "num_epochs": 1000,
        "eval_steps": NEVER,
        "track_gradients": False,
    }
    return paced.write_files(folder, machines, cluster, train)


def measured_site(machines: Sequence[Machine], settings: Settings) -> Site:
    """What `smolcluster advise` finds out of these machines."""
    server, *workers = (InNamespace(machine.name, machine.host.namespace) for machine in machines)
    ways = measure_all_ways(server, workers, settings.cluster.host_ip, free_port(), say)
    speeds = {
        machine.name: Speed(
            compute_s=(machine.batch_s,) * 3,
            update_s=0.0,
            batch_size=BATCH_SIZE,
            num_params=NUM_PARAMS,
            num_samples=1438,
        )
        for machine in machines[1:]
    }
    return replace(site_of(settings, speeds, ways), apply_s=UPDATE_S)


def train(
    machines: Sequence[Machine], algorithm: str, folder: Path, warm_up_s: float, seconds: float
) -> tuple[float, float]:
    """Samples a second of a real run, and the share of batches that took too long."""
    arguments, (server, *workers) = files(folder, machines), machines
    overrides = ["--override", "threads=1", f"secret_file={folder / 'secret'}"]
    with Children() as children:
        children.start(paced.serve, server, folder, algorithm, [*arguments, *overrides])
        for number, worker in enumerate(workers, 1):
            own = [str(number), worker.name, *arguments[:2]]
            children.start(paced.work, worker, folder, algorithm, BATCH_SIZE, own)
        wait_for(lambda: samples(folder)[1] > 0, START_S)
        time.sleep(warm_up_s)
        began_s, before = next_samples(folder)
        time.sleep(seconds)
        ended_s, after = next_samples(folder)
        return (after - before) / (ended_s - began_s), paced.share_broken(folder, workers)


def samples(folder: Path) -> tuple[float, int]:
    """When the server wrote its status last, in seconds since 1970, and the samples that were applied
    then."""
    if not (folder / "runs" / "latest").exists():
        return 0.0, 0
    status = or_none(read_status, find_run(folder / "runs").status)
    return (0.0, 0) if status is None else (status.updated_at.timestamp(), status.samples_applied)


def next_samples(folder: Path) -> tuple[float, int]:
    """The same as soon as more were applied: rounds apply many at once."""
    _, before = samples(folder)
    wait_for(lambda: samples(folder)[1] > before, START_S)
    return samples(folder)


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise SystemExit(f"nothing was trained within {seconds:g} s")
        time.sleep(0.2)


def measure(shape: Shape, arguments: argparse.Namespace) -> Iterator[Result]:
    """Each algorithm on a shape."""
    with hosts_of("namespaces", len(shape.workers)) as hosts:
        machines = machines_of(shape, hosts)
        with TemporaryDirectory() as place:
            folder = Path(place)
            files(folder, machines)
            site = measured_site(machines, settings_in(folder))
        for algorithm in arguments.algorithms:
            with TemporaryDirectory() as place:
                folder = Path(place)
                measured, broken = train(
                    machines, algorithm, folder, arguments.warm_up, arguments.seconds
                )
                predicted = predict(site, algorithm, settings_in(folder))
            alone = max(BATCH_SIZE / worker.step_s for worker in site.workers)
            result = Result(shape.name, algorithm, predicted.samples_per_s, measured, alone, broken)
            say(
                f"{shape.name} {algorithm}: {result.predicted:.2f} predicted, {measured:.2f} measured"
            )
            yield result


def settings_in(folder: Path) -> Settings:
    return load_settings(folder / "cluster.yaml", folder / "train.yaml", environ={})


def predict(site: Site, algorithm: str, settings: Settings) -> Forecast:
    model = costs_of(get_algorithm(algorithm))
    if model is None:
        raise SystemExit(f"{algorithm} predicts nothing")
    return model.predict(site, Job(NUM_PARAMS, 1438), settings)


def rows(results: Sequence[Result], titles: Mapping[str, str]) -> list[list[str]]:
    head = ["cluster", "algorithm", "predicted", "measured", "off", "fastest alone", "too slow"]
    return [
        head,
        *(
            [
                *(titles[each.shape], each.algorithm),
                *(f"{each.predicted:.1f}", f"{each.measured:.1f}", f"{each.off:+.0%}"),
                *(f"{each.alone:.1f}", f"{each.broken:.0%}"),
            ]
            for each in results
        ),
    ]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    predicting = [name for name, spec in algorithms().items() if spec.costs is not None]
    names = [shape.name for shape in SHAPES]
    parser.add_argument("--shapes", nargs="+", default=names, choices=names)
    parser.add_argument("--algorithms", nargs="+", default=predicting, choices=predicting)
    parser.add_argument("--warm-up", type=float, default=15.0, metavar="S")
    parser.add_argument("--seconds", type=float, default=40.0, metavar="S")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    chosen = [shape for shape in SHAPES if shape.name in arguments.shapes]
    results = [result for shape in chosen for result in measure(shape, arguments)]
    title = f"samples a second, load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores"
    document = {"results": [asdict(each) for each in results]}
    table = rows(results, {shape.name: shape.title for shape in SHAPES})
    report(title, table, document, as_json=arguments.json)


if __name__ == "__main__":
    main()
