"""What a mesh understands of a configuration, and what can be refused before any process has started."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat

from smolcluster.algorithms.Mesh.sharding import Cut, groups_of, read_sharding
from smolcluster.algorithms.scheduled import ALIASES, check_whole, mesh_schedule
from smolcluster.configs.schema import (
    FLAT_OPTIMIZERS,
    AlgorithmConfig,
    GPTConfig,
    LocalPath,
    MeshSizes,
    ProfileConfig,
    ScheduleKeys,
    Settings,
    TrainConfig,
    one_sentence,
)
from smolcluster.errors import ConfigError
from smolcluster.training.schedules.instructions import Schedule
from smolcluster.utils.units import format_count

Backend = Literal["auto", "nccl", "gloo", "mpi"]
SPLIT = frozenset({"zero-bubble", "zb-v", "dualpipev"})
"""Schedules that put weight gradients off."""


class MeshConfig(AlgorithmConfig, ScheduleKeys):
    """A mesh's own keys, all of the cluster file."""

    mesh: MeshSizes = Field(MeshSizes(), description="Mesh: ranks along each dimension.")
    compile: bool = Field(
        False, description="Mesh: whether each rank has its layers compiled by torch.compile."
    )
    sharding: Annotated[
        str | dict[str, Any] | None,
        one_sentence("a sharding file, what it holds, or null"),
    ] = Field(
        None,
        description="Mesh: a sharding file, or what it holds: layers of stages, and which linear layers are "
        "cut by columns or rows; null: layers are divided equally, GPT and SimpleNN cut as they need it.",
    )
    backend: Backend = Field(
        "auto", description="Mesh: auto is nccl where all ranks compute on CUDA, else gloo."
    )
    profile: ProfileConfig | None = Field(
        None,
        description="Mesh: which steps torch.profiler records, such as {wait: 10, active: 3}; the traces of "
        "all ranks, and one of all of them, are in the run's folder; null: none.",
    )
    hang_timeout_s: PositiveFloat = Field(
        300.0, description="Mesh: seconds in which no rank gets on after which the mesh ends."
    )
    instruction_log: LocalPath | None = Field(
        None,
        description="Mesh: a folder for what each rank computes when, a line an instruction; null: none.",
    )

    @property
    def cuts_matrices(self) -> bool:
        return self.mesh.cut_matrices

    @property
    def num_ranks(self) -> int:
        return self.mesh.world_size

    @property
    def portable(self) -> dict[str, Any]:
        return {} if self.sharding is None else {"sharding": groups_of(self.sharding)}

    def cut(self, num_layers: int, num_stages: int) -> Sequence[range]:
        """The layers of each stage: as the sharding file names them, else divided equally.

        Raises:
            ConfigError: it names others than the model has, or for other stages.
        """
        named = None if self.sharding is None else read_sharding(self.sharding).layers
        if named is None:
            return cut_equally(num_layers, num_stages)
        if len(named) != num_stages or named[-1].stop != num_layers:
            raise ConfigError(
                f"sharding names {named[-1].stop} layers of {len(named)} stages, but the model has "
                f"{num_layers} layers, and {self.schedule} makes {num_stages} stages: change them in the file"
            )
        return named

    @property
    def plan(self) -> Mapping[str, Cut]:
        """How the sharding file cuts linear layers, by patterns of their names."""
        return {} if self.sharding is None else read_sharding(self.sharding).modules

    @property
    def schedule_name(self) -> str:
        """As `training/schedules` calls it."""
        return ALIASES.get(self.schedule, self.schedule)

    def check_device(self, device: str | None) -> None:
        """Refuse a backend that ranks on this device cannot use.

        Raises:
            ConfigError: as `pick_backend`.
        """
        if self.backend != "nccl":
            return
        if device is None:
            from smolcluster.utils.device import pick_device  # noqa: PLC0415 - it imports torch

            device = pick_device(None).type
        pick_backend(self.backend, device.partition(":")[0])

    def instructions(self) -> Schedule:
        """What each rank of a pipeline computes.

        Raises:
            ConfigError: the schedule cannot be made of these numbers.
        """
        return mesh_schedule(self.schedule, self.mesh.pp, self.microbatches)

    def check(self, settings: Settings) -> None:
        """Refuse what a mesh cannot follow, as far as the files tell it."""
        train = settings.train
        num_parts = self.mesh.num_shares * self.microbatches
        what = f"mesh is {self.mesh} and microbatches is {self.microbatches}"
        check_whole(train, num_parts, what)
        pick_backend(self.backend, "cuda")
        if train.optimizer not in FLAT_OPTIMIZERS:
            raise ConfigError(
                f"optimizer is {train.optimizer!r}, a mesh takes {', '.join(FLAT_OPTIMIZERS)}"
            )
        check_optimizer(train.optimizer, self.mesh)
        check_no_average(train)
        gpt = train.model if isinstance(train.model, GPTConfig) and train.workload is None else None
        self.check_division(
            num_samples=train.samples_per_step,
            num_layers=None if gpt is None else gpt.num_layers,
        )
        if gpt is not None and gpt.num_heads % self.mesh.tp:
            raise ConfigError(
                f"mesh.tp is {self.mesh.tp}, which does not divide the {gpt.num_heads} heads of "
                "model.num_heads: change one of them"
            )
        if gpt is not None and self.mesh.sequence_parallel and gpt.max_seq_len % self.mesh.tp:
            raise ConfigError(
                f"mesh.sequence_parallel cuts sequences over the {self.mesh.tp} ranks of mesh.tp, which does "
                f"not divide model.max_seq_len, {gpt.max_seq_len}: change one of them"
            )

    def sizes_for(self, world_size: int) -> MeshSizes:
        """The mesh's sizes.

        Raises:
            ConfigError: they do not make so many ranks.
        """
        if self.mesh.world_size != world_size:
            raise ConfigError(
                f"mesh is {self.mesh}, which makes {self.mesh.world_size} processes, but there are "
                f"{world_size}: change mesh, or start as many processes"
            )
        return self.mesh

    def check_division(self, *, num_samples: int, num_layers: int | None) -> None:
        """Refuse what cannot be divided; `num_samples` are those of a step, `num_layers` None: not known.

        Raises:
            ConfigError: one line with the key, its value and what to change.
        """
        sizes = self.mesh
        for key in ("sequence_parallel", "loss_parallel"):
            if sizes.tp == 1 and getattr(sizes, key):
                raise ConfigError(
                    f"mesh.{key} is true, but mesh.tp is 1: raise mesh.tp, or set it to false"
                )
        told = None if self.sharding is None else read_sharding(self.sharding)
        if told is not None and (told.tp, told.pp) != (sizes.tp, sizes.pp):
            raise ConfigError(
                f"sharding has stages of {told.tp} ranks, {told.pp} in all, but mesh is {sizes}: set "
                f"mesh.tp to {told.tp} and mesh.pp to {told.pp}, or change the file"
            )
        if self.compile and sizes.pp > 1 and self.schedule_name in SPLIT:
            raise ConfigError(
                f"compile is true, but schedule {self.schedule} puts weight gradients off, and a compiled "
                "layer makes all its gradients at once: set schedule to 1f1b or interleaved, or compile to "
                "false"
            )
        num_stages = max((each.stage for one in self.instructions() for each in one), default=0) + 1
        if sizes.pp > 1 and num_layers is not None and num_layers < num_stages:
            has_one_each = num_stages == sizes.pp
            remedy = (
                "a deeper model" if has_one_each else "a schedule with one stage a rank, as 1f1b"
            )
            raise ConfigError(
                f"schedule {self.schedule} with mesh.pp {sizes.pp} makes {num_stages} stages, but "
                f"the model has {num_layers} layers: lower mesh.pp, or take {remedy}"
            )
        parts = sizes.num_shares * self.microbatches
        if num_samples % parts:
            ranks = format_count(sizes.num_shares, "rank")
            raise ConfigError(
                f"a step has {num_samples} samples, which {ranks} (dp x fsdp) "
                f"cannot divide into {self.microbatches} microbatches each: change batch_size so that "
                f"a step has a multiple of {parts}, or microbatches"
            )


def check_no_average(train: TrainConfig) -> None:
    """Raises ConfigError: an average of the weights is wanted."""
    if train.ema_decay is not None:
        raise ConfigError(
            f"ema_decay is {train.ema_decay:g}, but on a mesh nobody averages weights: set it to null"
        )


def check_optimizer(name: str, sizes: MeshSizes) -> None:
    """Refuse Muon, which steps whole matrices, where ranks have parts of them.

    Raises:
        ConfigError: one line with the keys, their values and what to change.
    """
    if name == "muon" and sizes.cut_matrices:
        raise ConfigError(
            f"optimizer is muon, which steps whole matrices, but mesh.fsdp is {sizes.fsdp} and mesh.tp is "
            f"{sizes.tp}, which cut them: set both to 1, or optimizer to adamw"
        )


def what_takes_less(config: MeshConfig, num_samples: int) -> str:
    """What to change where a rank's memory is too small; `num_samples` are those of its share of a step."""
    more = [
        each for each in range(config.microbatches + 1, num_samples + 1) if not num_samples % each
    ]
    advice = []
    if more:
        advice.append(f"raise microbatches from {config.microbatches} to {more[0]}")
    if config.activation_checkpointing != "full":
        advice.append("set activation_checkpointing to full")
    return " or ".join([*advice, "take more ranks along fsdp, tp or pp"])


def pick_backend(backend: Backend, device_type: str) -> str:
    """The backend of `torch.distributed` for ranks that compute on devices of this type.

    Raises:
        ConfigError: NCCL without CUDA, or MPI.
    """
    if backend == "mpi":
        raise ConfigError(
            "backend is mpi, which no wheel of PyTorch has: build PyTorch from source beside an MPI, or set "
            "backend to gloo, or to nccl on CUDA"
        )
    if backend == "nccl" and device_type != "cuda":
        raise ConfigError(
            f"backend is nccl, which needs CUDA, but this rank computes on {device_type}: set backend to gloo"
        )
    if backend == "auto":
        return "nccl" if device_type == "cuda" else "gloo"
    return backend


def check_tags(backend: str, num_stages: int, key: str) -> None:
    """Refuse a pipeline of so many stages, which `key` says, on a backend that may confuse its messages.

    Raises:
        ConfigError: it is NCCL.
    """
    if backend == "nccl" and num_stages > 1:
        raise ConfigError(
            f"{key} is {num_stages} on NCCL, whose messages have no tags: those of a pipeline could be taken "
            f"for each other: set {key} to 1"
        )


def cut_equally(num_layers: int, num_stages: int) -> list[range]:
    """Layers of each stage; the first ones have one more where they cannot be equal."""
    size, rest = divmod(num_layers, num_stages)
    starts = [stage * size + min(stage, rest) for stage in range(num_stages + 1)]
    return [range(start, end) for start, end in pairwise(starts)]
