"""A mesh's step beside its simulation and a bare script of torch's own pipeline on the same ranks.

Each rank is a process on Gloo. Its layers sleep for a stated time inside autograd, as those of
`pipeline.py` do, so that a few cores can play several machines: what is measured is what execution adds.
Steps of both sides alternate; times are medians.

`--check` is no benchmark: it trains a small GPT for some steps on every mesh of eight ranks with every
schedule, and compares losses, gradient norms and weights with those of one process.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from common import report, say  # first: it lets tests be imported

import mesh_rank  # isort: skip
from exchange import Children, Host
from pipeline import (
    NUM_MICROBATCHES,
    NUM_STAGES,
    ROWS,
    UNIT_S,
    Case,
    PacedLayer,
    StepTimes,
    equal_stages,
    loss,
    mean_loss,
    stamps_of,
    step_s,
)
from pipeline import Pipeline as Side
from smolcluster.algorithms.Mesh.groups import Groups
from smolcluster.algorithms.Mesh.links import MeshLinks
from smolcluster.configs.schema import MeshSizes
from smolcluster.data.dataset import Place
from smolcluster.training.compute import Microbatch
from smolcluster.training.layer_seeds import LayerSeeds
from smolcluster.training.schedules.instructions import SCHEDULES, stage_ranks
from smolcluster.training.schedules.simulation import Span
from smolcluster.training.stages.compute import StageCompute
from smolcluster.training.stages.cut import Stage
from smolcluster.training.stages.execution import execute
from smolcluster.training.workload import Workload
from smolcluster.utils.meter import Meter

CPU = torch.device("cpu")
TIMEOUT = timedelta(seconds=60)
MEGABYTES = 0.26
AIMS = {"1f1b": 0.95, "interleaved": 0.90, "zb-v": 0.85}
"""Shares of the simulated bound."""
THEIRS: dict[str, Callable[..., Any]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zb-v": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}
CHECKED = ("gpipe", "1f1b", "eager-1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev")
CHECK_RANKS = 8
PRELOAD = (
    "torch._dynamo",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "smolcluster.algorithms.Mesh.trainer",
)


def meet(case: Case, rank: int, pipe: Pipe) -> None:
    url = f"tcp://{case.hosts[0].address}:{case.port}"
    dist.init_process_group(
        "gloo", init_method=url, rank=rank, world_size=len(case.hosts), timeout=TIMEOUT
    )
    torch.set_num_threads(1)
    pipe.send(rank)
    pipe.recv()
    pipe.send(None)


def compute_ours(pipe: Pipe, case: Case, rank: int) -> None:
    """Be a rank of a mesh: takes a step whenever the pipe says its number, until that is -1."""
    meet(case, rank, pipe)
    groups = Groups(MeshSizes(pp=len(case.hosts)), CPU, Mock())
    ranks = stage_ranks(case.lists)
    layers: list[PacedLayer] = []
    stages = {}
    for number, of in enumerate(ranks):
        if of != rank:
            continue
        own = case.modules(number)
        stage = Stage(nn.Sequential(*own), own, 0, len(own))
        stage.start, stage.end, stage.num_layers = number, number + 1, len(ranks)
        workload = Workload(lambda made=stage: made, loss, [torch.zeros(1)])  # type: ignore[misc]
        stages[number] = StageCompute(stage, workload, LayerSeeds(0, CPU))
        layers += own
    links = MeshLinks(groups, ranks, case.num_microbatches)
    batch = torch.zeros(ROWS, case.width)
    parts = [
        Microbatch.of(batch, ROWS, Place(0, 0, number)) for number in range(case.num_microbatches)
    ]
    while pipe.recv() >= 0:
        spans: list[Span] = []
        links.begin_step(parts)
        execute(
            case.lists[rank],
            parts,
            stages=stages,
            num_stages=len(ranks),
            transport=links,
            meter=Meter(),
            note=spans.append,
        )
        links.finish()
        for each in stages.values():
            each.end_step()
        pipe.send(StepTimes(stamps_of(layers), spans))
    dist.destroy_process_group()


def compute_torchs(pipe: Pipe, case: Case, rank: int) -> None:
    """Be a rank of `torch.distributed.pipelining`: as `compute_ours`."""
    meet(case, rank, pipe)
    ranks = stage_ranks(case.lists)
    numbers = [number for number, of in enumerate(ranks) if of == rank]
    own = {number: case.modules(number) for number in numbers}
    stages = [PipelineStage(nn.Sequential(*own[n]), n, len(ranks), CPU) for n in numbers]
    given: Any = stages if len(stages) > 1 else stages[0]
    schedule = THEIRS[case.schedule](
        given, case.num_microbatches, loss_fn=mean_loss, scale_grads=False
    )
    batch = torch.zeros(ROWS * case.num_microbatches, case.width)
    inputs = (batch,) if 0 in numbers else ()
    target = torch.zeros(len(batch)) if len(ranks) - 1 in numbers else None
    layers = [layer for each in own.values() for layer in each]
    while pipe.recv() >= 0:
        for layer in layers:
            layer.zero_grad()
        schedule.step(*inputs, target=target)
        pipe.send(StepTimes(stamps_of(layers), []))
    dist.destroy_process_group()


def measure(schedule: str, unit_s: float, steps: int) -> dict[str, Any]:
    num_stages = SCHEDULES[schedule].num_stages
    layers = equal_stages(num_stages * NUM_STAGES, unit_s / num_stages)
    hosts = (Host("127.0.0.1", "lo"),) * NUM_STAGES
    make = partial(Case, schedule, NUM_MICROBATCHES, layers, MEGABYTES, hosts)
    case = make()
    with Children(PRELOAD) as children:
        sides = [Side(children, case, compute_ours)]
        if schedule in THEIRS:
            sides.append(Side(children, make(), compute_torchs))
        taken: list[list[float]] = [[] for _ in sides]
        for number in range(steps + 1):
            for side, found in zip(sides, taken, strict=True):
                seconds = step_s(side.step())
                if number:  # the first one is a warm-up
                    found.append(seconds)
        for side in sides:
            side.end()
    bound, (ours, *theirs) = case.simulated().makespan_s, map(statistics.median, taken)
    say(f"{schedule}: {1e3 * ours:.0f} ms")
    return {
        "schedule": schedule,
        "simulated_s": bound,
        "measured_s": ours,
        "share": bound / ours,
        "aim": AIMS.get(schedule),
        "torch_s": theirs[0] if theirs else None,
    }


def shown(results: Sequence[dict[str, Any]]) -> list[list[str]]:
    first = next((each["measured_s"] for each in results if each["schedule"] == "1f1b"), None)
    rows = [["schedule", "simulated", "measured", "share", "aim", "torch", "faster than 1f1b"]]
    for each in results:
        torch_s, aim = each["torch_s"], each["aim"]
        rows.append(
            [
                each["schedule"],
                *(f"{1e3 * each[key]:.0f}" for key in ("simulated_s", "measured_s")),
                f"{each['share']:.3f}",
                "" if aim is None else f"{aim:.2f}",
                "" if torch_s is None else f"{1e3 * torch_s:.0f}",
                "" if first is None else f"{first / each['measured_s']:.2f}x",
            ]
        )
    return rows


def check(only: Sequence[str]) -> int:
    """Compare meshes with one process; returns how many differ."""
    cases = mesh_rank.table(CHECK_RANKS, CHECKED)
    names = [name for name in cases if not only or any(each in name for each in only)]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, mesh_rank.__file__]
        ranks = [
            subprocess.Popen([*command, str(rank), str(CHECK_RANKS), folder, *names])
            for rank in range(CHECK_RANKS)
        ]
        rows, num_wrong = [["mesh", "result"]], 0
        for name, said in compared(names, cases, Path(folder), ranks):
            rows.append([name, said])
            num_wrong += said != "equal"
            say(f"{name}: {said}")
    report(f"{len(rows) - 1} meshes of {CHECK_RANKS} ranks beside one process", rows)
    return num_wrong


def compared(
    names: Sequence[str],
    cases: dict[str, mesh_rank.Case],
    folder: Path,
    ranks: Sequence["subprocess.Popen[bytes]"],
) -> Iterator[tuple[str, str]]:
    try:
        for name in names:
            while not (folder / f"{name}.json").is_file() and ranks[0].poll() is None:
                time.sleep(0.1)
            if not (folder / f"{name}.json").is_file():
                yield name, f"rank 0 ended with {ranks[0].returncode}"
                continue
            try:
                mesh_rank.compare(name, cases[name], folder)
            except AssertionError as error:
                yield name, f"differs: {str(error).splitlines()[0]}"
            else:
                yield name, "equal"
    finally:
        for rank in ranks:
            rank.kill() if ranks[0].returncode else rank.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description="A mesh's step beside its simulation and torch's.")
    parser.add_argument("--schedules", nargs="+", choices=list(SCHEDULES), default=list(SCHEDULES))
    parser.add_argument("--unit", type=float, default=1e3 * UNIT_S, help="ms of each computation")
    parser.add_argument("--steps", type=int, default=9, help="timed steps of a schedule")
    parser.add_argument(
        "--check", nargs="*", metavar="PART", help="compare meshes with one process; names' parts"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")
    arguments = parser.parse_args()
    if arguments.check is not None:
        return min(1, check(arguments.check))
    results = [
        measure(schedule, arguments.unit / 1e3, arguments.steps) for schedule in arguments.schedules
    ]
    report("a step on four ranks (times in ms)", shown(results))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
