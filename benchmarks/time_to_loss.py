"""Time to a validation loss on five unequal hosts, beside the fastest machine alone.

A server and four workers, a process and a network namespace each (Linux, root), with links of `--mbit`
Mbit/s in both directions; the last worker's is a fifth of that. A batch of 4 x 64 bytes takes 0.35 s on
three machines and 0.9 s on the last one (see paced.py). What is trained is a GPT of 1.84 million parameters
on the bytes of tiny Shakespeare, at a constant learning rate after 50 steps. The target is the loss that
one fast machine alone reaches in `--seconds`; an arm ends when it is there, or after `--limit` times as
long. Times begin with the first batch.

* One machine alone does nothing but compute: it trains as fast as it can here, and its time is 0.35 s a
  batch.
* DDP's arms learn on loopback as fast as they can here; their steps' times are measured on the machines
  and links (ddp.py). Their bytes are those of the timed steps, continued.
* All other arms are real runs. Their weights are those of checkpoints, whose losses are computed beside the
  run by this process, at the lowest priority, on the first 128 samples that are held out.

`--scale 2` makes everything twice as fast: batches, links, and the clock of the results, which are in the
seconds of `--scale 1`. A run in which more than 1% of the batches took longer than their pace is marked
with *: the machine that it ran on was too slow, or too busy, for it.

    python benchmarks/time_to_loss.py --arms one edp-int8 --seconds 120
    python benchmarks/time_to_loss.py --seeds 3 --seconds 600 --choose 180

Results of earlier calls under the same conditions stay in the files, and new ones join them.
"""

import argparse
import json
import math
import multiprocessing.forkserver
import os
import signal
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import numpy as np
import torch
from safetensors.torch import load_file

import ddp
import exchange
import paced
from common import DEFAULT_DATA, NEVER, PROJECT, report, say, seconds_of, steps_of
from exchange import Children, Host, bridge_name, hosts_of
from paced import Machine, read_computed, share_broken
from smolcluster.algorithms.DiLoCo.config import DiLoCoConfig
from smolcluster.runs.paths import find_run
from smolcluster.training.checkpoint import MODEL_FILE
from smolcluster.training.evaluate import evaluate, evaluation_of
from smolcluster.training.loop import training_steps

FAST_S, SLOW_S = 0.35, 0.9
NUM_WORKERS = 4
SLOWER_LINK = 5.0
BATCH_SIZE, LENGTH = 4, 64
TOKENS = BATCH_SIZE * LENGTH
NUM_HELD_OUT = 128
EVALUATE_EVERY = 28
"""Batches, 10 s of a fast machine."""
MOST_BROKEN = 0.01
LOOK_EVERY_S = 0.5
RESULTS = PROJECT / "benchmarks" / "results" / "time_to_loss"


@dataclass(frozen=True)
class Arm:
    """A way to train: an algorithm with overrides, a hook of DDP, or neither for one machine alone."""

    name: str
    title: str
    algorithm: str | None = None
    overrides: tuple[str, ...] = ()
    hook: str | None = None
    num_workers: int = NUM_WORKERS


def diloco() -> Iterator[Arm]:
    """Each of its modes; its rounds are planned for one epoch."""
    mode = DiLoCoConfig.model_fields.get("mode")
    for name in get_args(mode.annotation) if mode else ("sync",):
        for codec in ("int8", "int4"):
            stated = (f"mode={name}",) if mode else ()
            overrides = (*stated, f"codec_up={codec}", f"codec_down={codec}", "num_epochs=1")
            yield Arm(f"diloco-{name}-{codec}", f"DiLoCo {name} {codec}", "diloco", overrides)


ARMS = (
    Arm("one", "one fast machine alone"),
    Arm("ddp", "DDP, Gloo", hook=""),
    Arm("ddp-fast", "DDP without the slow machine", hook="", num_workers=NUM_WORKERS - 1),
    Arm("ddp-fp16", "DDP, fp16 hook", hook="fp16"),
    Arm("ddp-powersgd", "DDP, PowerSGD rank 4", hook="powersgd"),
    Arm("ddp-localsgd", "DDP, post_localSGD every 16", hook="localsgd"),
    Arm("syncps-int8", "SyncPS int8", "syncps", ("codec=int8",)),
    Arm("edp-int8", "EDP int8", "edp", ("codec=int8",)),
    *diloco(),
)


@dataclass(frozen=True)
class Point:
    """A validation loss, and what it took to get there."""

    seconds: float
    tokens: int
    nbytes: float
    loss: float


@dataclass(frozen=True)
class Run:
    """What came of an arm with one seed; `reached` is None when it did not reach the target.

    `computing`: the share of time in which each machine computed. `broken`: the share of batches that took
    longer than the machine's pace. `load`: how many processes wanted this machine's cores in the last minute.
    """

    arm: str
    seed: int
    learning_rate: float
    points: tuple[Point, ...]
    reached: Point | None
    tokens_per_s: float
    computing: Mapping[str, float] = field(default_factory=dict)
    broken: float = 0.0
    failure: str = ""
    scale: float = 1.0
    load: float = 0.0


@dataclass(frozen=True)
class Conditions:
    """What all results of a file have in common."""

    seconds: float
    limit: float
    mbit: float
    text: str
    optimizer: str


@dataclass(frozen=True)
class Order:
    """What one run is to be; it ends with the target, or after so many of the results' seconds."""

    seed: int
    learning_rate: float
    seconds: float
    target: float = -math.inf


@dataclass(frozen=True)
class Bench:
    """The hosts, and how fast all is here beside the times that are reported."""

    conditions: Conditions
    hosts: tuple[Host, ...]
    scale: float
    text: Path

    @property
    def machines(self) -> list[Machine]:
        """The server, then the workers; the slow one is the last."""
        names = ["server", "fast1", "fast2", "fast3", "slow"]
        times = [FAST_S] * NUM_WORKERS + [SLOW_S]
        return [
            Machine(name, host, batch_s / self.scale)
            for name, host, batch_s in zip(names, self.hosts, times, strict=True)
        ]

    def shape(self) -> None:
        """Give each host its link."""
        mbit = self.scale * self.conditions.mbit
        for place, machine in enumerate(self.machines, 1):
            exchange.shape(
                machine.host, place, mbit / (SLOWER_LINK if machine.name == "slow" else 1)
            )

    def files(self, folder: Path, arm: Arm, order: Order) -> list[str]:
        """Write the configuration of a run; returns the server's arguments, of which a worker takes two."""
        cluster = {
            "seed": order.seed,
            "checkpoint_steps": EVALUATE_EVERY // (NUM_WORKERS if arm.algorithm == "syncps" else 1),
            "keep_last": NEVER,
        }
        train = {
            "model": {
                "type": "GPT",
                "model_dim": 192,
                "num_layers": 4,
                "num_heads": 4,
                "ff_dim": 768,
                "dropout": 0.0,
                "max_seq_len": LENGTH,
            },
            "dataset": {"name": "stdlib"},
            "batch_size": BATCH_SIZE,
            "num_epochs": 1000,
            "learning_rate": order.learning_rate,
            "lr_schedule": {"warmup_iters": 50, "min_lr": order.learning_rate},
            "optimizer": self.conditions.optimizer,
            "weight_decay": 0.1,
            "eval_steps": NEVER,
            "track_gradients": False,
        }
        node = {}
        if self.text.is_file():
            train["dataset"] = {"name": "text", "root": str(self.text)}
            node = {"dataset": {"root": str(self.text)}}
        return paced.write_files(folder, self.machines, cluster, train, node)

    def training(self, folder: Path, arm: Arm, order: Order) -> ddp.Training:
        """The same for processes of this benchmark."""
        self.files(folder, arm, order)
        return training_in(folder, arm.hook or "", arm.num_workers)


def training_in(folder: Path, hook: str = "", world: int = 1) -> ddp.Training:
    cluster, train = (str(folder / f"{name}.yaml") for name in ("cluster", "train"))
    return ddp.Training(cluster, train, NUM_HELD_OUT, hook, world)


def go(bench: Bench, arm: Arm, order: Order) -> Run:
    """Train as ordered."""
    with TemporaryDirectory(prefix="smolcluster-time-to-loss-") as name, Children() as children:
        folder = Path(name)
        (folder / "runs").mkdir()
        measure = go_alone if arm.name == "one" else go_ddp if arm.algorithm is None else go_cluster
        run = measure(bench, arm, children, folder, order)
        run = replace(run, scale=bench.scale, load=round(os.getloadavg()[0], 1))
    last = run.points[-1] if run.points else None
    busy = ", ".join(f"{machine} {share:.0%}" for machine, share in run.computing.items())
    told = f"{run.tokens_per_s:.0f} tokens/s, {busy}, {run.broken:.1%} too slow {run.failure}"
    say(f"{arm.name}: seed {order.seed}, rate {order.learning_rate:g}: {told}; {last}")
    return run


def go_alone(bench: Bench, arm: Arm, children: Children, folder: Path, order: Order) -> Run:
    training = bench.training(folder, arm, order)
    num_steps = round(order.seconds / FAST_S)
    pipe = children.start(learn_alone, bench.machines[1], folder, training, num_steps)
    points = []
    for _ in range(num_steps // EVALUATE_EVERY):
        step, loss = children.hear(pipe)
        points.append(Point(step * FAST_S, step * TOKENS, 0.0, loss))
    return Run(
        arm=arm.name,
        seed=order.seed,
        learning_rate=order.learning_rate,
        points=tuple(points),
        reached=reached(points, order.target),
        tokens_per_s=TOKENS / FAST_S,
        computing={"fast1": 1.0},
    )


def learn_alone(
    pipe: Pipe, machine: Machine, folder: Path, training: ddp.Training, num_steps: int
) -> None:
    """Train in one process, and answer now and then with the number of steps and the loss."""
    machine.enter(folder)
    context = training.build()
    steps = training_steps(context, training.settings.train)
    samples = ddp.held_out(context, training.num_held_out)
    for number in range(1, num_steps + 1):
        next(steps)
        if number % EVALUATE_EVERY == 0:
            model, loss = context.replica.copy_model(), context.workload.loss
            totals = evaluate(model, samples, ddp.CPU, loss=loss)
            pipe.send((number, evaluation_of(totals, {}).loss))


def go_ddp(bench: Bench, arm: Arm, children: Children, folder: Path, order: Order) -> Run:
    """Time some steps on the machines and links; then learn on loopback."""
    training = bench.training(folder, arm, order)
    machines = bench.machines[1 : 1 + arm.num_workers]
    ranks = list(enumerate(machines))
    before = bytes_sent()
    pipes = [children.start(ddp.take_time, each, folder, rank, training) for rank, each in ranks]
    times, *_ = [children.hear(pipe) for pipe in pipes]
    sent = bytes_sent() - before
    clock = Clock([bench.scale * each for each in times], arm.hook or "")
    broken = share_broken(folder, machines)
    (folder / "gloo").unlink(missing_ok=True)
    here = Host("127.0.0.1", "lo")
    pipes = [
        children.start(ddp.learn, Machine(each.name, here, 0.0), folder, rank, training)
        for rank, each in ranks
    ]
    points: list[Point] = []
    every = max(1, EVALUATE_EVERY // arm.num_workers)
    while clock.at(len(points) * every) < order.seconds and not reached(points, order.target):
        loss = children.ask(pipes, every)
        steps = (len(points) + 1) * every
        tokens = steps * arm.num_workers * TOKENS
        points.append(Point(clock.at(steps), tokens, steps * sent / len(times), loss))
    step_s = clock.step_s
    return Run(
        arm=arm.name,
        seed=order.seed,
        learning_rate=order.learning_rate,
        points=tuple(points),
        reached=reached(points, order.target),
        tokens_per_s=arm.num_workers * TOKENS / step_s,
        computing={each.name: bench.scale * each.batch_s / step_s for each in machines},
        broken=broken,
    )


class Clock:
    """When DDP's steps end, from the measured `times` of the first ones, in seconds."""

    def __init__(self, times: Sequence[float], hook: str) -> None:
        settled = times[ddp.HOOK_BEGINS :] if hook in ("powersgd", "localsgd") else times[1:]
        self.step_s = statistics.fmean(settled)
        self._ends = np.cumsum(times)

    def at(self, step: int) -> float:
        """When so many steps were taken."""
        if step == 0:
            return 0.0
        measured = min(step, len(self._ends))
        return float(self._ends[measured - 1]) + (step - measured) * self.step_s


def go_cluster(bench: Bench, arm: Arm, children: Children, folder: Path, order: Order) -> Run:
    """A real run of an algorithm."""
    arguments = bench.files(folder, arm, order)
    server, *workers = bench.machines
    overrides = ["--override", "threads=1", f"secret_file={folder / 'secret'}"]
    algorithm = str(arm.algorithm)
    children.start(paced.serve, server, folder, algorithm, [*arguments, *overrides, *arm.overrides])
    for number, worker in enumerate(workers, 1):
        own = [str(number), worker.name, *arguments[:2]]
        children.start(paced.work, worker, folder, algorithm, BATCH_SIZE, own)
    watch = Watch(bench, folder, [each.name for each in workers])
    failure, is_over = "", False
    while not (failure or is_over or reached(watch.points(), order.target)):
        is_over = watch.elapsed_s > order.seconds or children.processes[0].exitcode == 0
        time.sleep(LOOK_EVERY_S)
        watch.look()
        failure = failed(children, folder)
    points = watch.points()
    ends = points[-1].seconds if points else 0.0
    return Run(
        arm=arm.name,
        seed=order.seed,
        learning_rate=order.learning_rate,
        points=tuple(points),
        reached=reached(points, order.target),
        tokens_per_s=points[-1].tokens / ends if ends else 0.0,
        computing=watch.computing(),
        broken=share_broken(folder, workers),
        failure=failure,
    )


def failed(children: Children, folder: Path) -> str:
    """What a process said last that has ended before it should; "" while there is none."""
    for process in children.processes:
        if process.exitcode:
            outputs = [file.read_text(errors="replace") for file in folder.glob("output-*.txt")]
            lines = [line for text in outputs for line in text.splitlines() if line.strip()]
            told = [line for line in lines if "ERROR" in line] or lines
            return f"{process.name} ended with {process.exitcode}: {told[-1] if told else ''}"
    return ""


class Watch:
    """What is seen of a run from outside while it goes on."""

    def __init__(self, bench: Bench, folder: Path, workers: Sequence[str]) -> None:
        self._bench, self._folder, self._workers = bench, folder, workers
        self._losses: dict[int, float] = {}
        self._sent = [(time.time(), bytes_sent())]
        self._context = training_in(folder).build()
        self._samples = ddp.held_out(self._context, NUM_HELD_OUT)

    @property
    def began(self) -> float | None:
        """When the first batch began, in seconds since 1970."""
        found = [read_computed(self._folder, worker)[:1] for worker in self._workers]
        return min((each.at for some in found for each in some), default=None)

    @property
    def elapsed_s(self) -> float:
        """Since then, in the seconds of the results."""
        return 0.0 if (began := self.began) is None else self._bench.scale * (time.time() - began)

    def look(self) -> None:
        """Count the bytes, and compute the loss of each checkpoint that is new."""
        self._sent.append((time.time(), bytes_sent()))
        for place in sorted(self._folder.glob("runs/*/checkpoints/step-*")):
            step = int(place.name.removeprefix("step-"))
            if step not in self._losses:
                model = self._context.replica.model
                model.load_state_dict(load_file(place / MODEL_FILE), strict=False)
                loss = self._context.workload.loss
                totals = evaluate(model, self._samples, ddp.CPU, loss=loss)
                self._losses[step] = evaluation_of(totals, {}).loss

    def points(self) -> list[Point]:
        """The losses so far, in their order."""
        if (began := self.began) is None or not self._losses:
            return []
        taken = {line.record.step: line for line in steps_of(find_run(self._folder / "runs"))}
        times, counts = zip(*self._sent, strict=True)
        before = float(np.interp(began, times, counts))
        return [
            Point(
                seconds=self._bench.scale * (seconds_of(line) - began),
                tokens=round(line.record.values["samples_applied"]) * LENGTH,
                nbytes=float(np.interp(seconds_of(line), times, counts)) - before,
                loss=loss,
            )
            for step, loss in sorted(self._losses.items())
            if (line := taken.get(step)) is not None
        ]

    def computing(self) -> dict[str, float]:
        """The share of time since the first batch in which each machine computed."""
        if (began := self.began) is None:
            return {}
        lasted = time.time() - began
        return {
            worker: sum(
                max(each.due_s, each.real_s) for each in read_computed(self._folder, worker)
            )
            / lasted
            for worker in self._workers
        }


def bytes_sent() -> float:
    """Bytes that all hosts have sent so far, with headers, as the bridge's ports have seen them."""
    ports = json.loads(exchange.run(f"ip -n {bridge_name()} -s -j link show type veth"))
    return float(sum(port["stats64"]["rx"]["bytes"] for port in ports))


def reached(points: Sequence[Point], target: float) -> Point | None:
    """Where the losses cross the target for the first time, between two points."""
    if points and points[0].loss <= target:
        return points[0]
    for before, after in pairwise(points):
        if after.loss <= target:
            share = (before.loss - target) / (before.loss - after.loss)
            then, now = asdict(before), asdict(after)
            mixed = {key: then[key] + share * (now[key] - then[key]) for key in then}
            return Point(**(mixed | {"tokens": round(mixed["tokens"]), "loss": target}))
    return None


def choose_rate(bench: Bench, arm: Arm, rates: Sequence[float], seconds: float) -> float:
    """The learning rate with the lowest loss after so many seconds with the first seed."""
    if len(rates) == 1:
        return rates[0]
    runs = [go(bench, arm, Order(1, rate, seconds)) for rate in rates]
    losses = {run.learning_rate: run.points[-1].loss for run in runs if run.points}
    return min(losses, key=losses.__getitem__, default=rates[0])


def measure(bench: Bench, arguments: argparse.Namespace) -> Iterator[Run]:
    """All runs that are asked for; one machine alone comes first, because its losses are the targets."""
    asked = bench.conditions
    chosen = {arm.name: arm for arm in ARMS if arm.name in arguments.arms}
    known = load(arguments.out, asked)
    targets = {run.seed: run.points[-1].loss for run in known if run.arm == "one"}
    missing = [seed for seed in range(1, arguments.seeds + 1) if seed not in targets]
    if missing or "one" in chosen:
        one = chosen.pop("one", ARMS[0])
        rate = choose_rate(bench, one, arguments.lr, min(arguments.choose, asked.seconds))
        for seed in range(1, arguments.seeds + 1):
            run = go(bench, one, Order(seed, rate, asked.seconds))
            targets[seed] = run.points[-1].loss
            end = run.points[-1]
            yield replace(run, reached=end)
    for arm in chosen.values():
        rate = choose_rate(bench, arm, arguments.lr, arguments.choose)
        for seed in range(1, arguments.seeds + 1):
            yield go(bench, arm, Order(seed, rate, asked.limit * asked.seconds, targets[seed]))


def load(file: Path, conditions: Conditions) -> list[Run]:
    """The runs of earlier calls, if they were made under these conditions."""
    if not file.exists():
        return []
    content = json.loads(file.read_text())
    if Conditions(**content["conditions"]) != conditions:
        return []
    return [run_of(each) for each in content["runs"]]


def run_of(entry: dict[str, Any]) -> Run:
    points = tuple(Point(**each) for each in entry["points"])
    end = entry["reached"] and Point(**entry["reached"])
    return Run(**(entry | {"points": points, "reached": end}))


def join_in(runs: list[Run], run: Run) -> list[Run]:
    """The runs with the new one, in the arms' order."""
    names = [arm.name for arm in ARMS]
    others = [each for each in runs if (each.arm, each.seed) != (run.arm, run.seed)]
    return sorted([*others, run], key=lambda each: (names.index(each.arm), each.seed))


def rows(runs: Sequence[Run], conditions: Conditions) -> list[list[str]]:
    """A row for each arm, after the heading."""
    heading = ["arm", "rate", "seeds", "tokens/s", "time to loss", "min-max", "one machine's / its"]
    heading += ["MB sent", "loss at the end", "computing: fast", "slow"]
    alone = {run.seed: run.reached.seconds for run in runs if run.arm == "one" and run.reached}
    found = [heading]
    for arm in ARMS:
        if of_arm := [run for run in runs if run.arm == arm.name]:
            found.append(row(arm, of_arm, alone, conditions))
    return found


def row(arm: Arm, runs: Sequence[Run], alone: Mapping[int, float], asked: Conditions) -> list[str]:
    times = [run.reached.seconds if run.reached else math.inf for run in runs]
    ratios = [alone[run.seed] / each for run, each in zip(runs, times, strict=True)]
    sent = [run.reached.nbytes if run.reached else math.inf for run in runs]
    never = f"> {asked.limit:g}x"
    title = arm.title + (" *" if any(run.broken > MOST_BROKEN for run in runs) else "")
    if any(run.failure for run in runs):
        title += " (failed)"
    fast = [part for run in runs for name, part in run.computing.items() if name != "slow"]
    slow = [run.computing["slow"] for run in runs if "slow" in run.computing]
    losses = [run.points[-1].loss for run in runs if run.points]
    return [
        title,
        f"{runs[0].learning_rate:g}",
        str(len(runs)),
        f"{statistics.median(run.tokens_per_s for run in runs):.0f}",
        shown(statistics.median(times), "{:.0f} s", never),
        f"{min(times):.0f}-{shown(max(times), '{:.0f}', never)}" if min(times) < math.inf else "",
        f"{statistics.median(ratios):.2f}" if max(times) < math.inf else "",
        shown(statistics.median(sent) / 1e6, "{:.0f}", ""),
        f"{statistics.median(losses):.3f}" if losses else "",
        f"{statistics.fmean(fast):.0%}" if fast else "",
        f"{statistics.fmean(slow):.0%}" if slow else "",
    ]


def shown(value: float, form: str, otherwise: str) -> str:
    return form.format(value) if value < math.inf else otherwise


def document(runs: Sequence[Run], asked: Conditions, picture: str) -> str:
    """The results as a page, with the file name of their picture."""
    table = [f"| {' | '.join(each)} |" for each in rows(runs, asked)]
    table.insert(1, "|" + "---|" * len(rows(runs, asked)[0]))
    scales = ", ".join(sorted({f"{run.scale:g}" for run in runs}))
    loads = f"{min(run.load for run in runs):g} to {max(run.load for run in runs):g}"
    return f"""# Time to loss

Made by `benchmarks/time_to_loss.py`, which says what is measured and how:
`--optimizer {asked.optimizer} --seconds {asked.seconds:g} --limit {asked.limit:g} --mbit {asked.mbit:g}`,
on {asked.text}, with `--scale` {scales}, on {os.cpu_count()} cores; load average at the ends
of the runs {loads}.

{chr(10).join(table)}

A row marked with * was measured on a machine that was too busy for it: more than {MOST_BROKEN:.0%}
of its batches took longer than the pace of their machine. Its times are too long then.

![validation loss against time, tokens and bytes]({picture})
"""


def draw(runs: Sequence[Run], file: Path) -> None:
    """Loss against time, tokens and bytes; of each arm its first seed."""
    import matplotlib as mpl  # noqa: PLC0415 - not for the processes of a run

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "time_to_loss"
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, panels = plt.subplots(1, 3, figsize=(16, 5), sharey=True, layout="constrained")
    titles = {arm.name: arm.title for arm in ARMS}
    axes = {"seconds": "seconds", "tokens": "tokens", "nbytes": "bytes sent"}
    for number, run in enumerate(run for run in runs if run.seed == runs[0].seed):
        style = {"color": f"C{number % 10}", "linestyle": "-" if number < 10 else "--"}
        for panel, key in zip(panels, axes, strict=True):
            places = [getattr(point, key) for point in run.points]
            losses = [point.loss for point in run.points]
            panel.plot(places, losses, label=titles[run.arm], **style)
    for panel, label in zip(panels, axes.values(), strict=True):
        panel.set(xlabel=label)
        panel.grid(alpha=0.3)
    panels[0].set(ylabel="validation loss, nats a byte")
    if any(point.nbytes for run in runs for point in run.points):
        panels[2].set(xscale="log")
    panels[0].legend(fontsize="small")
    figure.savefig(file, metadata={"Date": None})


def save(runs: Sequence[Run], conditions: Conditions, out: Path) -> None:
    content = {"conditions": asdict(conditions), "runs": [asdict(run) for run in runs]}
    out.write_text(json.dumps(content, indent=1) + "\n")
    picture = out.with_suffix(".svg")
    out.with_suffix(".md").write_text(document(runs, conditions, picture.name))
    draw(runs, picture)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time to loss on five unequal hosts.")
    names = [arm.name for arm in ARMS]
    parser.add_argument("--arms", nargs="+", choices=names, default=names)
    parser.add_argument("--seeds", type=int, default=3, metavar="N")
    parser.add_argument("--seconds", type=float, default=600.0, help="of one machine alone")
    parser.add_argument("--limit", type=float, default=3.0, help="x --seconds, of an arm")
    parser.add_argument(
        "--lr", type=float, nargs="+", default=[5e-4, 1e-3], help="learning rates to choose from"
    )
    parser.add_argument("--choose", type=float, default=180.0, help="seconds of a choosing run")
    parser.add_argument("--mbit", type=float, default=50.0, help="rate of the links")
    parser.add_argument("--scale", type=float, default=1.0, help="so many times as fast")
    parser.add_argument("--optimizer", default="adamw", help="of all arms")
    parser.add_argument("--text", type=Path, default=DEFAULT_DATA / "tinyshakespeare.txt")
    parser.add_argument("--out", type=Path, default=RESULTS.with_suffix(".json"))
    return parser.parse_args()


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    arguments = parse_arguments()
    text = arguments.text.resolve()
    conditions = Conditions(
        seconds=arguments.seconds,
        limit=arguments.limit,
        mbit=arguments.mbit,
        text=text.stem if text.is_file() else "stdlib",
        optimizer=arguments.optimizer,
    )
    torch.set_num_threads(1)
    Children()  # says what is to be imported first
    multiprocessing.forkserver.ensure_running()  # its processes shall not be as patient as this one
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    with hosts_of("namespaces", NUM_WORKERS) as hosts:
        bench = Bench(conditions, hosts, arguments.scale, text)
        bench.shape()
        runs = load(arguments.out, conditions)
        for run in measure(bench, arguments):
            runs = join_in(runs, run)
            save(runs, conditions, arguments.out)
    title = f"Time to the loss of one machine after {conditions.seconds:g} s"
    report(f"{title}, {conditions.mbit:g} Mbit/s, {conditions.text}", rows(runs, conditions))


if __name__ == "__main__":
    main()
