"""What a mesh understands of a configuration, and what can be refused before any process has started."""

from itertools import pairwise
from typing import Any, Literal

from pydantic import Field, PositiveInt

from smolcluster.configs.schema import LocalPath, Section
from smolcluster.errors import ConfigError
from smolcluster.training.schedules.instructions import Schedule, generate

Backend = Literal["auto", "nccl", "gloo"]
Recompute = Literal["none", "full", "selective"]
ScheduleName = Literal[
    "gpipe", "1f1b", "eager-1f1b", "interleaved", "zero-bubble", "zb-v", "zbv", "dualpipev"
]
ALIASES = {"zbv": "zb-v"}
"""What others call a schedule."""
SPLIT = frozenset({"zero-bubble", "zb-v", "dualpipev"})
"""Schedules that put weight gradients off."""


class MeshSizes(Section):
    """How many ranks lie along each dimension; their product is the number of processes."""

    dp: PositiveInt = Field(1, description="Replicas, which share a batch.")
    fsdp: PositiveInt = Field(
        1, description="Ranks that share a batch and hold a part of each weight (FSDP2)."
    )
    tp: PositiveInt = Field(1, description="Ranks that share each layer (tensor parallel).")
    pp: PositiveInt = Field(1, description="Ranks that hold layers one after the other.")

    @property
    def world_size(self) -> int:
        return self.dp * self.fsdp * self.tp * self.pp

    @property
    def num_shares(self) -> int:
        """Ranks among which the samples of a step are divided."""
        return self.dp * self.fsdp

    def __str__(self) -> str:
        return f"dp {self.dp} x fsdp {self.fsdp} x tp {self.tp} x pp {self.pp}"


class MeshConfig(Section):
    """A mesh's own keys."""

    mesh: MeshSizes = Field(MeshSizes(), description="Ranks along each dimension.")
    schedule: ScheduleName = Field("1f1b", description="Order of a pipeline's computations.")
    microbatches: PositiveInt = Field(
        1, description="Parts in which a rank's share of a step is computed."
    )
    activation_checkpointing: Recompute = Field(
        "none",
        description="Layers whose activations are computed again in the backward: full: all; selective: "
        "every second one.",
    )
    backend: Backend = Field("auto", description="auto: nccl where all ranks compute on CUDA.")

    instruction_log: LocalPath | None = Field(
        None,
        description="Mesh: a folder for what each rank computes when, a line an instruction; null: none.",
    )

    @property
    def schedule_name(self) -> str:
        """As `training/schedules` calls it."""
        return ALIASES.get(self.schedule, self.schedule)

    def instructions(self) -> Schedule:
        """What each rank of a pipeline computes.

        Raises:
            ConfigError: the schedule cannot be made of these numbers.
        """
        if self.mesh.pp == 1:
            return generate("gpipe" if self.microbatches == 1 else "1f1b", 1, self.microbatches)
        if self.microbatches < self.mesh.pp:
            raise ConfigError(
                f"microbatches is {self.microbatches}, fewer than the {self.mesh.pp} stages of mesh.pp, "
                "so that "
                f"most ranks would wait: set microbatches to {2 * self.mesh.pp} or more"
            )
        return generate(self.schedule_name, self.mesh.pp, self.microbatches)

    def check(self, *, world_size: int, num_samples: int, num_layers: int) -> None:
        """Refuse what cannot be divided; `num_samples` are those of a step.

        Raises:
            ConfigError: one line with the key, its value and what to change.
        """
        sizes = self.mesh
        if sizes.world_size != world_size:
            raise ConfigError(
                f"mesh is {sizes}, which makes {sizes.world_size} processes, but there are {world_size}: "
                "change "
                "mesh, or start as many processes"
            )
        num_stages = max((each.stage for one in self.instructions() for each in one), default=0) + 1
        if sizes.pp > 1 and num_layers < num_stages:
            raise ConfigError(
                f"schedule {self.schedule} with mesh.pp {sizes.pp} makes {num_stages} stages, but the "
                "model has "
                f"{num_layers} layers: lower mesh.pp, or take a schedule with one stage a rank"
            )
        parts = sizes.num_shares * self.microbatches
        if num_samples % parts:
            raise ConfigError(
                f"a step has {num_samples} samples, which {sizes.num_shares} ranks (dp x fsdp) cannot "
                "divide into "
                f"{self.microbatches} microbatches each: make global_batch_size a multiple of {parts}"
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
        ConfigError: NCCL without CUDA.
    """
    if backend == "nccl" and device_type != "cuda":
        raise ConfigError(
            f"backend is nccl, which needs CUDA, but this rank computes on {device_type}: set backend to gloo"
        )
    if backend == "auto":
        return "nccl" if device_type == "cuda" else "gloo"
    return backend


def cut_equally(num_layers: int, num_stages: int) -> list[range]:
    """Layers of each stage; the first ones have one more where they cannot be equal."""
    size, rest = divmod(num_layers, num_stages)
    starts = [stage * size + min(stage, rest) for stage in range(num_stages + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def config_of(keys: dict[str, Any]) -> MeshConfig:
    """From the keys of a file or a command line.

    Raises:
        ConfigError: a key is unknown or of a wrong type.
    """
    try:
        return MeshConfig.model_validate(keys)
    except ValueError as error:
        first = error.errors()[0] if hasattr(error, "errors") else {"loc": (), "msg": str(error)}
        place = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{place} is wrong: {first['msg']}") from error
