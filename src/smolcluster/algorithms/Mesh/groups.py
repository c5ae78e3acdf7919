"""The device mesh: where a rank stands in it, and what all ranks must agree on."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from smolcluster.algorithms.Mesh.watch import Watch
from smolcluster.configs.schema import MeshSizes
from smolcluster.data.marks import SAME_DATA, SAME_ORDER, first_difference
from smolcluster.errors import ConfigError, PeerLost, Rejected, UserCodeError
from smolcluster.training.workload import Workload
from smolcluster.utils.device import pick_device

DIMENSIONS = ("pp", "dp", "fsdp", "tp")
"""From the outermost: ranks that share a layer are neighbours, on one machine where possible."""
STEP_TIMEOUT = timedelta(hours=24)
"""Of a backend: who watches the ranks says sooner, and by name, which one keeps others waiting."""
LEAST_TORCH = (2, 15)
"""Whose FSDP2 lets a schedule say when a backward is over."""


def check_torch(version: str = torch.__version__) -> None:
    """Refuse a PyTorch that meshes do not run on.

    Raises:
        ConfigError: it is too old.
    """
    major, minor, *_ = version.split(".")
    if (int(major), int(minor)) < LEAST_TORCH:
        least = ".".join(map(str, LEAST_TORCH))
        raise ConfigError(f"torch is {version}, a mesh needs {least} or newer: run `uv sync`")


def own_device(name: str | None, rank: int, instead: str) -> torch.device:
    """The device of the `rank`-th rank of this machine: of several GPUs its own.

    `instead`: what else to do where ranks cannot use the machine's device.

    Raises:
        ConfigError: torch.distributed cannot use it, or there are too few.
    """
    device = pick_device(name)
    if device.type == "mps":
        raise ConfigError(
            f"device is mps, which torch.distributed cannot use: set device to cpu, or {instead}"
        )
    if device.type != "cuda":
        return device
    if rank >= torch.cuda.device_count():
        raise ConfigError(
            f"rank {rank} of this machine has no GPU: it has {torch.cuda.device_count()}; start fewer ranks"
        )
    return torch.device("cuda", rank)


def compare(rank: int, own: Mapping[str, str], first: Mapping[str, str]) -> None:
    """See to it that a rank has rank 0's values.

    Raises:
        ConfigError: one differs.
    """
    for name in {**first, **own}:
        here, there = (each.get(name, "not known") for each in (own, first))
        if here != there:
            raise ConfigError(
                f"{name} is {there} on rank 0 and {here} on rank {rank}: start all ranks with the same code "
                "and configuration"
            )


class Groups:
    """This rank's place in the mesh.

    Attributes:
        sizes: of the mesh.
        mesh: over all ranks, with the dimensions `DIMENSIONS`.
        rank: of all.
        device: that this rank computes on.
        watch: what watches the ranks, and tells rank 0 of each.
    """

    def __init__(self, sizes: MeshSizes, device: torch.device, watch: Watch) -> None:
        """Make the groups; all ranks must do so at once."""
        self.watch = watch
        shape = tuple(getattr(sizes, name) for name in DIMENSIONS)
        self.sizes, self.device = sizes, device
        self.mesh: DeviceMesh = init_device_mesh(device.type, shape, mesh_dim_names=DIMENSIONS)
        for name in DIMENSIONS:
            dist.set_timeout(STEP_TIMEOUT, self.mesh.get_group(name))
        self.rank = dist.get_rank()
        self._place = dict(zip(DIMENSIONS, self.mesh.get_coordinate() or (), strict=True))

    def __getitem__(self, dimension: str) -> int:
        """This rank's coordinate."""
        return self._place[dimension]

    @property
    def share(self) -> int:
        """Which share of a step's samples this rank computes."""
        return self["dp"] * self.sizes.fsdp + self["fsdp"]

    def note(self, doing: str, *, waits: bool = False) -> None:
        """Tell the watch what this rank does now; `waits`: it is for other ranks."""
        self.watch.note(doing, waits=waits)

    def rank_at(self, **place: int) -> int:
        """The rank that stands there, and where this rank does along the other dimensions."""
        rank = 0
        for name in DIMENSIONS:
            rank = rank * getattr(self.sizes, name) + place.get(name, self[name])
        return rank

    def total(self, *values: float) -> list[float]:
        """The sums over all ranks, in float64."""
        sums = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(sums)
        return sums.tolist()

    def all_told(self, value: Any) -> list[Any]:
        """What each rank says, in order of ranks; plain values of JSON."""
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        text = text.to(self.device)
        size = torch.tensor([len(text)], device=self.device)
        sizes = [torch.zeros_like(size) for _ in range(self.sizes.world_size)]
        dist.all_gather(sizes, size)
        longest = max(int(each) for each in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8, device=self.device)
        padded[: len(text)] = text
        texts = [torch.zeros_like(padded) for _ in sizes]
        dist.all_gather(texts, padded)
        return [
            json.loads(bytes(each[: int(size)].tolist()))
            for each, size in zip(texts, sizes, strict=True)
        ]

    def check_data(self, workload: Workload, seed: int) -> None:
        """See to it that all ranks have the same training data in the same order.

        Raises:
            ConfigError: their fingerprints differ.
            Rejected: a sample or the order does; names the first rank that has another one than rank 0.
        """
        fingerprints = self.all_told(workload.fingerprint)
        for rank, each in enumerate(fingerprints):
            compare(rank, {"the dataset": each}, {"the dataset": fingerprints[0]})
        everyone = self.all_told([workload.sample_marks, workload.order_mark(seed)])
        firsts, first_order = everyone[0]
        for rank, (marks, order) in enumerate(everyone):
            if (place := first_difference(marks, firsts)) is not None:
                number = workload.marked_samples[place]
                raise Rejected(
                    f"sample {number} of rank {rank}'s training data is not rank 0's: {SAME_DATA}"
                )
            if order != first_order:
                raise Rejected(
                    f"the sampler of rank {rank} gives another order than rank 0's under the same seed: "
                    f"{SAME_ORDER}"
                )


@contextmanager
def lost_named() -> Iterator[None]:
    """Translate what a backend says when another rank has gone.

    Raises:
        PeerLost: it has.
    """
    try:
        yield
    except (RuntimeError, UserCodeError) as error:
        # a user's layer or loss may be what waits for another rank
        raised = error.__cause__ if isinstance(error, UserCodeError) else error
        reason = str(raised)
        if isinstance(raised, dist.DistError) or "/gloo/" in reason:
            said = (reason.partition("] ")[2] or reason).partition(". ")[0]
            raise PeerLost(f"its connection to another rank is lost ({said})") from error
        raise
