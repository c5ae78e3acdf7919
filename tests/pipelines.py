"""Pipelines in one process: their stages' compute, executed by hand or over links on loopback."""

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness import SECRET
from peers import DEADLINE_S, logger
from smolcluster.algorithms.PipelineParallel import worker
from smolcluster.algorithms.PipelineParallel.automatic import measure
from smolcluster.algorithms.PipelineParallel.execution import Execution, OwnStage, StepOutcome
from smolcluster.algorithms.PipelineParallel.links import Links, Route
from smolcluster.configs.schema import GPTConfig, Precision
from smolcluster.data.dataset import Batch, Place
from smolcluster.models.gpt import GPT
from smolcluster.server import link
from smolcluster.training import layer_seeds
from smolcluster.training.build import build, stage_replica
from smolcluster.training.builtin import cross_entropy
from smolcluster.training.compute import Microbatch
from smolcluster.training.replica import Replica
from smolcluster.training.schedules.instructions import Instruction, Op, Schedule, stage_ranks
from smolcluster.training.schedules.validation import execution_order
from smolcluster.training.stages.build import model_input, num_layers, output_loss
from smolcluster.training.stages.compute import StageLoss
from smolcluster.training.stages.cut import Stage, layers_of
from smolcluster.training.stages.execution import Transport, execute
from smolcluster.training.workload import Workload
from smolcluster.utils.isolated_rng import forked_rng
from smolcluster.utils.meter import Meter
from smolcluster.utils.seed import derive_seed
from smolcluster.wire.handshake import introduce
from smolcluster.wire.messages import MeasuredLayer, StageNeighbour
from smolcluster.wire.node import Node
from smolcluster.wire.security import Secret

SEED = 7
BUCKET_BYTES = 4096


def share_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers that are threads share PyTorch's generator, which is a process's.

    They make models one after the other. What they compute draws nothing, so it need not seed the generator,
    from which another one may be drawing its weights.
    """
    lock = threading.Lock()

    def locked(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **named: Any) -> Any:
            with lock:
                return make(*args, **named)

        return made

    monkeypatch.setattr(worker, "stage_replica", locked(stage_replica))
    monkeypatch.setattr(worker, "measure", locked(measure))
    monkeypatch.setattr(link, "build", locked(build))
    monkeypatch.setattr(layer_seeds, "seed_generators", lambda *_: None)


def parts_of(batches: Sequence[Batch], sizes: Sequence[int]) -> list[Microbatch]:
    """Microbatches of so many samples each."""
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return [
        Microbatch.of(batch, size, Place(SEED, 1, start))
        for batch, size, start in zip(batches, sizes, starts, strict=True)
    ]


def gpt(
    num_layers: int = 6,
    width: int = 16,
    *,
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float32,
    data: tuple[Any, Any] = ([(torch.zeros(6), 0)], None),
) -> Workload:
    """Its embedding is its head as well. `data`: to train on, and to hold out."""
    sizes = GPTConfig(
        type="GPT",
        model_dim=width,
        num_layers=num_layers,
        num_heads=2,
        ff_dim=2 * width,
        max_seq_len=8,
        dropout=dropout,
    )
    return Workload(lambda: GPT(sizes, 11).to(dtype), cross_entropy, *data)


def whole(workload: Workload) -> nn.Module:
    """The model with the weights that all stages have together."""
    with forked_rng():
        torch.manual_seed(derive_seed(SEED, "weights"))
        return workload.new_model()


def assert_are_the_model(workload: Workload, stages: Sequence[Stage], batch: Any) -> None:
    """Stages in turn give the loss and the gradients of the whole model, and have its initial weights."""
    value = model_input(workload, batch)
    for stage in stages:
        value = stage(value)
    model = whole(workload).train()
    results = (output_loss(workload)(value, batch), workload.loss(model, batch))
    found, expected = (each if isinstance(each, Tensor) else each[0] / each[1] for each in results)
    torch.testing.assert_close(found, expected)
    for each in (found, expected):
        each.backward()  # type: ignore[no-untyped-call]
    sums: dict[str, Tensor] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            assert torch.equal(parameter, model.get_parameter(name))
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            sums[name] = sums.get(name, torch.zeros_like(parameter)) + gradient
    assert sums.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(sums[name], gradient, rtol=1e-4, atol=1e-6)


def measured_layer(seconds: float = 0.0, **changes: Any) -> MeasuredLayer:
    """What a layer costs on a machine where each part of a pass takes so long."""
    given: dict[str, Any] = dict.fromkeys(("forward_s", "input_s", "weight_s"), seconds)
    given |= {"trained_bytes": 1000, "frozen_bytes": 0, "activation_bytes": 10}
    return MeasuredLayer(**given | {"output_bytes": 4096} | changes)


def even_cuts(workload: Workload, num_stages: int) -> list[int]:
    layers = num_layers(workload)
    return [round(stage * layers / num_stages) for stage in range(num_stages + 1)]


def stages_of(
    workload: Workload,
    cuts: Sequence[int],
    optimizer: str = "sgd",
    precision: Precision = "fp32",
    **options: Any,
) -> list[OwnStage]:
    """Stages that were cut from copies of the whole model, which takes less time than to build each."""
    made, model = [], whole(workload)
    for start, end in pairwise(cuts):
        own = copy.deepcopy(model)
        stage = Stage(own, layers_of(own, None), start, end)
        replica = Replica(stage, optimizer, precision=precision, is_stage=True)
        made.append(OwnStage.of(replica, workload, SEED, **options))
    return made


def gradients_of(stages: Sequence[OwnStage]) -> dict[str, Tensor]:
    """By the model's names; what several stages hold counts once, and is the same in all."""
    found: dict[str, Tensor] = {}
    for each in stages:
        for name, parameter in each.module.named_parameters():
            assert parameter.grad is not None
            if name in found:
                torch.testing.assert_close(parameter.grad, found[name])
            found[name] = parameter.grad
    return found


def alone(workload: Workload, batches: Sequence[Batch]) -> tuple[float, int, dict[str, Tensor]]:
    """The sum of the loss terms of one process's model, their number, and the sum's gradients."""
    model, total, count = whole(workload), 0.0, 0
    for batch in batches:
        loss, terms = workload.loss(model, batch)
        loss.backward()
        total, count = total + loss.item(), count + int(terms)
    grads = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return total, count, grads


class Handed(Transport):
    """Between stages that one thread computes."""

    def __init__(self) -> None:
        self._results: dict[tuple[bool, int, int], Any] = {}

    def receive(self, instruction: Instruction) -> Any:
        is_forward = instruction.op is Op.FORWARD
        return self._results.pop((is_forward, instruction.microbatch, instruction.stage))

    def send(self, instruction: Instruction, result: Batch) -> None:
        is_forward = instruction.op is Op.FORWARD
        self._results[is_forward, instruction.microbatch, instruction.target] = result


def by_hand(
    schedule: Schedule, stages: Sequence[OwnStage], parts: Sequence[Microbatch]
) -> StageLoss:
    """Execute a step in one thread, so that PyTorch's generator is one stage's at a time."""
    execute(
        [each for _, each in execution_order(schedule)],
        parts,
        stages={number: each.compute for number, each in enumerate(stages)},
        num_stages=len(stages),
        transport=Handed(),
        meter=Meter(),
        note=lambda _: None,
    )
    losses = [each.compute.end_step() for each in stages]
    return StageLoss(sum(each.total for each in losses), sum(each.num_terms for each in losses))


class Linked:
    """A rank's links, and what others are told of it."""

    def __init__(self, rank: int, secret: Secret = SECRET) -> None:
        self.log: list[str] = []
        self.rank, hello = rank, introduce(f"node{rank}")
        self.links = Links(
            Node(hello=hello, secret=secret, log=logger(self.log)),
            server=None,
            bucket_bytes=BUCKET_BYTES,
            heartbeat_timeout_s=DEADLINE_S,
        )
        self.known = StageNeighbour(
            rank=rank,
            node=hello.node,
            instance=hello.instance,
            places=self.links.listen(["127.0.0.1"]),
        )

    def route(
        self, neighbours: Sequence[StageNeighbour], ranks: Sequence[int], **changes: Any
    ) -> Route:
        given: dict[str, Any] = {"attempt": 1, "step": 0, "codec": "fp32"} | changes
        given.setdefault("patience_s", DEADLINE_S)
        return Route(rank=self.rank, ranks=tuple(ranks), neighbours=tuple(neighbours), **given)


@contextmanager
def linked(num_ranks: int) -> Iterator[list[Linked]]:
    """The links of so many ranks, which `connect` connects."""
    with ExitStack() as stack:
        made = [Linked(rank) for rank in range(num_ranks)]
        for each in made:
            stack.callback(each.links.close)
        yield made


def connect(ranks: Sequence[Linked], stages: Sequence[int] = (), **changes: Any) -> None:
    """Let each rank reach those with which it exchanges anything, at the same time.

    `stages`: the rank of each; one stage a rank if none are given.
    """

    def reach(number: int) -> None:
        own = ranks[number]
        others = [each.known for each in ranks if each is not own]
        own.links.connect(own.route(others, stages or range(len(ranks)), **changes), DEADLINE_S)

    at_once(reach, len(ranks))


@contextmanager
def executions(
    schedule: Schedule, stages: Sequence[OwnStage], *, codec: str = "fp32"
) -> Iterator[list[Execution]]:
    """One for each rank, whose links are connected over loopback."""
    ranks = stage_ranks(schedule)
    with linked(len(schedule)) as made:
        connect(made, ranks, codec=codec)
        own = [
            {number: stages[number] for number, of in enumerate(ranks) if of == each.rank}
            for each in made
        ]
        yield [
            Execution(its, ranks, each.links, Meter()) for its, each in zip(own, made, strict=True)
        ]


def run_step(
    made: Sequence[Execution], schedule: Schedule, parts: Sequence[Microbatch], turn: int = 0
) -> list[StepOutcome]:
    return at_once(lambda rank: made[rank].run(turn, schedule[rank], parts), len(schedule))


def at_once(do: Callable[[int], Any], num: int) -> list[Any]:
    """What `do` returns for each number, in a thread each."""
    with ThreadPoolExecutor(num) as pool:
        return list(pool.map(do, range(num)))


class Gated(nn.Module):
    """A layer that takes and returns a hidden state, a mask of integers, and an auxiliary loss so far."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, width)

    def forward(self, value: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        hidden, mask, auxiliary = value
        gate = self.gate(hidden).sigmoid()
        return hidden * gate * mask[:, None], mask, auxiliary + gate.square().mean()


class Begin(nn.Module):
    """The model's input to what its layers hand on."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(6, width)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.inner(inputs), (inputs[:, 0] > 0).long(), inputs.new_zeros(())


class GatedModel(nn.Module):
    """Layers that hand on trees of tensors, some of which take no gradients."""

    def __init__(self, num_layers: int = 4, width: int = 8) -> None:
        super().__init__()
        self.begin = Begin(width)
        self.blocks = nn.ModuleList(Gated(width) for _ in range(num_layers))

    def stages(self) -> list[nn.Module]:
        return [self.begin, *self.blocks]

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        value: tuple[Tensor, Tensor, Tensor] = self.begin(inputs)
        for block in self.blocks:
            value = block(value)
        return value
