"""What an orchestrator and its workers are told in Python, and by the variables of their environment."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
)

from smolcluster.configs.keys import setting_errors
from smolcluster.configs.schema import AlgorithmName, HeartbeatTimeout, MeshSizes, NodeName, Wait
from smolcluster.configs.spec import (
    algorithm_of_groups,
    algorithm_of_stages,
    algorithms,
    get_algorithm,
)
from smolcluster.errors import ConfigError
from smolcluster.utils.words import hint_at

RESENDS_MAX, RESEND_PROBE_S = 3, 5.0
"""Of the two, what the one means that is not stated."""
VARIABLES = {
    "DATA_PARALLEL": "data_parallel",
    "MODEL_PARALLEL": "model_parallel",
    "PIPELINE_PARALLEL": "pipeline_parallel",
    "TENSOR_PARALLEL": "tensor_parallel",
    "TENSOR_PARALLEL_SIZE": "tensor_parallel_size",
    "MICRO_BATCHES": "micro_batches",
    "ACT_TIMEOUT_SEC": "activation_timeout",
    "ACK_TIMEOUT_SEC": "ack_timeout",
    "RESENDS_MAX": "max_resends",
    "RESEND_PROBE_SEC": "resend_probe_interval",
    "ALLOW_ACT_REUSE": "allow_act_reuse",
    "ACT_CACHE_STEPS": "act_cache_steps",
    "COMPACT_LOG": "compact_log",
    "LOG_STEP_EVERY": "log_step_every",
    "LOG_ACT": "log_act",
}
"""The environment's names of settings."""
_WORDS = {"1": True, "true": True, "yes": True, "on": True}
_WORDS |= {"0": False, "false": False, "no": False, "off": False, "": False}
_NETWORK = ("activation_timeout", "ack_timeout", "max_resends", "resend_probe_interval")
_PIPELINES = ("micro_batches", "allow_act_reuse", "act_cache_steps", "log_act")


def _synchronous() -> str:
    """The first algorithm whose workers share each step."""
    return next(
        spec.name for spec in algorithms().values() if spec.is_synchronous and not spec.is_group
    )


class DistributedConfig(BaseModel):
    """Settings of an `Orchestrator` and its `NetworkWorker`s; what the run needs, workers hear from it.

    Every assignment is checked, and ConfigError says in one line what is wrong. `overrides` are `KEY=VALUE`
    texts for all other keys of a cluster or training file.
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, validate_assignment=True, allow_inf_nan=False
    )

    master_ip: str = Field("127.0.0.1", min_length=1, description="Where the orchestrator listens.")
    master_port: int = Field(29500, ge=1, le=65535)
    num_workers: PositiveInt = Field(1, description="Workers that training begins with.")
    algorithm: AlgorithmName = Field(
        default_factory=_synchronous, description="syncps, edp or another one."
    )
    batch_size: PositiveInt = Field(
        32, description="Samples a worker's step, where the loader has no batch size."
    )
    gradient_accumulation: PositiveInt = 1
    learning_rate: PositiveFloat = 1e-3
    optimizer: str = "adamw"
    weight_decay: NonNegativeFloat = 0.0
    max_grad_norm: PositiveFloat | None = Field(1.0, description="None: gradients are not clipped.")
    use_amp: bool = Field(False, description="Compute in bfloat16 where that is safe.")
    seed: NonNegativeInt = 42
    checkpoint_dir: str = Field("checkpoints", description="For paths of one's own scripts.")
    run_id: str | None = Field(None, description="None: made from the time.")
    secret_file: Path | None = Field(None, description="None: ~/.config/smolcluster/secret.")
    start_timeout: Wait = Field(
        600.0, description="How long a worker waits for the orchestrator, seconds."
    )
    worker_name: NodeName | None = Field(
        None, description="A worker's name; None: the host's and the GPU's."
    )
    overrides: list[str] = []

    vocab_size: PositiveInt = Field(1000, description="This and what follows: for one's own model.")
    d_model: PositiveInt = 128
    n_layers: PositiveInt = 2
    n_heads: PositiveInt = 4

    data_parallel: bool = True
    model_parallel: bool = False
    pipeline_parallel: bool = False
    tensor_parallel: bool = Field(
        False, description="Each layer is divided among processes that the orchestrator starts."
    )
    tensor_parallel_size: PositiveInt = 1
    micro_batches: PositiveInt = 1

    activation_timeout: Wait | None = None
    ack_timeout: HeartbeatTimeout | None = None
    max_resends: PositiveInt | None = None
    resend_probe_interval: Wait | None = None
    allow_act_reuse: bool = False
    act_cache_steps: NonNegativeInt = 0

    compact_log: bool = Field(False, description="No live progress, only lines.")
    log_step_every: NonNegativeInt = Field(0, description="Steps between two lines; 0: none.")
    log_act: bool = False

    def __init__(self, **values: Any) -> None:
        """Settings by keyword.

        Raises:
            ConfigError: an unknown one, or one with a wrong value.
        """
        for name in values:
            self._check_known(name)
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _refused(error) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self._check_known(name)
        try:
            super().__setattr__(name, value)
        except ValidationError as error:
            raise _refused(error) from None

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ, **values: Any) -> Self:
        """The settings that `VARIABLES` of the environment hold; `values` win.

        Raises:
            ConfigError: one of them is wrong; the message names the variable.
        """
        found = {}
        for variable, name in VARIABLES.items():
            if variable in environ and name not in values:
                stated = environ[variable]
                found[name] = _read(cls, name, stated)
                try:
                    cls(**{name: found[name]})
                except ConfigError as error:
                    raise ConfigError(f"{variable}={stated}: {error}") from None
        return cls(**found, **values)

    @property
    def reconnect_timeout(self) -> float | None:
        """How long a worker tries to get back to the orchestrator, seconds; None: the default."""
        if self.max_resends is None and self.resend_probe_interval is None:
            return None
        return (self.max_resends or RESENDS_MAX) * (self.resend_probe_interval or RESEND_PROBE_S)

    @property
    def spreads_layers(self) -> bool:
        """Whether each worker has some of the model's layers, and not all."""
        return self.model_parallel or self.pipeline_parallel

    @property
    def runs_algorithm(self) -> str:
        """What trains: `algorithm`, or the one that spreads layers or tensors, where that is asked for."""
        if self.tensor_parallel:
            return algorithm_of_groups().name
        return algorithm_of_stages().name if self.spreads_layers else self.algorithm

    @property
    def mesh(self) -> MeshSizes:
        """The ranks of `tensor_parallel`: so many for each worker, which has samples or layers of its own."""
        of_workers = "pp" if self.spreads_layers else "dp"
        return MeshSizes.model_validate(
            {of_workers: self.num_workers, "tp": self.tensor_parallel_size}
        )

    @property
    def num_microbatches(self) -> int:
        """Parts of a batch that are on their way through the layers at the same time."""
        if self.tensor_parallel and self.spreads_layers:
            return max(self.micro_batches, self.num_workers)
        return self.micro_batches if self.pipeline_parallel else 1

    def check(self) -> None:
        """Raise ConfigError where settings contradict each other."""
        if not (self.data_parallel or self.spreads_layers or self.tensor_parallel):
            raise ConfigError(
                "data_parallel is False, and so are model_parallel, pipeline_parallel and tensor_parallel: "
                "one of them must be True"
            )
        if self.tensor_parallel and self.tensor_parallel_size == 1:
            raise ConfigError(
                "tensor_parallel is True, but tensor_parallel_size is 1: set it to the ranks that "
                "share each layer"
            )

    @property
    def is_shared(self) -> bool:
        """Whether the workers share each step, so that one of them may be late for it."""
        algorithm = get_algorithm(self.runs_algorithm)
        return algorithm.is_synchronous and not algorithm.is_group

    def notes(self) -> Iterator[str]:
        """What becomes of settings that this system calls otherwise, or has no use for."""
        if self.tensor_parallel:
            idle = [name for name in (*_NETWORK, *_PIPELINES) if self._differs(name)]
            idle = [name for name in idle if name != "micro_batches" or not self.spreads_layers]
            if idle:
                yield f"no effect with tensor_parallel, whose ranks are processes here: {', '.join(idle)}"
            return
        if self.activation_timeout is not None:
            yield (
                f"activation_timeout: a worker whose part of a step is {self.activation_timeout:g} s later "
                "than the first one gets help from another (timeout)"
                if self.is_shared
                else f"activation_timeout has no effect: no {self.runs_algorithm} waits for one worker"
            )
        if self.ack_timeout is not None:
            yield (
                f"ack_timeout: who is silent for {self.ack_timeout:g} s is lost (heartbeat_timeout_s)"
            )
        if self.reconnect_timeout is not None:
            yield (
                f"max_resends x resend_probe_interval: a worker that lost its connection tries to get back "
                f"for {self.reconnect_timeout:g} s (reconnect_timeout_s)"
            )
        idle = [name for name in _PIPELINES if self._differs(name)]
        if self.pipeline_parallel:
            idle = [name for name in idle if name != "micro_batches"]
            if idle:
                yield f"no effect, because no activation is sent twice: {', '.join(idle)}"
        elif idle:
            yield f"no effect without pipeline_parallel: {', '.join(idle)}"
        if self._differs("tensor_parallel_size"):
            yield "no effect without tensor_parallel: tensor_parallel_size"

    def _differs(self, name: str) -> bool:
        return bool(getattr(self, name) != type(self).model_fields[name].default)

    @classmethod
    def _check_known(cls, name: str) -> None:
        if name not in cls.model_fields:
            hint = hint_at(name, cls.model_fields)
            raise ConfigError(f"DistributedConfig has no setting {name!r}{hint}")


def _read(cls: type[BaseModel], name: str, text: str) -> Any:
    """The value that a variable's text means; of what means none, the text itself."""
    kind = cls.model_fields[name].annotation
    if kind is bool:
        return _WORDS.get(text.strip().lower(), text)
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text


def _refused(error: ValidationError) -> ConfigError:
    """The first thing that is wrong."""
    first, *_ = setting_errors(DistributedConfig, error)
    return first.placed(("DistributedConfig", *first.place), "")
