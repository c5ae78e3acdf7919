"""What stages of a mesh hand each other, over `torch.distributed`: tensors, from one rank to another.

What an instruction needs of another rank is asked for two instructions ahead, so that it travels while the
rank computes; what it sends goes its way at once. With one rank along `pp` nothing travels.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from smolcluster.algorithms.Mesh.groups import Groups
from smolcluster.data.dataset import Batch
from smolcluster.errors import ConfigError
from smolcluster.training.compute import Microbatch
from smolcluster.training.schedules.instructions import Instruction, Op
from smolcluster.training.stages.execution import Transport

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
MOST_DIMENSIONS = 8
Key = tuple[bool, int, int]
"""Whether it goes forward, the stage that takes it, and the microbatch."""


class MeshLinks(Transport):
    """Outputs of stages, and gradients of their inputs.

    A receiver learns type and shape of a stage's input with the first microbatch of a size.
    """

    def __init__(self, groups: Groups, ranks: Sequence[int], num_microbatches: int) -> None:
        """`ranks`: coordinate along pp of each stage."""
        self._groups, self._ranks, self._num = groups, ranks, num_microbatches
        self._sizes: list[int] = []
        """Samples that are computed of each microbatch."""
        self._shapes: dict[tuple[int, int], tuple[torch.dtype, list[int]]] = {}
        """Of the input of a stage, for so many samples."""
        self._here: dict[Key, Batch] = {}
        self._asked: dict[Key, tuple[Tensor, dist.Work]] = {}
        self._sent: list[tuple[Tensor, dist.Work]] = []

    def begin_step(self, parts: Sequence[Microbatch]) -> None:
        """These microbatches come next."""
        self._sizes = [max(1, part.num_samples) for part in parts]

    def expect(self, coming: Sequence[Instruction]) -> None:
        """Begin to receive what other ranks send, where its shape is known."""
        stages = range(len(self._ranks))
        if coming[0].source not in stages:
            self._groups.note(str(coming[0]))
        for each in coming:
            if each.source in stages:
                self._ask(_key(each, each.stage))

    def receive(self, instruction: Instruction) -> Any:
        """Wait for what an instruction takes: a tensor, or a list of one gradient."""
        self._groups.note(f"waiting for what {instruction} takes", waits=True)
        forward, stage, _ = key = _key(instruction, instruction.stage)
        if key in self._here:
            found = self._here.pop(key)
        else:
            if forward and self._place(key) not in self._shapes:
                header = torch.zeros(
                    MOST_DIMENSIONS + 2, dtype=torch.int64, device=self._groups.device
                )
                dist.recv(header, src=self._rank(stage - 1), tag=self._tag(key, header=True))
                dtype, dimensions, *shape = header.tolist()
                self._shapes[self._place(key)] = (DTYPES[dtype], shape[:dimensions])
            self._ask(key)
            buffer, work = self._asked.pop(key)
            work.wait()
            found = buffer if forward else [buffer]
        self._groups.note(str(instruction))
        return found

    def send(self, instruction: Instruction, result: Batch) -> None:
        """Send to the stage that takes it; returns at once.

        Raises:
            ConfigError: it is no tensor of floating point, or has another shape than the first one of this
                size.
        """
        forward, target, _ = key = _key(instruction, instruction.target)
        if forward and not isinstance(result, Tensor):
            raise ConfigError(
                f"the last layer of stage {instruction.stage} returns a {type(result).__name__}, but "
                "stages of a mesh send one tensor: cut the model so that layers return one, or set "
                "mesh.pp to 1"
            )
        if self._is_here(target):
            self._here[key] = result
        elif forward:
            self._tell_shape(key, result)
            self._send(result, target, self._tag(key))
        else:
            [gradient] = result
            if gradient is None:  # nothing depends on the input
                dtype, shape = self._shapes[self._place(key)]
                gradient = torch.zeros(shape, dtype=dtype, device=self._groups.device)
            self._send(gradient, target, self._tag(key))

    def finish(self) -> None:
        """Wait until all has been sent."""
        self._groups.note("waiting until all is sent", waits=True)
        for _, work in self._sent:
            work.wait()
        self._sent.clear()

    def _ask(self, key: Key) -> None:
        """Begin to receive, if the shape is known."""
        forward, stage, _ = key
        sender, known = stage - 1 if forward else stage + 1, self._shapes.get(self._place(key))
        if self._is_here(sender) or key in self._asked or known is None:
            return
        dtype, shape = known
        buffer = torch.empty(shape, dtype=dtype, device=self._groups.device)
        work = dist.irecv(buffer, src=self._rank(sender), tag=self._tag(key))
        self._asked[key] = (buffer, work_of(work))

    def _tell_shape(self, key: Key, tensor: Tensor) -> None:
        _, stage, _ = key
        if tensor.dtype not in DTYPES or tensor.ndim > MOST_DIMENSIONS:
            raise ConfigError(
                f"the last layer of stage {stage - 1} returns a tensor of {tensor.dtype} and shape "
                f"{list(tensor.shape)}, but stages of a mesh send floating point of at most "
                f"{MOST_DIMENSIONS} dimensions: cut the model elsewhere, or set mesh.pp to 1"
            )
        known = (tensor.dtype, list(tensor.shape))
        first = self._shapes.setdefault(self._place(key), known)
        if first is known:
            rest = [0] * (MOST_DIMENSIONS - tensor.ndim)
            told = [DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape, *rest]
            header = torch.tensor(told, dtype=torch.int64, device=self._groups.device)
            self._send(header, stage, self._tag(key, header=True))
        elif first != known:
            raise ConfigError(
                f"stage {stage - 1} returns a tensor of shape {list(tensor.shape)}, and "
                f"returned {first[1]} for as many samples before: pad samples to one length"
            )

    def _send(self, tensor: Tensor, stage: int, tag: int) -> None:
        tensor = tensor.contiguous()
        self._sent.append((tensor, work_of(dist.isend(tensor, dst=self._rank(stage), tag=tag))))

    def _place(self, key: Key) -> tuple[int, int]:
        """The stage between which and the one before it is sent, and of how many samples it is."""
        forward, stage, microbatch = key
        return stage if forward else stage + 1, self._sizes[microbatch]

    def _is_here(self, stage: int) -> bool:
        return self._ranks[stage] == self._groups["pp"]

    def _rank(self, stage: int) -> int:
        return self._groups.rank_at(pp=self._ranks[stage])

    def _tag(self, key: Key, *, header: bool = False) -> int:
        forward, stage, microbatch = key
        return ((stage * 2 + forward) * self._num + microbatch) * 2 + header


def _key(instruction: Instruction, taker: int) -> Key:
    return instruction.op is Op.FORWARD, taker, instruction.microbatch


def work_of(work: dist.Work | None) -> dist.Work:
    """What was begun: where a rank is in the group there is something."""
    if work is None:
        raise RuntimeError("this rank is in no group")
    return work
