"""Which ranks of a mesh this process is or starts; pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from smolcluster.errors import ConfigError

RANK_VARIABLES = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"))
"""Of torchrun, and of srun: this process's rank, and how many there are."""
DEFAULT_PORT = 29500
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
NODE_COUNTS = ("SLURM_NNODES", "GROUP_WORLD_SIZE")
"""Of srun, and of torchrun: on how many machines ranks are."""


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
            _check_one_world(environ, size, address)
            known = port or (_number(environ, "MASTER_PORT") if "MASTER_PORT" in environ else None)
            return _checked(Ranks(range(own, own + 1), size, True, address, known or DEFAULT_PORT))
    size = world_size or 1
    if rank is None:
        return Ranks(range(size), size, size == 1, address, port)
    here = range(rank, rank + (num_here or 1))
    return _checked(Ranks(here, size, len(here) == 1, address, port or DEFAULT_PORT))


def _check_one_world(environ: Mapping[str, str], size: int, address: str) -> None:
    """Refuse ranks of several machines that would be a mesh on each.

    Raises:
        ConfigError: there are more tasks than ranks, or rank 0 is said to be on every machine.
    """
    tasks = _number(environ, "SLURM_NTASKS") if "SLURM_NTASKS" in environ else size
    if tasks > size:
        raise ConfigError(
            f"SLURM_NTASKS is {tasks}, but WORLD_SIZE {size}: each node would train on its own; unset RANK "
            "and WORLD_SIZE in the job, or give torchrun --nnodes"
        )
    for variable in NODE_COUNTS:
        nodes = _number(environ, variable) if variable in environ else 1
        if nodes > 1 and address in LOOPBACK:
            raise ConfigError(
                f"MASTER_ADDR is {address}, but ranks are on {nodes} nodes ({variable}), each of which would "
                "look for rank 0 on itself: set MASTER_ADDR or --master-addr to the node of rank 0"
            )


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
