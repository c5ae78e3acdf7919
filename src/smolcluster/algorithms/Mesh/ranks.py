"""Which ranks of a mesh this process is or starts; pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from smolcluster.errors import ConfigError

RANK_VARIABLES = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)
"""Of torchrun, two of mpirun, and srun: this process's rank, and how many there are.

What mpirun starts in a job of Slurm has the job's own variables as well.
"""
PLACE_VARIABLES = (
    ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
)
"""Of the same: which of this machine's ranks this process is, and how many there are."""
POD_INDEX = "JOB_COMPLETION_INDEX"
"""Which pod of an Indexed Job of Kubernetes this is."""
IN_POD = "KUBERNETES_SERVICE_HOST"
"""Set in each pod."""
DEFAULT_PORT = 29500
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""By which torchrun says that it has a store at MASTER_ADDR and MASTER_PORT."""
NODE_COUNTS = ("SLURM_NNODES", "GROUP_WORLD_SIZE")
"""Of srun, and of torchrun: on how many machines ranks are."""


@dataclass(frozen=True)
class Ranks:
    """The ranks of this command.

    Attributes:
        here: those that it is, or starts.
        is_process: whether this process is one rank itself.
        address, port: where rank 0 or torchrun listens; port None: any free one, as all ranks are this
            machine's.
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
    """What flags and environment say.

    Which rank it is, the environment of torchrun or srun says before the flags; where rank 0 is, the flags
    say before the environment, except that they must not contradict torchrun.

    Raises:
        ConfigError: numbers or places that contradict each other.
    """
    for flag, number in (("--world-size", world_size), ("--nproc-per-node", num_here)):
        if number is not None and number < 1:
            raise ConfigError(f"{flag} is {number}, must be a whole number above 0")
    if has_agent_store(environ):
        _check_agent_store(environ, address, port)
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
            known = _port(environ, port)
            return _checked(Ranks(range(own, own + 1), size, True, address, known))
    stated = _number(environ, "WORLD_SIZE") if "WORLD_SIZE" in environ else None
    size = world_size or (1 if stated is None else stated)
    if rank is None and stated is not None and size > 1:
        rank = _first_of_pod(environ, num_here or 1, size)
    if rank is None:
        free = None if port is None else _port(environ, port)
        return _checked(Ranks(range(size), size, size == 1, address, free))
    here = range(rank, rank + (num_here or 1))
    return _checked(Ranks(here, size, len(here) == 1, address, _port(environ, port)))


def place_here(environ: Mapping[str, str]) -> tuple[int, int]:
    """Which of this machine's ranks this process is, and how many there are; else the only one."""
    places, sizes = (
        [int(environ[name]) for name in names if environ.get(name)]
        for names in zip(*PLACE_VARIABLES, strict=True)
    )
    return next(iter(places), 0), next(iter(sizes), 1)


def _port(environ: Mapping[str, str], stated: int | None) -> int:
    """Where rank 0 or torchrun listens.

    Raises:
        ConfigError: there is no such port.
    """
    name, port = "--master-port", stated
    if port is None:
        name = "MASTER_PORT"
        port = _number(environ, name) if name in environ else DEFAULT_PORT
    if not 0 < port < 65536:
        raise ConfigError(f"{name} is {port}, must be a whole number from 1 to 65535")
    return port


def _first_of_pod(environ: Mapping[str, str], num_here: int, size: int) -> int:
    """The first rank of a pod, by its place in an Indexed Job or a StatefulSet.

    Raises:
        ConfigError: nothing says which process this is of those that WORLD_SIZE counts.
    """
    name, _, last = environ.get("HOSTNAME", "").rpartition("-")
    if POD_INDEX in environ:
        return _number(environ, POD_INDEX) * num_here
    if IN_POD in environ and name and last.isdecimal() and int(last) * num_here < size:
        return int(last) * num_here
    raise ConfigError(
        f"WORLD_SIZE is {size}, but nothing says which rank this process is: set RANK or --rank (in "
        f"Kubernetes completionMode: Indexed and completions: {size // num_here}, or a StatefulSet), or "
        "unset WORLD_SIZE and say --world-size to have all ranks on this machine"
    )


def has_agent_store(environ: Mapping[str, str]) -> bool:
    """Whether torchrun serves a store to its ranks."""
    return environ.get(AGENT_STORE) == str(True)


def _check_agent_store(environ: Mapping[str, str], address: str | None, port: int | None) -> None:
    """Refuse flags that lead ranks elsewhere than to torchrun's store.

    Raises:
        ConfigError: one does.
    """
    flags = (
        ("--master-addr", address, "MASTER_ADDR"),
        ("--master-port", port, "MASTER_PORT"),
    )
    for flag, stated, variable in flags:
        known = environ.get(variable)
        if stated is not None and known is not None and str(stated) != known:
            raise ConfigError(
                f"{flag} is {stated}, but torchrun has its store at {known} ({variable}): leave the flag "
                "out, or give it to torchrun"
            )


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
    if ranks.world_size < 1:
        raise ConfigError("WORLD_SIZE is 0, must be a whole number above 0")
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
