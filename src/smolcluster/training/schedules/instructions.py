"""What each rank of a pipeline computes, in which order: one instruction list a rank, for one training step.

A *rank* is a process, a *stage* a contiguous range of layers. With more than one stage a rank (interleaved,
ZB-V) stages are "virtual": `chunk` counts the stages of a rank. Sends and receives are implied: FORWARD of
stage s needs the output of stage s-1 for the same microbatch and sends its own when it is done; BACKWARD and
BACKWARD_INPUT need the gradient from stage s+1 likewise, and BACKWARD_WEIGHT needs nothing from elsewhere.

Sources: GPipe 1811.06965; 1F1B (PipeDream-Flush) 2006.09503; interleaved 1F1B 2104.04473; eager 1F1B
2211.05322; ZB-H1 2401.10241; ZB-V 2405.15362; DualPipeV, the half of DualPipe (2412.19437) that needs no
second copy of the weights.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType

from smolcluster.errors import ConfigError
from smolcluster.utils.words import hint_at


class Op(StrEnum):
    """What is computed of a microbatch at a stage."""

    FORWARD = "F"
    BACKWARD = "B"
    """Gradients of the input and of the weights at once."""
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"


@dataclass(frozen=True, slots=True)
class Instruction:
    """One computation of one microbatch at one stage."""

    op: Op
    microbatch: int
    stage: int

    @property
    def source(self) -> int:
        """The stage whose result it takes; none has that number where it takes none."""
        return {Op.FORWARD: self.stage - 1, Op.BACKWARD_WEIGHT: -1}.get(self.op, self.stage + 1)

    @property
    def target(self) -> int:
        """The stage that takes its result; none has that number where none does."""
        return {Op.FORWARD: self.stage + 1, Op.BACKWARD_WEIGHT: -1}.get(self.op, self.stage - 1)

    def __str__(self) -> str:
        return f"{self.op}{self.microbatch} of stage {self.stage}"


Schedule = tuple[tuple[Instruction, ...], ...]
"""The instruction list of each rank."""


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards: every activation of the step is held."""
    microbatches = range(num_microbatches)
    return tuple(
        (*_all(Op.FORWARD, microbatches, rank), *_all(Op.BACKWARD, microbatches, rank))
        for rank in range(num_ranks)
    )


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """After `num_ranks - rank - 1` forwards each forward is followed by a backward.

    A rank holds at most `num_ranks - rank` microbatches.
    """
    return tuple(
        _alternating(rank, num_microbatches, num_ranks - rank - 1) for rank in range(num_ranks)
    )


def eager_one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B with `2 (num_ranks - rank - 1)` forwards first, as if every link were a stage.

    Links as slow as stages then keep nobody waiting; a rank holds nearly twice the microbatches.
    """
    return tuple(
        _alternating(rank, num_microbatches, 2 * (num_ranks - rank - 1))
        for rank in range(num_ranks)
    )


def _alternating(stage: int, num_microbatches: int, num_warm_up: int) -> tuple[Instruction, ...]:
    """Forwards, then forward and backward in turn, then the backwards that are left."""
    num_warm_up = min(num_warm_up, num_microbatches)
    instructions = list(_all(Op.FORWARD, range(num_warm_up), stage))
    for backward, forward in enumerate(range(num_warm_up, num_microbatches)):
        instructions.append(Instruction(Op.FORWARD, forward, stage))
        instructions.append(Instruction(Op.BACKWARD, backward, stage))
    cool_down = range(num_microbatches - num_warm_up, num_microbatches)
    return (*instructions, *_all(Op.BACKWARD, cool_down, stage))


def interleaved(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B over two stages a rank: stage `chunk * num_ranks + rank` is on `rank`.

    The bubble is half of that of 1F1B, the bytes sent twice as many. The order is made for a multiple of
    `num_ranks` microbatches; of fewer those that do not exist are left out.
    """
    padded = -(-num_microbatches // num_ranks) * num_ranks

    def units(rank: int, chunks: tuple[int, int], op: Op) -> list[Instruction]:
        return [
            Instruction(op, microbatch, chunk * num_ranks + rank)
            for first in range(0, padded, num_ranks)
            for chunk in chunks
            for microbatch in range(first, first + num_ranks)
        ]

    def instructions(rank: int) -> Iterator[Instruction]:
        forwards, backwards = units(rank, (0, 1), Op.FORWARD), units(rank, (1, 0), Op.BACKWARD)
        num_warm_up = 2 * (num_ranks - rank - 1) + num_ranks
        num_warm_up = min(num_warm_up, len(forwards))
        yield from forwards[:num_warm_up]
        for backward, forward in enumerate(forwards[num_warm_up:]):
            yield forward
            yield backwards[backward]
        yield from backwards[len(forwards) - num_warm_up :]

    return _without_padding((instructions(rank) for rank in range(num_ranks)), num_microbatches)


def zero_bubble(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-H1: 1F1B whose weight gradients are put off by `rank` microbatches, into what was the bubble.

    The bubble is `(num_ranks - 1) (F + I - W)` instead of `(num_ranks - 1) (F + I + W)`; every rank holds at
    most the `num_ranks` microbatches that 1F1B holds on rank 0.
    """
    return tuple(_zb_h1(rank, num_ranks, num_microbatches) for rank in range(num_ranks))


def _zb_h1(rank: int, num_ranks: int, num_microbatches: int) -> tuple[Instruction, ...]:
    num_warm_up = min(num_ranks - rank - 1, num_microbatches)
    instructions = list(_all(Op.FORWARD, range(num_warm_up), rank))
    for microbatch in range(num_microbatches):
        if num_warm_up + microbatch < num_microbatches:
            instructions.append(Instruction(Op.FORWARD, num_warm_up + microbatch, rank))
        instructions.append(Instruction(Op.BACKWARD_INPUT, microbatch, rank))
        if microbatch >= rank:
            instructions.append(Instruction(Op.BACKWARD_WEIGHT, microbatch - rank, rank))
    put_off = range(max(0, num_microbatches - rank), num_microbatches)
    return (*instructions, *_all(Op.BACKWARD_WEIGHT, put_off, rank))


def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-V: rank r holds stages r and `2 num_ranks - 1 - r`, so that a microbatch ends where it began.

    With equal F, I and W no rank waits but for the first microbatch; a rank holds at most `2 num_ranks`
    microbatches of half a rank's layers. First and last stage are on rank 0: tied embeddings need no
    exchange. The order is made for `2 num_ranks - 1` microbatches at least; of fewer those that do not exist
    are left out.
    """
    padded = max(num_microbatches, 2 * num_ranks - 1)
    lists = (_zb_v_rank(rank, num_ranks, padded) for rank in range(num_ranks))
    return _without_padding(lists, num_microbatches)


class _TwoChunks:
    """Appends instructions of two stages, each operation of each stage in the order of microbatches."""

    def __init__(self, stages: tuple[int, int]) -> None:
        self.instructions: list[Instruction] = []
        self._stages = stages
        self._next: dict[tuple[Op, int], int] = {}
        self._late: list[Instruction] = []
        """Weight gradients that were put off, the oldest first."""

    def add(self, op: Op, chunk: int) -> None:
        half = Op.BACKWARD_INPUT if op is Op.BACKWARD else op
        microbatch = self.count(half, chunk)
        self._next[half, chunk] = microbatch + 1
        self.instructions.append(Instruction(op, microbatch, self._stages[chunk]))

    def add_backward(self, chunk: int) -> None:
        self.add(Op.BACKWARD_INPUT, chunk)
        self.add(Op.BACKWARD_WEIGHT, chunk)

    def count(self, op: Op, chunk: int) -> int:
        return self._next.get((op, chunk), 0)

    def put_off(self, chunk: int) -> None:
        """The first half of a backward alone; `catch_up` adds the second one."""
        self.add(Op.BACKWARD_INPUT, chunk)
        self._late.append(replace(self.instructions[-1], op=Op.BACKWARD_WEIGHT))

    def catch_up(self) -> None:
        if self._late:
            self.instructions.append(self._late.pop(0))

    def drain(self, num_pairs: int, num_last: int) -> None:
        """The backwards of both stages that are left, the second half of them without weight gradients."""
        is_late = False
        for pair in range(num_pairs):
            for chunk in (1, 0):
                # an odd rank begins in the middle of a pair, so that neighbours take turns
                if pair == num_pairs // 2 and chunk == 1 - num_pairs % 2:
                    is_late = True
                if is_late:
                    self.put_off(chunk)
                else:
                    self.add(Op.BACKWARD, chunk)
        for _ in range(num_last):
            self.catch_up()
            self.put_off(0)
        self.instructions += self._late


def _zb_v_rank(rank: int, num_ranks: int, num_microbatches: int) -> list[Instruction]:
    rows = _TwoChunks((rank, 2 * num_ranks - 1 - rank))
    for _ in range(2 * (num_ranks - rank) - 1):
        rows.add(Op.FORWARD, 0)
    for _ in range(rank):
        rows.add(Op.FORWARD, 1)
        rows.add(Op.FORWARD, 0)
    for _ in range(num_ranks - rank):
        rows.add(Op.FORWARD, 1)
        rows.add_backward(1)
    while rows.count(Op.FORWARD, 1) < num_microbatches:
        if rows.count(Op.FORWARD, 0) < num_microbatches:
            rows.add(Op.FORWARD, 0)
        rows.add_backward(0)
        rows.add(Op.FORWARD, 1)
        rows.add_backward(1)
    for _ in range(rank):
        rows.add(Op.BACKWARD_INPUT, 0)
        rows.add(Op.BACKWARD_INPUT, 1)
    for _ in range(num_ranks - rank):
        rows.add_backward(0)
    for chunk in (1, 0):
        while rows.count(Op.BACKWARD_WEIGHT, chunk) < num_microbatches:
            rows.add(Op.BACKWARD_WEIGHT, chunk)
    return rows.instructions


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """DualPipeV: two streams of microbatches, one on its way down the ranks and one on its way back.

    Stages lie as in ZB-V. In the steady part each forward of one stage is followed by a backward of the
    other, whose transfers and computing could overlap: weight gradients are put off only where a rank would
    wait, so that fewer are kept than in ZB-V. Needs as many microbatches as there are stages; of fewer those
    that do not exist are left out.
    """
    padded = max(num_microbatches, 2 * num_ranks)
    lists = (_dualpipe_v_rank(rank, num_ranks, padded) for rank in range(num_ranks))
    return _without_padding(lists, num_microbatches)


def _dualpipe_v_rank(rank: int, num_ranks: int, num_microbatches: int) -> list[Instruction]:
    rows, after = _TwoChunks((rank, 2 * num_ranks - 1 - rank)), num_ranks - rank - 1
    for _ in range(2 * after):
        rows.add(Op.FORWARD, 0)
    for _ in range(rank + 1):
        rows.add(Op.FORWARD, 0)
        rows.add(Op.FORWARD, 1)
    for _ in range(after):
        rows.put_off(1)
        rows.catch_up()
        rows.add(Op.FORWARD, 1)
    for _ in range(num_microbatches - 2 * num_ranks + rank + 1):
        for chunk in (0, 1):
            rows.add(Op.FORWARD, chunk)
            rows.add(Op.BACKWARD, 1 - chunk)
    for _ in range(after):
        rows.add(Op.BACKWARD, 1)
        rows.add(Op.FORWARD, 1)
        rows.add(Op.BACKWARD, 0)
    rows.drain(rank + 1, after)
    return rows.instructions


def _all(op: Op, microbatches: range, stage: int) -> Iterator[Instruction]:
    return (Instruction(op, microbatch, stage) for microbatch in microbatches)


def _without_padding(
    lists: Iterator[Iterator[Instruction] | list[Instruction]], num: int
) -> Schedule:
    """Without microbatches from `num` on: what depends on each other is of one microbatch, so order holds."""
    return tuple(
        tuple(each for each in instructions if each.microbatch < num) for instructions in lists
    )


@dataclass(frozen=True)
class ScheduleKind:
    """A schedule that a configuration can name.

    Attributes:
        generate: `(num_ranks, num_microbatches) -> Schedule`.
        num_stages: of each rank.
        needs_full: whether fewer microbatches than ranks make it pointless, and are refused.
    """

    generate: Callable[[int, int], Schedule]
    num_stages: int = 1
    needs_full: bool = False


SCHEDULES: Mapping[str, ScheduleKind] = MappingProxyType(
    {
        "gpipe": ScheduleKind(gpipe),
        "1f1b": ScheduleKind(one_f_one_b),
        "eager-1f1b": ScheduleKind(eager_one_f_one_b),
        "interleaved": ScheduleKind(interleaved, num_stages=2, needs_full=True),
        "zero-bubble": ScheduleKind(zero_bubble),
        "dualpipev": ScheduleKind(dualpipe_v, num_stages=2, needs_full=True),
        "zb-v": ScheduleKind(zb_v, num_stages=2, needs_full=True),
    }
)


def generate(name: str, num_ranks: int, num_microbatches: int) -> Schedule:
    """The schedule of that name.

    Raises:
        ConfigError: there is no such schedule, or it cannot be made of these numbers.
    """
    if name not in SCHEDULES:
        raise ConfigError(
            f"schedule {name!r} is none of {', '.join(SCHEDULES)}{hint_at(name, SCHEDULES)}"
        )
    kind = SCHEDULES[name]
    if num_ranks < 1 or num_microbatches < 1:
        raise ConfigError(
            f"schedule {name} over {num_ranks} machines with {num_microbatches} microbatches: "
            "both must be 1 or more"
        )
    if kind.needs_full and num_microbatches < num_ranks:
        raise ConfigError(
            f"schedule {name} over {num_ranks} machines needs {num_ranks} microbatches or more, not "
            f"{num_microbatches}: raise microbatches, or take schedule 1f1b"
        )
    return kind.generate(num_ranks, num_microbatches)


def stage_ranks(schedule: Schedule) -> tuple[int, ...]:
    """The rank of each stage, in the order of stages."""
    ranks = {each.stage: rank for rank, one in enumerate(schedule) for each in one}
    return tuple(ranks[stage] for stage in sorted(ranks))
