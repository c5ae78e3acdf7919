"""A pipeline's step over real links, beside its simulation and `torch.distributed.pipelining` on Gloo.

Each stage is a process. Its layers compute nothing: forward, input gradient and weight gradient each sleep
for a stated time inside autograd, so that a few cores can play several machines, and what is measured is
what the execution adds: waiting, copies, wake-ups, the interpreter's lock. A step lasts from the first such
sleep's beginning to the last one's end, over all stages; times are medians over steps.

* `schedules`: stages that take the same time, on loopback: the simulated step's share of the measured one,
  and torch's 1F1B, whose steps alternate with ours.
* `unequal`: machines of speeds 4:2:1:1: the planner's cut beside the equal one, and the best of all cuts as
  simulated. `predicted` is what a user is told: of layers as a worker measures them, not as they are paced.
* `slow-link` (Linux, root): a network namespace a stage, at 100 Mbit/s: activations in fp32 and in int8.
* `memory` (Linux): a Llama three times as large as any stage's limit: see `pipeline_memory.py`.
* `coded`: a small GPT trained by three stages, with activations in fp32 and in int8: the losses at the end.
"""

import argparse
import itertools
import json
import logging
import math
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import pipeline_memory
from common import free_port, report, say
from exchange import Children, Host, hosts_of
from pipelines import even_cuts, executions, parts_of, run_step, stages_of
from smolcluster.algorithms.PipelineParallel.execution import Execution, OwnStage
from smolcluster.algorithms.PipelineParallel.links import Links, Route
from smolcluster.algorithms.PipelineParallel.transfers import encode
from smolcluster.algorithms.planning.layers import Layer, Machine, Problem, plan_layers, predict
from smolcluster.configs.schema import GPTConfig
from smolcluster.data.dataset import Batch, Place
from smolcluster.models.gpt import GPT
from smolcluster.training.builtin import cross_entropy
from smolcluster.training.compute import Microbatch
from smolcluster.training.replica import DEFAULT_BUCKET_BYTES, Replica
from smolcluster.training.schedules.drawing import picture_of
from smolcluster.training.schedules.instructions import (
    Schedule,
    generate,
    stage_ranks,
)
from smolcluster.training.schedules.simulation import Boundary, Costs, Span, Timeline, simulate
from smolcluster.training.stages.cut import Stage
from smolcluster.training.stages.measure import measure_layers
from smolcluster.training.workload import Terms, Workload
from smolcluster.utils.meter import Meter
from smolcluster.wire.handshake import introduce
from smolcluster.wire.messages import StageNeighbour
from smolcluster.wire.node import Node
from smolcluster.wire.security import Secret

NUM_STAGES, NUM_MICROBATCHES, UNIT_S = 4, 8, 0.020
ROWS = 16
SPEEDS = (4, 2, 1, 1)
SLOW_LAYER_S = 0.008
TIMEOUT_S = 60.0
SLOW_BYTES_S = 95.8e6 / 8
"""What a plain socket carries in a namespace of 100 Mbit/s."""
GPT_SIZES = GPTConfig(
    type="GPT", model_dim=32, num_layers=4, num_heads=2, ff_dim=64, max_seq_len=32, dropout=0.0
)
VOCABULARY = 64

Stamps = list[tuple[float, float]]


class _Trunk(torch.autograd.Function):
    """Passes values on in `forward_s`, and their gradients in `input_s` seconds."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, layer: "PacedLayer") -> Tensor:
        ctx.layer = layer
        layer.spend(layer.costs.forward_s)
        return value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.layer.spend(ctx.layer.costs.input_s)
        return gradient, None


class _Branch(torch.autograd.Function):
    """A weight, whose gradient takes `weight_s` seconds."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, layer: "PacedLayer") -> Tensor:
        ctx.layer = layer
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.layer.spend(ctx.layer.costs.weight_s)
        return gradient, None


class PacedLayer(nn.Module):
    """Adds a bias to (ROWS, width), each part of it in a stated time."""

    def __init__(self, costs: Costs, width: int, *, is_first: bool) -> None:
        super().__init__()
        self.costs = costs
        self.stamps: Stamps = []
        self.weight = nn.Parameter(torch.zeros(width))
        self.origin = nn.Parameter(torch.zeros(())) if is_first else None
        """What lets gradients go through the first layer as through any other."""

    def spend(self, seconds: float) -> None:
        started = time.monotonic()
        time.sleep(seconds)
        self.stamps.append((started, time.monotonic()))

    def forward(self, value: Tensor) -> Tensor:
        if self.origin is not None:
            value = value + self.origin
        passed: Tensor = _Trunk.apply(value, self)
        weight: Tensor = _Branch.apply(self.weight, self)
        return passed + weight


def mean_loss(output: Tensor, _target: Tensor) -> Tensor:
    return output.mean()


def loss(model: nn.Module, batch: Batch) -> Terms:
    return model(batch).mean(), 1


@dataclass(frozen=True)
class Case:
    """A pipeline: the cost of each layer of each stage, and what is handed on.

    Attributes:
        layers: of each stage; each of these costs as many seconds as it says.
        megabytes: of a microbatch's activations.
        hosts: one for each rank.
        bytes_s: what each link carries.
    """

    schedule: str
    num_microbatches: int
    layers: tuple[tuple[Costs, ...], ...]
    megabytes: float
    hosts: tuple[Host, ...]
    codec: str = "fp32"
    bytes_s: float = math.inf
    secret: Secret = field(default_factory=lambda: Secret(Path(), secrets.token_bytes(32)))
    port: int = field(default_factory=free_port)

    @property
    def lists(self) -> Schedule:
        return generate(self.schedule, len(self.hosts), self.num_microbatches)

    @property
    def width(self) -> int:
        return round(self.megabytes * 1e6 / 4 / ROWS)

    @property
    def costs(self) -> list[Costs]:
        """Of each stage; of the first one the gradients of its layers' inputs are deferred too."""
        found = []
        for number, layers in enumerate(self.layers):
            forward, inputs, weights = (
                sum(getattr(each, name) for each in layers)
                for name in ("forward_s", "input_s", "weight_s")
            )
            is_first = number == 0
            split = (0.0, inputs + weights) if is_first else (inputs, weights)
            found.append(Costs(forward, *split))
        return found

    def simulated(self) -> Timeline:
        carried_s = encode(torch.zeros(ROWS, self.width), self.codec).nbytes / self.bytes_s
        ways = [Boundary(carried_s, carried_s)] * (len(self.layers) - 1)
        return simulate(self.lists, self.costs, ways)

    def modules(self, stage: int) -> list[PacedLayer]:
        return [
            PacedLayer(each, self.width, is_first=not (stage or number))
            for number, each in enumerate(self.layers[stage])
        ]


class StepTimes(NamedTuple):
    """A rank's sleeps in a step, and what its instructions took."""

    stamps: Stamps
    spans: list[Span]


# --- one process of each side


def compute_stage(pipe: Pipe, case: Case, rank: int) -> None:
    """Be a rank of ours: takes a step whenever the pipe says its number, until that is -1."""
    case.hosts[rank].enter()
    hello = introduce(f"stage{rank}")
    links = Links(
        Node(hello=hello, secret=case.secret, log=logging.getLogger()),
        server=None,
        bucket_bytes=DEFAULT_BUCKET_BYTES,
        heartbeat_timeout_s=TIMEOUT_S,
    )
    with closing(links):
        places = links.listen([case.hosts[rank].address])
        pipe.send(
            StageNeighbour(rank=rank, node=hello.node, instance=hello.instance, places=places)
        )
        others = tuple(each for each in pipe.recv() if each.rank != rank)
        ranks = stage_ranks(case.lists)
        route = Route(rank, 1, 0, ranks, others, case.codec, TIMEOUT_S)
        links.connect(route, TIMEOUT_S)
        stages, layers = own_stages(case, rank, ranks)
        execution = Execution(stages, ranks, links, Meter())
        batch = torch.zeros(ROWS, case.width)
        parts = [
            Microbatch.of(batch, ROWS, Place(0, 0, number))
            for number in range(case.num_microbatches)
        ]
        pipe.send(None)
        while (turn := pipe.recv()) >= 0:
            outcome = execution.run(turn, case.lists[rank], parts)
            pipe.send(StepTimes(stamps_of(layers), list(outcome.spans)))


def own_stages(
    case: Case, rank: int, ranks: Sequence[int]
) -> tuple[dict[int, OwnStage], list[PacedLayer]]:
    num_layers = sum(map(len, case.layers))
    stages, layers, start = dict[int, OwnStage](), list[PacedLayer](), 0
    for number, of in enumerate(ranks):
        own = case.modules(number)
        end = start + len(own)
        if of == rank:
            model = nn.Sequential(*own)
            workload = Workload(lambda made=model: made, loss, [torch.zeros(1)])  # type: ignore[misc]
            stage = Stage(model, own, 0, len(own))
            stage.start, stage.end, stage.num_layers = start, end, num_layers
            replica = Replica(stage, "sgd", is_stage=True)
            stages[number] = OwnStage.of(replica, workload, 0)
            layers += own
        start = end
    return stages, layers


def stamps_of(layers: Sequence[PacedLayer]) -> Stamps:
    """What the layers have noted since the last call."""
    found = [stamp for each in layers for stamp in each.stamps]
    for each in layers:
        each.stamps = []
    return found


def compute_torch_stage(pipe: Pipe, case: Case, rank: int) -> None:
    """Be a rank of `torch.distributed.pipelining`, of one stage: as `compute_stage`."""
    case.hosts[rank].enter()
    url = f"tcp://{case.hosts[0].address}:{case.port}"
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=len(case.hosts))
    layers, last = case.modules(rank), len(case.hosts) - 1
    module = nn.Sequential(*layers)
    stage = PipelineStage(module, rank, len(case.hosts), torch.device("cpu"))
    schedule = Schedule1F1B(stage, case.num_microbatches, mean_loss, scale_grads=False)
    batch = torch.zeros(ROWS * case.num_microbatches, case.width)
    given = (batch,) if rank == 0 else ()
    target = torch.zeros(len(batch)) if rank == last else None
    pipe.send(rank)
    pipe.recv()
    pipe.send(None)
    while pipe.recv() >= 0:
        module.zero_grad()
        schedule.step(*given, target=target)
        pipe.send(StepTimes(stamps_of(layers), []))
    dist.destroy_process_group()


# --- measuring


class Pipeline:
    """The processes of one side, which take a step when they are asked to."""

    def __init__(self, children: Children, case: Case, target: Callable[..., None]) -> None:
        self._children, self._turns = children, itertools.count()
        self._pipes = [children.start(target, case, rank) for rank in range(len(case.hosts))]
        known = [children.hear(each) for each in self._pipes]
        for pipe in self._pipes:
            pipe.send(known)
        for pipe in self._pipes:
            children.hear(pipe)

    def step(self) -> list[StepTimes]:
        turn = next(self._turns)
        for pipe in self._pipes:
            pipe.send(turn)
        return [self._children.hear(pipe) for pipe in self._pipes]

    def end(self) -> None:
        for pipe in self._pipes:
            pipe.send(-1)


def step_s(step: Sequence[StepTimes]) -> float:
    stamps = [stamp for each in step for stamp in each.stamps]
    return max(end for _, end in stamps) - min(start for start, _ in stamps)


def timeline_of(step: Sequence[StepTimes]) -> Timeline:
    """What was measured, from the first instruction's beginning on."""
    zero = min(span.start_s for each in step for span in each.spans)
    return Timeline(
        tuple(
            tuple(Span(s.instruction, s.start_s - zero, s.end_s - zero) for s in each.spans)
            for each in step
        )
    )


def measure(case: Case, steps: int, *, with_torch: bool = False) -> dict[str, Any]:
    """Median seconds of a step, ours and torch's, with the step of ours that is in the middle."""
    with Children() as children:
        sides = [Pipeline(children, case, compute_stage)]
        if with_torch:
            sides.append(Pipeline(children, case, compute_torch_stage))
        taken: list[list[list[StepTimes]]] = [[] for _ in sides]
        for number in range(steps + 1):
            for side, found in zip(sides, taken, strict=True):
                step = side.step()
                if number:  # the first one is a warm-up
                    found.append(step)
        for side in sides:
            side.end()
    middle = sorted(taken[0], key=step_s)[steps // 2]
    result: dict[str, Any] = {
        "schedule": case.schedule,
        "megabytes": case.megabytes,
        "codec": case.codec,
        "simulated_s": case.simulated().makespan_s,
        "measured_s": statistics.median(map(step_s, taken[0])),
        "timeline": timeline_of(middle),
    }
    result["share"] = result["simulated_s"] / result["measured_s"]
    if with_torch:
        result["torch_s"] = statistics.median(map(step_s, taken[1]))
    say(
        f"{case.schedule}, {case.megabytes:g} MB, {case.codec}: {1e3 * result['measured_s']:.0f} ms"
    )
    return result


def equal_stages(num: int, unit_s: float) -> tuple[tuple[Costs, ...], ...]:
    return ((Costs(unit_s, unit_s, unit_s),),) * num


def schedules(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Equal stages on loopback; of the last case also a picture."""
    hosts = (Host("127.0.0.1", "lo"),) * NUM_STAGES
    unit = arguments.unit / 1e3
    for megabytes, schedule in itertools.product(arguments.megabytes, arguments.schedules):
        halves = schedule == "zb-v"
        layers = equal_stages((1 + halves) * NUM_STAGES, unit / (1 + halves))
        case = Case(schedule, NUM_MICROBATCHES, layers, megabytes, hosts)
        found = measure(case, arguments.steps, with_torch=schedule == "1f1b")
        if arguments.picture and megabytes < 1 and schedule == "zero-bubble":
            panels = {"simulated": case.simulated(), "measured": found["timeline"]}
            arguments.picture.write_bytes(picture_of(panels))
        yield found


def unequal(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The planner's cut, the equal one, and the best of all as simulated."""
    names = [f"speed{speed}-{number}" for number, speed in enumerate(SPEEDS)]
    paces = {
        name: Costs(*[SLOW_LAYER_S / speed] * 3) for name, speed in zip(names, SPEEDS, strict=True)
    }
    machines = tuple(Machine(name, (as_measured(each),) * 32) for name, each in paces.items())
    problem = Problem((Layer(0),) * 32, machines, {}, num_microbatches=32)
    plan = plan_layers(problem)
    best_s = min(each for each in simulated_cuts(problem, plan.step_s))
    planned = [(each.machine, each.start, each.end) for each in plan.stages]
    equal = [(name, 8 * rank, 8 * rank + 8) for rank, name in enumerate(names)]
    hosts = (Host("127.0.0.1", "lo"),) * NUM_STAGES
    for kind, ranges in (("planned", planned), ("equal", equal)):
        layers = tuple((paces[name],) * (end - start) for name, start, end in ranges)
        case = Case("1f1b", 32, layers, 0.26, hosts)
        found = measure(case, max(1, arguments.steps // 3))
        predicted_s = predict(problem, ranges).step_s
        yield found | {
            "kind": kind,
            "predicted_s": predicted_s,
            "best_s": best_s,
            "cut": str(ranges),
            "predicted_share": predicted_s / found["measured_s"],
        }


def as_measured(pace: Costs) -> Costs:
    """What a worker measures of a layer of that pace when it joins: sleeps last longer than asked for."""
    width = Case("1f1b", 1, (), 0.26, ()).width
    layers = [(place, partial(PacedLayer, pace, width, is_first=place == 0)) for place in range(3)]
    value, device = torch.zeros(ROWS, width), torch.device("cpu")
    _, found, _ = measure_layers(layers, value, torch.Tensor.mean, device)
    return Costs(found.forward_s, found.input_s, found.weight_s)


def simulated_cuts(problem: Problem, bound_s: float) -> Iterator[float]:
    """The steps of all cuts over all machines that might take less than `bound_s`, which is the first."""
    yield bound_s
    num = len(problem.layers)
    for machines in itertools.permutations(problem.machines):
        for inner in itertools.combinations(range(1, num), len(machines) - 1):
            cuts = (0, *inner, num)
            ranges = [
                (each.name, start, end)
                for each, (start, end) in zip(machines, itertools.pairwise(cuts), strict=True)
            ]
            slowest = max(
                (end - start) * each.costs[0].total_s
                for each, (_, start, end) in zip(machines, ranges, strict=True)
            )
            if problem.num_microbatches * slowest < bound_s:
                yield predict(problem, ranges).step_s


def slow_link(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Links that take longer than the computing."""
    with hosts_of("namespaces", NUM_STAGES - 1) as hosts:
        for codec in ("fp32", "int8"):
            layers = equal_stages(NUM_STAGES, arguments.unit / 1e3)
            case = Case("1f1b", NUM_MICROBATCHES, layers, 4.0, hosts, codec, SLOW_BYTES_S)
            yield measure(case, max(1, arguments.steps // 3))


def coded(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The loss that a pipeline of three stages has reached after so many steps, by codec."""
    workload = Workload(lambda: GPT(GPT_SIZES, VOCABULARY), cross_entropy, [(torch.zeros(1), 0)])
    lists = generate("1f1b", 3, 4)
    for codec in ("fp32", "int8"):
        stages = stages_of(workload, even_cuts(workload, 3), "adamw")
        generator, losses = torch.Generator().manual_seed(1), []
        with executions(lists, stages, codec=codec) as made:
            for turn in range(arguments.train):
                batches = [chain(generator) for _ in range(4)]
                outcome = run_step(made, lists, parts_of(batches, [8] * 4), turn)[-1].loss
                losses.append(outcome.total / outcome.num_terms)
                for each in stages:
                    each.replica.grads.div_(outcome.num_terms)
                    each.replica.step(3e-3)
        reached = statistics.mean(losses[-max(1, arguments.train // 10) :])
        say(f"{codec}: loss {losses[0]:.4f}, at the end {reached:.4f}")
        yield {"codec": codec, "first": losses[0], "loss": reached}


def memory(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Peaks of stages beside the plan, of all weights trained and of adapters alone."""
    for is_lora in (False, True):
        yield from pipeline_memory.measured(arguments.layers, arguments.width, is_lora=is_lora)


def chain(generator: torch.Generator) -> Batch:
    """(8, 33) tokens, each of which depends on the one before, by a rule, in three of four cases."""
    tokens = torch.randint(0, VOCABULARY, (8, 33), generator=generator)
    keeps = torch.rand(tokens.shape, generator=generator) < 0.75
    for place in range(1, 33):
        ruled = (5 * tokens[:, place - 1] + 3) % VOCABULARY
        tokens[:, place] = torch.where(keeps[:, place], ruled, tokens[:, place])
    return tokens[:, :-1], tokens[:, 1:]


CASES: Mapping[str, Callable[[argparse.Namespace], Iterator[dict[str, Any]]]] = {
    "schedules": schedules,
    "unequal": unequal,
    "slow-link": slow_link,
    "coded": coded,
    "memory": memory,
}
IN_MS = {"simulated_s", "measured_s", "predicted_s", "torch_s", "best_s"}


def shown(name: str, value: object) -> str:
    if name in IN_MS and isinstance(value, float):
        return f"{1e3 * value:.0f}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="A pipeline's step beside its simulation and torch's."
    )
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=["schedules", "unequal"])
    parser.add_argument(
        "--schedules", nargs="+", default=["1f1b", "eager-1f1b", "zero-bubble", "zb-v"]
    )
    parser.add_argument("--megabytes", type=float, nargs="+", default=[0.26, 4.0])
    parser.add_argument("--unit", type=float, default=1e3 * UNIT_S, help="ms of each computation")
    parser.add_argument("--steps", type=int, default=9, help="timed steps of a case")
    parser.add_argument("--train", type=int, default=150, help="steps of the case coded")
    parser.add_argument("--layers", type=int, default=16, help="of the model of the case memory")
    parser.add_argument("--width", type=int, default=512, help="of the model of the case memory")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="draw a zero-bubble step (svg)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")
    arguments = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = {}
    for name in arguments.cases:
        rows = results[name] = list(CASES[name](arguments))
        for row in rows:
            row.pop("timeline", None)
        columns = list(dict.fromkeys(key for row in rows for key in row))
        body = [[shown(key, row.get(key, "")) for key in columns] for row in rows]
        report(f"{name} (times in ms)", [columns, *body])
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
