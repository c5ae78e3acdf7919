"""What slower links cost: how much of the time five unequal hosts compute, and the loss they come to.

Hosts, model and data are those of time_to_loss.py; each arm runs with each bandwidth for as long, with one
seed and learning rate. DiLoCo chooses its local steps by what it measures, which is the rule that
`smolcluster advise` predicts with. A bandwidth of 0 leaves the links as fast as this machine is.

    python benchmarks/bandwidth.py --mbit 100 50 20 5 2 1 --seconds 180
    python benchmarks/bandwidth.py --mbit 0 --arms syncps-int8 diloco-sync-int8 --seconds 60
"""

import argparse
import json
import multiprocessing.forkserver
import os
import signal
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

import exchange
from common import DEFAULT_DATA, PROJECT, report
from exchange import Children, bridge_name, hosts_of
from smolcluster.utils.units import format_count
from time_to_loss import ARMS, MOST_BROKEN, NUM_WORKERS, Bench, Conditions, Order, Run, go

RESULTS = PROJECT / "benchmarks" / "results" / "bandwidth.json"
UNSHAPED = 0.0


@dataclass(frozen=True)
class Outcome:
    """Of one arm with links of so many Mbit/s; the slow machine's has a fifth.

    `epochs`: that DiLoCo's rounds were planned for. `computing`: the mean share of time in which a fast
    machine computed. `broken`: the share of batches that took longer than their machine's pace. `load`: how
    many processes wanted this machine's cores.
    """

    arm: str
    mbit: float
    epochs: int
    tokens_per_s: float
    loss: float
    computing: float
    computing_slow: float
    broken: float
    load: float


def outcome_of(run: Run, mbit: float, epochs: int) -> Outcome:
    fast = [share for name, share in run.computing.items() if name != "slow"]
    return Outcome(
        arm=run.arm,
        mbit=mbit,
        epochs=epochs,
        tokens_per_s=run.tokens_per_s,
        loss=run.points[-1].loss if run.points else float("nan"),
        computing=statistics.fmean(fast) if fast else 0.0,
        computing_slow=run.computing.get("slow", 0.0),
        broken=run.broken,
        load=run.load,
    )


def shape(bench: Bench) -> None:
    """Give the hosts their links, or take what holds them back away."""
    if bench.conditions.mbit != UNSHAPED:
        bench.shape()
        return
    for place, machine in enumerate(bench.machines, 1):
        for where in (
            f"{bridge_name()} qdisc replace dev port{place}",
            f"{machine.host.namespace} qdisc replace dev eth0",
        ):
            exchange.run(f"tc -n {where} root pfifo limit 1000")


def rows(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """A row for each outcome, after the heading."""
    titles = {arm.name: arm.title for arm in ARMS}
    heading = ["arm", "epochs", "Mbit/s", "tokens/s", "computing: fast", "slow", "loss at the end"]
    return [
        heading,
        *(
            [
                titles[each.arm] + (" *" if each.broken > MOST_BROKEN else ""),
                str(each.epochs),
                f"{each.mbit:g}" if each.mbit else "not limited",
                f"{each.tokens_per_s:.0f}",
                f"{each.computing:.0%}",
                f"{each.computing_slow:.0%}",
                f"{each.loss:.3f}",
            ]
            for each in outcomes
        ),
    ]


def draw(outcomes: Sequence[Outcome], file: Path) -> None:
    """Utilisation, and the loss at the end, against bandwidth."""
    import matplotlib as mpl  # noqa: PLC0415 - not for the processes of a run

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "bandwidth"
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, panels = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    titles = {arm.name: arm.title for arm in ARMS}
    for name, epochs in sorted({(each.arm, each.epochs) for each in outcomes}):
        own = [
            each
            for each in sorted(outcomes, key=lambda each: each.mbit)
            if (each.arm, each.epochs) == (name, epochs) and each.mbit != UNSHAPED
        ]
        mbit = [each.mbit for each in own]
        style = {
            "marker": "o",
            "label": f"{titles[name]}, rounds for {format_count(epochs, 'epoch')}",
        }
        panels[0].plot(mbit, [100 * each.computing for each in own], **style)
        panels[1].plot(mbit, [each.loss for each in own], **style)
    for panel in panels:
        panel.set(xscale="log", xlabel="Mbit/s of a fast machine's link")
        panel.grid(alpha=0.3)
    panels[0].set(ylabel="time in which fast machines compute, %", ylim=(0, 102))
    panels[1].set(ylabel="validation loss at the end, nats a byte")
    panels[0].legend(fontsize="small")
    figure.savefig(file, metadata={"Date": None})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What slower links cost.")
    names = [arm.name for arm in ARMS if arm.algorithm]
    parser.add_argument("--arms", nargs="+", choices=names, default=["diloco-streaming-int4"])
    parser.add_argument("--mbit", nargs="+", type=float, default=[100, 50, 20, 5, 2, 1])
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument(
        "--epochs", type=int, default=1, help="DiLoCo's rounds are planned for so many"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="so many times as fast")
    parser.add_argument("--text", type=Path, default=DEFAULT_DATA / "tinyshakespeare.txt")
    parser.add_argument("--out", type=Path, default=RESULTS, help="joined, where it exists")
    return parser.parse_args()


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    arguments = parse_arguments()
    text = arguments.text.resolve()
    planned = f"num_epochs={arguments.epochs}"
    chosen = [
        replace(arm, overrides=(*arm.overrides, planned)) if arm.algorithm == "diloco" else arm
        for arm in ARMS
        if arm.name in arguments.arms
    ]
    known = json.loads(arguments.out.read_text()) if arguments.out.is_file() else []
    found = {(one.arm, one.epochs, one.mbit): one for one in (Outcome(**each) for each in known)}
    torch.set_num_threads(1)
    Children()  # says what is to be imported first
    multiprocessing.forkserver.ensure_running()  # its processes shall not be as patient as this one
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    with hosts_of("namespaces", NUM_WORKERS) as hosts:
        for mbit in arguments.mbit:
            conditions = Conditions(arguments.seconds, 1.0, mbit, text.stem, "adamw")
            bench = Bench(conditions, hosts, arguments.scale, text)
            shape(bench)
            for arm in chosen:
                run = go(bench, arm, Order(1, arguments.lr, arguments.seconds))
                outcome = outcome_of(run, mbit, arguments.epochs)
                found[arm.name, arguments.epochs, mbit] = outcome
                outcomes = [found[key] for key in sorted(found)]
                arguments.out.write_text(json.dumps([asdict(each) for each in outcomes], indent=1))
                draw(outcomes, arguments.out.with_suffix(".svg"))
    report(f"After {arguments.seconds:g} s", rows([found[key] for key in sorted(found)]))


if __name__ == "__main__":
    main()
