"""Which ranks of a mesh this process is or starts, and how they find each other."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from smolcluster.errors import ConfigError, ConnectTimeout, PortBusy

RANK_VARIABLES = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"))
"""Of torchrun, and of srun: this process's rank, and how many there are."""
DEFAULT_PORT = 29500
STEP_TIMEOUT = timedelta(minutes=30)
"""Longest that a rank waits for another one: rank 0 evaluates and saves alone."""


@dataclass(frozen=True)
class Ranks:
    """The ranks of this command.

    Attributes:
        here: those that it is, or starts.
        is_process: whether this process is one rank itself.
        address, port: where rank 0 listens; port None: any free one, as all ranks are this machine's.
    """

    here: range
    world_size: int
    is_process: bool
    address: str
    port: int | None


def ranks_of(
    environ: Mapping[str, str],
    *,
    world_size: int | None = None,
    rank: int | None = None,
    num_here: int | None = None,
    address: str | None = None,
    port: int | None = None,
) -> Ranks:
    """What flags and environment say; a rank of torchrun or srun wins over the flags.

    Raises:
        ConfigError: numbers that contradict each other.
    """
    address = address or environ.get("MASTER_ADDR") or "localhost"
    for rank_variable, size_variable in RANK_VARIABLES:
        if rank_variable in environ:
            own = _number(environ, rank_variable)
            size = _number(environ, size_variable) if size_variable in environ else world_size
            if size is None:
                raise ConfigError(f"{rank_variable} is {own}, but {size_variable} is not set")
            if world_size not in (None, size):
                raise ConfigError(
                    f"--world-size is {world_size}, but {size_variable} is {size}: leave --world-size out"
                )
            known = port or (_number(environ, "MASTER_PORT") if "MASTER_PORT" in environ else None)
            return _checked(Ranks(range(own, own + 1), size, True, address, known or DEFAULT_PORT))
    size = world_size or 1
    if rank is None:
        return Ranks(range(size), size, size == 1, address, port)
    here = range(rank, rank + (num_here or 1))
    return _checked(Ranks(here, size, len(here) == 1, address, port or DEFAULT_PORT))


def _checked(ranks: Ranks) -> Ranks:
    if ranks.here.start < 0 or ranks.here.stop > ranks.world_size:
        raise ConfigError(
            f"ranks {ranks.here.start} to {ranks.here.stop - 1} are not within 0 to {ranks.world_size - 1}: "
            "lower --rank or --nproc-per-node, or raise --world-size"
        )
    return ranks


def _number(environ: Mapping[str, str], name: str) -> int:
    if not environ[name].isdecimal():
        raise ConfigError(f"{name} is {environ[name]!r}, must be a number")
    return int(environ[name])


def meet(rank: int, ranks: Ranks, backend: str, timeout_s: float) -> None:
    """Wait until all ranks are there, and make the process group.

    Raises:
        ConnectTimeout: some never came; names them.
        PortBusy: another process listens on the port.
    """
    port = ranks.port or DEFAULT_PORT
    try:
        store = TCPStore(
            ranks.address,
            port,
            is_master=rank == 0,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
        )
    except (RuntimeError, dist.DistNetworkError) as error:
        reason = str(error).partition("\n")[0]
        if rank == 0:
            raise PortBusy(
                f"rank 0 cannot listen on port {port}: {reason}; choose another --master-port"
            ) from error
        raise ConnectTimeout(
            f"rank {rank} cannot reach rank 0 at {ranks.address}, port {port}: {reason}; start rank 0 "
            "there, and "
            "check --master-addr"
        ) from error
    store.set(f"here/{rank}", "1")
    end = time.monotonic() + timeout_s
    missing = set(range(ranks.world_size))
    while missing := {each for each in missing if not store.check([f"here/{each}"])}:
        if time.monotonic() > end:
            told = ", ".join(map(str, sorted(missing)))
            raise ConnectTimeout(
                f"after {timeout_s:.0f} s ranks {told} of {ranks.world_size} are missing: start them, "
                "with --rank R for "
                "one process, --rank R --nproc-per-node K for ranks R to R+K-1, or no --rank for all on "
                "this machine"
            )
        time.sleep(0.05)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=ranks.world_size, timeout=STEP_TIMEOUT
    )
