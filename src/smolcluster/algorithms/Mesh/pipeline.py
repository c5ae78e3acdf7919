"""One step of a pipeline: each rank executes its instruction list over `torch.distributed`.

What an instruction needs of another rank is asked for two instructions ahead, so that it travels while the
rank computes; what it sends goes its way at once. With one rank along `pp` nothing travels.
"""

import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from smolcluster.algorithms.Mesh.compute import Part, StageCompute
from smolcluster.algorithms.Mesh.groups import Groups
from smolcluster.errors import ConfigError
from smolcluster.training.schedules.instructions import Instruction, Op, Schedule, stage_ranks
from smolcluster.training.schedules.simulation import Span
from smolcluster.utils.meter import Meter

AHEAD = 2
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
MOST_DIMENSIONS = 8
Key = tuple[bool, int, int]
"""Whether it goes forward, the stage that takes it, and the microbatch."""


class Transfers:
    """What stages of a pipeline send each other: output of a stage, and gradient of its input.

    A receiver learns type and shape of a stage's input with the first microbatch of a size.
    """

    def __init__(self, groups: Groups, ranks: Sequence[int], num_microbatches: int) -> None:
        """`ranks`: coordinate along pp of each stage."""
        self._groups, self._ranks, self._num = groups, ranks, num_microbatches
        self._shapes: dict[tuple[int, int], tuple[torch.dtype, list[int]]] = {}
        self._here: dict[Key, Tensor] = {}
        self._asked: dict[Key, tuple[Tensor, dist.Work]] = {}
        self._sent: list[tuple[Tensor, dist.Work]] = []

    def send(self, key: Key, tensor: Tensor, size: int) -> None:
        """Send to the stage that `key` names; returns at once. `size`: samples of the microbatch.

        Raises:
            ConfigError: the tensor has another shape than the first one of this size.
        """
        forward, stage, _ = key
        if self._is_here(stage):
            self._here[key] = tensor
            return
        if forward:
            self._tell_shape(key, tensor, size)
        self._send(tensor.contiguous(), stage, self._tag(key))

    def ask(self, key: Key, size: int) -> None:
        """Begin to receive, if the shape is known."""
        forward, stage, _ = key
        sender = stage - 1 if forward else stage + 1
        known = self._shapes.get((stage if forward else stage + 1, size))
        if self._is_here(sender) or key in self._asked or known is None:
            return
        dtype, shape = known
        buffer = torch.empty(shape, dtype=dtype, device=self._groups.device)
        work = dist.irecv(buffer, src=self._rank(sender), tag=self._tag(key))
        self._asked[key] = (buffer, _work(work))

    def take(self, key: Key, size: int) -> Tensor:
        """Wait for it."""
        forward, stage, _ = key
        if key in self._here:
            return self._here.pop(key)
        if forward and (stage, size) not in self._shapes:
            header = torch.zeros(MOST_DIMENSIONS + 2, dtype=torch.int64, device=self._groups.device)
            dist.recv(header, src=self._rank(stage - 1), tag=self._tag(key, header=True))
            dtype, dimensions, *shape = header.tolist()
            self._shapes[stage, size] = (DTYPES[dtype], shape[:dimensions])
        self.ask(key, size)
        buffer, work = self._asked.pop(key)
        work.wait()
        return buffer

    def finish(self) -> None:
        """Wait until all has been sent."""
        for _, work in self._sent:
            work.wait()
        self._sent.clear()

    def _tell_shape(self, key: Key, tensor: Tensor, size: int) -> None:
        _, stage, _ = key
        known = (tensor.dtype, list(tensor.shape))
        if (stage, size) not in self._shapes:
            self._shapes[stage, size] = known
            rest = [0] * (MOST_DIMENSIONS - tensor.ndim)
            told = [DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape, *rest]
            header = torch.tensor(told, dtype=torch.int64, device=self._groups.device)
            self._send(header, stage, self._tag(key, header=True))
        elif self._shapes[stage, size] != known:
            _, first = self._shapes[stage, size]
            raise ConfigError(
                f"stage {stage - 1} returns a tensor of shape {list(tensor.shape)}, and "
                f"returned {first} for as many samples before: pad samples to one length"
            )

    def _send(self, tensor: Tensor, stage: int, tag: int) -> None:
        self._sent.append((tensor, _work(dist.isend(tensor, dst=self._rank(stage), tag=tag))))

    def _is_here(self, stage: int) -> bool:
        return self._ranks[stage] == self._groups["pp"]

    def _rank(self, stage: int) -> int:
        return self._groups.rank_at(pp=self._ranks[stage])

    def _tag(self, key: Key, *, header: bool = False) -> int:
        forward, stage, microbatch = key
        return ((stage * 2 + forward) * self._num + microbatch) * 2 + header


def _work(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise RuntimeError("this rank is in no group")
    return work


class Pipeline:
    """This rank's part of a pipeline."""

    def __init__(
        self,
        groups: Groups,
        schedule: Schedule,
        stages: Mapping[int, StageCompute],
        meter: Meter | None = None,
    ) -> None:
        """`stages`: those of this rank, by number; `meter`: counts where its time goes."""
        self._meter = meter or Meter()
        self.instructions = schedule[groups["pp"]]
        self.stages, self._groups = stages, groups
        ranks = stage_ranks(schedule)
        self._last = len(ranks) - 1
        num_microbatches = 1 + max(each.microbatch for each in self.instructions)
        self._transfers = Transfers(groups, ranks, num_microbatches)

    def run(
        self,
        parts: Sequence[Part],
        scale: float = 1.0,
        note: Callable[[Span], None] | None = None,
    ) -> None:
        """Compute all microbatches; gradients are in the stages' parameters then. `note` hears what ran."""
        for stage in self.stages.values():
            stage.begin(scale)
        for place, instruction in enumerate(self.instructions):
            for coming in self.instructions[place : place + AHEAD + 1]:
                if (key := self._needs(coming)) is not None:
                    self._transfers.ask(key, parts[coming.microbatch].size)
            self._execute(instruction, parts, note)
        self._groups.note("waiting until all is sent", waits=True)
        with self._meter("send"):
            self._transfers.finish()
        for stage in self.stages.values():
            stage.finish()

    def _execute(
        self,
        instruction: Instruction,
        parts: Sequence[Part],
        note: Callable[[Span], None] | None,
    ) -> None:
        stage, number = instruction.stage, instruction.microbatch
        part, compute, given = parts[number], self.stages[stage], None
        key = self._needs(instruction)
        if key is not None:
            self._groups.note(f"waiting for what {instruction} takes", waits=True)
            with self._meter("wait"):
                given = self._transfers.take(key, part.size)
        self._groups.note(str(instruction))
        begin = time.perf_counter()
        with self._meter("forward" if instruction.op is Op.FORWARD else "backward"):
            match instruction.op:
                case Op.FORWARD:
                    result, target = compute.forward(number, part, given), stage + 1
                case Op.BACKWARD:
                    result, target = compute.backward(number, given), stage - 1
                case Op.BACKWARD_INPUT:
                    result, target = compute.backward_input(number, given), stage - 1
                case Op.BACKWARD_WEIGHT:
                    compute.backward_weight(number)
                    result, target = None, stage
        if note is not None:
            note(Span(instruction, begin, time.perf_counter()))
        if result is not None and 0 <= target <= self._last:
            self._transfers.send((target > stage, target, number), result, part.size)

    def _needs(self, instruction: Instruction) -> Key | None:
        """What it takes from another stage."""
        stage, number = instruction.stage, instruction.microbatch
        match instruction.op:
            case Op.FORWARD if stage > 0:
                return True, stage, number
            case Op.BACKWARD | Op.BACKWARD_INPUT if stage < self._last:
                return False, stage, number
        return None
