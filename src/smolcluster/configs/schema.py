"""The configuration's shape: every key, its type, unit and default.

Three sections share one flat namespace of top-level keys, so that `--override` and the environment can name
a key without naming its file:

* `ClusterConfig` (the cluster file): which machines there are and how they work together.
* `TrainConfig` (the training file): what is trained.
* `NodeConfig` (`nodes.<name>` of the cluster file, or this machine's overrides): what belongs to a machine.
  The server cannot set it.

`RunConfig` is what the server sends to its workers; it holds nothing of any one machine.
"""

import json
import math
import os
import pkgutil
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Strict,
    StringConstraints,
    Tag,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    create_model,
    model_validator,
)

from smolcluster.configs.function_name import FunctionName, check_name
from smolcluster.configs.keys import A_NAME, A_REMOTE_PATH, ALLOWED, REMOTE_PATH, refused
from smolcluster.configs.load import NODE_SECTION, SECTIONS, dump_yaml
from smolcluster.configs.old_keys import OLD_KEYS, TOP_LEVEL, with_old_keys
from smolcluster.configs.problems import Place, SettingError
from smolcluster.configs.spec import AlgorithmSpec, algorithms, spec_of
from smolcluster.errors import ConfigError
from smolcluster.utils.addresses import is_loopback_name
from smolcluster.utils.words import nearest


def _expand_user(path: Path) -> Path:
    """`~/data` -> the data folder in this user's home; a relative path counts from where we are now."""
    try:
        return path.expanduser().absolute()
    except RuntimeError:
        raise ValueError("must not begin with the home folder of an unknown user") from None


def _text(pattern: str, allowed: str, max_length: int | None = None) -> Any:
    """Text that matches a pattern; `allowed`: what does, in the words of a refusal."""
    return Field(pattern=pattern, max_length=max_length, json_schema_extra={ALLOWED: allowed})


def one_sentence(allowed: str) -> WrapValidator:
    """Says in one sentence what is allowed, for whichever of several kinds the value was meant to be."""

    def checked(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
        try:
            return check(value)
        except ValidationError:
            raise SettingError((), value, allowed=allowed) from None

    return WrapValidator(checked)


# A YAML list is no tuple and YAML text no Path: these two are converted, all else must have its type.
# A node's name is part of the names of log files. A destination must not look like an option of ssh.
NodeName = Annotated[str, _text(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", A_NAME)]
Address = Annotated[
    str,
    _text(
        r"^([^\s/@:\[\]]+|[0-9A-Fa-f]*(:[0-9A-Fa-f.]*){2,}(%\w+)?)$",
        "an address or a name, without a port, such as 10.10.0.1",
        max_length=255,
    ),
]
MetricsPort = Annotated[int, Field(ge=1, le=65535)] | None
LokiUrl = (
    Annotated[str, _text(r"^https?://[^\s@/]+/?$", "an address such as http://192.168.1.10:3100")]
    | None
)
SshDestination = Annotated[
    str,
    _text(
        r"^[A-Za-z0-9_][A-Za-z0-9_.@:%+\[\]/-]{0,254}$",
        "what ssh connects to, such as pi@192.168.50.2",
    ),
]
Device = Annotated[str, _text(r"^(cuda(:[0-9]+)?|mps|cpu)$", "cuda, cuda:N, mps or cpu")]
# In a remote path a backslash would mean one thing to fish, and another to all other shells.
RemotePath = Annotated[str, _text(REMOTE_PATH, A_REMOTE_PATH)]
HUB_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)?$"
"""A name on the Hugging Face hub, which leads out of no folder."""
HubName = Annotated[
    str, _text(HUB_NAME, "a name on the Hugging Face hub, such as Salesforce/wikitext")
]
EnvName = Annotated[
    str, _text(r"^[A-Za-z_][A-Za-z0-9_]*$", "a variable's name of letters, digits and '_'")
]
TorchBackend = Annotated[
    str, _text(r"^[a-z0-9.]+$", "auto, pypi, or what uv's --torch-backend takes, such as cu128")
]
NodeNames = Annotated[tuple[NodeName, ...], Strict(False)]
Addresses = Annotated[tuple[Address, ...], Strict(False), Field(min_length=1)]
LocalPath = Annotated[Path, Strict(False), AfterValidator(_expand_user)]
Texts = Annotated[
    tuple[Annotated[str, StringConstraints(min_length=1)], ...], Strict(False), Field(min_length=1)
]
AutoInt = Annotated[
    PositiveInt,
    WithJsonSchema({"anyOf": [{"type": "integer", "exclusiveMinimum": 0}, {"type": "null"}]}),
]
"""A file may say null: then the section that holds it chooses."""
LONGEST_WAIT_S = 1_000_000
"""What sockets, locks and sleeps of every system can wait, seconds: eleven days and a half."""
Wait = Annotated[float, Field(gt=0, le=LONGEST_WAIT_S)]
"""Seconds."""
HeartbeatTimeout = Annotated[float, Field(ge=0.1, le=LONGEST_WAIT_S)]
FunctionNamed = Annotated[str, AfterValidator(check_name)]
Activation = Literal["relu", "gelu", "silu", "tanh"]
SlurmOption = Annotated[
    str,
    _text(r"^[a-z][a-z-]{0,39}$", "a long option of sbatch without its dashes, such as gres"),
]
SlurmValue = Annotated[
    str,
    _text(r"^[^\s\"'\\]+$", "text without blanks, quotes and backslashes", max_length=200),
]
ImageName = Annotated[
    str,
    _text(r"^[A-Za-z0-9][\w./:@-]*$", "the name of an image, such as me/mine:1", max_length=255),
]
KubernetesName = Annotated[
    str,
    _text(
        r"^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$",
        "a name of at most 63 small letters, digits, '.' and '-'",
    ),
]
SecretKey = Annotated[
    str,
    _text(
        r"^[a-z0-9][a-z0-9.-]*/[\w.-]+$",
        "a Secret's name and one of its keys, such as wandb/api-key",
        max_length=253,
    ),
]
AlgorithmName = Annotated[
    str, _text(r"^[a-z][a-z0-9-]{0,31}$", "an algorithm's name in small letters, such as edp")
]
"""One of those that are installed, or `single`; part of the names of runs."""
CodecName = Literal["fp32", "bf16", "fp16", "int8", "int4"]
Encryption = Literal["auto", "on", "off"]
Precision = Literal["fp32", "bf16", "fp16"]
FlatOptimizerName = Literal["adam", "adamw", "sgd", "muon"]
FLAT_OPTIMIZERS: tuple[str, ...] = get_args(FlatOptimizerName)
"""Those that are ours (`training/optimizer.py`), and whose state can lie in parts."""
ElementwiseName = Literal[
    "ASGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
]
"""PyTorch's classes whose step of a weight depends on that weight alone."""
OptimizerName = Annotated[
    Literal[FlatOptimizerName, "auto", ElementwiseName, "Adafactor", "Muon"],
    BeforeValidator(
        lambda name: name.removeprefix("torch.optim.") if isinstance(name, str) else name
    ),
]
"""Ours, and classes of torch.optim that step by dense gradients alone: a Welcome can name no other code."""
PlainValue = bool | int | float | str | None
OptimizerArgs = dict[
    str,
    Annotated[
        PlainValue | Annotated[tuple[PlainValue, ...], Strict(False)],
        one_sentence("a number, text, true, false or null, or a list of these"),
    ],
]

ENV = "env"
"""The key of a machine's section whose values may be secrets, such as tokens and passwords."""
HIDDEN = "***"
BYTES = "bytes"
"""The tokenizer that needs no files."""
OWN_FILES = "<files>"
"""The tokenizer that each machine keeps in files of its own; their content is part of the fingerprint."""
SHORT_SEQUENCE, SHORT_BATCH, LONG_BATCH = 128, 32, 16
NUM_EPOCHS = MappingProxyType({"wikitext": 30, "snli": 20})
DEFAULT_NUM_EPOCHS = 10
"""What null means for `batch_size` and `num_epochs`."""
OWN_DATA = "workload"
"""The name of the dataset that a workload brings."""


class Section(BaseModel):
    """Base of all sections: immutable, strictly typed, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class DatasetPlace(Section):
    """Where a machine keeps its datasets."""

    root: LocalPath | None = Field(None, description="Folder of the data; null: the default one.")
    download: bool = Field(True, description="Fetch the data when it is not there.")
    cache: LocalPath | None = Field(
        None, description="Folder for tokenized text; null: the user's cache folder."
    )
    tokenizer_path: LocalPath | None = Field(
        None,
        description="A worker's copy of the tokenizer, if the server's is named by a path.",
    )


class DatasetConfig(DatasetPlace):
    """Which dataset is trained on (sent to the workers) and where this machine keeps it (not sent)."""

    name: str = Field(
        description="A registered dataset: digits or MNIST; of text stdlib, text, wikitext, snli or "
        "huggingface."
    )
    tokenizer: str = Field(
        BYTES,
        min_length=1,
        description="Of text: bytes, the name of a transformers tokenizer, or a path to one.",
    )
    source: Literal["local", "server"] = Field(
        "local",
        description="Whether workers have the data, or get it from the server with their work.",
    )
    repository: HubName | None = Field(
        None, description="Of huggingface: the dataset's name, such as Salesforce/wikitext."
    )
    configuration: str | None = Field(
        None, description="Of huggingface: the dataset's configuration, such as wikitext-2-raw-v1."
    )
    columns: Texts = Field(("text",), description="Of huggingface: the columns that hold text.")
    train_split: str = Field("train", description="Of huggingface: the split that is trained on.")
    validation_split: str = Field(
        "validation", description="Of huggingface: the split that is held out."
    )

    @property
    def anywhere(self) -> "DatasetConfig":
        """The same without what belongs to a machine."""
        places = {name: field.default for name, field in DatasetPlace.model_fields.items()}
        if self.has_tokenizer_path:
            places["tokenizer"] = OWN_FILES
        return self.model_copy(update=places)

    def at(self, place: DatasetPlace) -> "DatasetConfig":
        """The same as a machine keeps it."""
        kept = {name: getattr(place, name) for name in DatasetPlace.model_fields}
        if self.tokenizer == OWN_FILES and place.tokenizer_path is not None:
            kept["tokenizer"] = str(place.tokenizer_path)
        return self.model_copy(update=kept)

    @property
    def has_tokenizer_path(self) -> bool:
        """Whether the tokenizer is named by a path, not by a name that means the same everywhere."""
        return re.fullmatch(HUB_NAME, self.tokenizer) is None

    @property
    def reads_hub(self) -> bool:
        """Whether it, or its tokenizer, may come from the Hugging Face hub."""
        own = self.tokenizer in (BYTES, OWN_FILES) or self.has_tokenizer_path
        return self.name in ("wikitext", "snli", "huggingface") or not own

    def with_absolute_tokenizer(self) -> "DatasetConfig":
        """The same with the absolute path of a tokenizer that is here, so that other folders find it too."""
        if self.tokenizer in (BYTES, OWN_FILES):
            return self
        try:
            path = Path(self.tokenizer).expanduser()
            is_here = path.exists()
        except (RuntimeError, OSError):
            return self
        return self.model_copy(update={"tokenizer": str(path.absolute())}) if is_here else self


class MeshSizes(Section):
    """How many ranks lie along each dimension, and what those along tp share besides layers.

    The product of the sizes is the number of processes.
    """

    dp: PositiveInt = Field(1, description="Replicas, which share a batch.")
    fsdp: PositiveInt = Field(
        1, description="Ranks that share a batch and hold a part of each weight (FSDP2)."
    )
    tp: PositiveInt = Field(1, description="Ranks that share each layer (tensor parallel).")
    pp: PositiveInt = Field(1, description="Ranks that hold layers one after the other.")
    sequence_parallel: bool = Field(
        False,
        description="Between layers that are cut over tp each rank has its part of every sequence (GPT).",
    )
    loss_parallel: bool = Field(
        False,
        description="Each rank along tp has its part of the vocabulary: of embedding, logits and loss (GPT).",
    )

    @property
    def world_size(self) -> int:
        return self.dp * self.fsdp * self.tp * self.pp

    @property
    def num_shares(self) -> int:
        """Ranks among which the samples of a step are divided."""
        return self.dp * self.fsdp

    @property
    def cut_matrices(self) -> bool:
        return self.fsdp > 1 or self.tp > 1

    def __str__(self) -> str:
        return f"dp {self.dp} x fsdp {self.fsdp} x tp {self.tp} x pp {self.pp}"


class ProfileConfig(Section):
    """Which steps `torch.profiler` records, counted from the start of the process."""

    wait: NonNegativeInt = Field(1, description="Steps before it is warmed up.")
    warmup: NonNegativeInt = Field(1, description="Steps that are recorded and thrown away.")
    active: PositiveInt = Field(3, description="Steps that are kept.")

    @property
    def num_steps(self) -> int:
        return self.wait + self.warmup + self.active


LayerRange = Annotated[tuple[NonNegativeInt, PositiveInt], Field(strict=False)]
"""Layers `[start, end)`."""


ShardPlan = Annotated[
    Literal["auto", "even"] | dict[str, LayerRange | list[LayerRange]],
    one_sentence(
        "auto, even, or ranges of layers by node, such as {mini1: [0, 12], pi5: [12, 20]}"
    ),
]
Servers = Annotated[
    Literal["auto"]
    | NodeNames
    | dict[NodeName, Annotated[float, Field(gt=0, allow_inf_nan=False)]]
    | None,
    one_sentence(
        "auto, a list of nodes, nodes with what each takes, such as {mini1: 2, pi5: 1}, or null"
    ),
]
ActivationCodec = Literal["fp32", "bf16", "int8"]
ActivationCheckpointing = Literal["none", "full", "selective"]


class ScheduleKeys(Section):
    """How layers that lie one after the other on several processes compute a batch."""

    schedule: str = Field(
        "1f1b",
        description="Order of computations, one of gpipe, 1f1b, eager-1f1b, interleaved, zero-bubble, "
        "dualpipev, zb-v.",
    )
    microbatches: PositiveInt = Field(
        4,
        description="Parts of a batch (of a mesh: of a rank's share of it) that are on their way at the same "
        "time.",
    )
    activation_checkpointing: ActivationCheckpointing = Field(
        "none",
        description="Layers whose activations are computed again in the backward, for less memory and a "
        "third more work: full is all, selective (of a mesh) every second one.",
    )


class PipelineKeys(ScheduleKeys):
    """How the stages of a pipeline share its layers, and what travels between them."""

    shard_plan: ShardPlan = Field(
        "auto",
        description="Which layers are whose, such as {mini1: [0, 12], pi5: [12, 16]}, end not included; "
        "auto: by what layers take on the machines that are there; even: as many for each.",
    )
    activation_codec: ActivationCodec = Field(
        "fp32", description="How activations and their gradients are sent between stages."
    )


class StagesConfig(PipelineKeys):
    """The machines that have the layers of one worker, how they reach it, and how they compute a batch."""

    model_config = ConfigDict(json_schema_extra=with_old_keys("recompute"))

    host_ip: dict[NodeName, Address] = Field(
        min_length=1,
        description="The nodes, and the address at which each reaches the worker, whose own may be one.",
    )
    port: int = Field(65433, ge=1, le=65535, description="The worker's TCP port for them.")

    def __str__(self) -> str:
        return ", ".join(self.host_ip)


class NodeConfig(Section):
    """What belongs to a machine and only it can know."""

    device: Device | None = Field(
        None, description="cuda, cuda:1, mps or cpu; null: the best there is."
    )
    threads: PositiveInt | None = Field(
        None, description="Compute threads; null: PyTorch's choice."
    )
    microbatch: PositiveInt | None = Field(
        None,
        description="Samples computed at once; null: the whole batch. Less takes less memory and "
        "gives the same result without dropout.",
    )
    ranks: MeshSizes | None = Field(
        None,
        description="DiLoCo: processes of this machine that are one worker, such as {dp: 2, tp: 1}: a mesh; "
        "null: one process.",
    )
    stages: StagesConfig | None = Field(
        None,
        description="DiLoCo: machines that are one worker, each with some of the layers: a pipeline, as in "
        "{host_ip: {mini1: 127.0.0.1, pi5: 192.168.50.2}}; null: one process.",
    )
    dataset: DatasetPlace = DatasetPlace()
    secret_file: LocalPath | None = Field(
        None, description="The cluster's secret; null: ~/.config/smolcluster/secret."
    )
    runs_dir: LocalPath | None = Field(
        None,
        description="Where runs are kept; null: runs/ at the project's root, on machines to which a launch "
        "brings it ~/smolcluster/runs.",
    )
    addresses: Addresses | None = Field(
        None,
        description="Of a store: this machine's addresses at which workers reach it; null: the one from "
        "which it reaches the server.",
    )
    ssh: SshDestination | None = Field(
        None,
        description="For the launcher: where `ssh` finds the machine, such as pi@192.168.50.2; local: it is "
        "the one that launches; null: the node's name.",
    )
    project_dir: RemotePath | None = Field(
        None,
        description="For the launcher: a clone of the project there, which is used with its .venv as it is; "
        "null: a launch brings code and environment.",
    )
    env: dict[EnvName, str] = Field(
        {}, description="For the launcher: environment of the machine's processes."
    )
    torch: TorchBackend = Field(
        "auto",
        description="For the launcher: PyTorch's build, as uv's --torch-backend (auto, cpu, cu128, …); "
        "pypi: the one of the registry.",
    )

    @property
    def spread(self) -> tuple[str, object] | None:
        """The key that makes a worker several processes, and its value; None: it is one."""
        keys = ("ranks", self.ranks), ("stages", self.stages)
        return next(((key, value) for key, value in keys if value is not None), None)


class AlgorithmConfig(Section):
    """What one algorithm alone understands: each of its keys stands in a file as all others do.

    Attributes:
        training_keys: those that stand in the training file; the others are of the cluster file.
        local: what they are with --local, whatever the cluster file says.
        claims: keys that no other algorithm can follow where they are set, and why it cannot.
        by_node: keys of the cluster file that hold a mapping of nodes.
        old_keys: those of `OLD_KEYS` that were its own, where no key of its own says the same today.
    """

    training_keys: ClassVar[frozenset[str]] = frozenset()
    local: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    claims: ClassVar[Mapping[str, str]] = MappingProxyType({})
    by_node: ClassVar[frozenset[str]] = frozenset()
    old_keys: ClassVar[frozenset[str]] = frozenset()

    @property
    def status_fields(self) -> dict[str, Any]:
        """Fields of `RunStatus` that follow from it."""
        return {}

    @property
    def num_ranks(self) -> int:
        """Of a group: its processes."""
        return 0

    @property
    def cuts_matrices(self) -> bool:
        """Whether ranks hold parts of matrices."""
        return False

    @property
    def portable(self) -> dict[str, Any]:
        """Keys that name files of this machine, with what they hold instead."""
        return {}

    @property
    def uplink_codec(self) -> str | None:
        """The codec of what workers send; None: what `codec` says."""
        return None

    def pinned(self, settings: "Settings") -> dict[str, Any]:  # noqa: ARG002 - for those below
        """Keys of the training file that stay as they are when the number of workers changes."""
        return {}

    def check_device(self, device: str | None) -> None:
        """Refuse what ranks of a group cannot do on a device, as a node names it; None: this machine's best.

        Raises:
            ConfigError: one line with the key, its value and what to change.
        """

    def check(self, settings: "Settings") -> None:
        """Refuse what the algorithm cannot follow.

        Raises:
            ConfigError: one line with the key, its value and what to change.
        """

    def check_model(self, num_tensors: int) -> None:
        """Refuse what the algorithm cannot do with a model of so many trainable tensors.

        Raises:
            ConfigError: one line with the key, its value and what to change.
        """

    def check_pieces(self, layers: Sequence[tuple[str, slice]], most: int) -> None:
        """Refuse to exchange these tensors, each with its place in flat weights, in more pieces than so many.

        Raises:
            ConfigError: one line with the key, its value and what to change.
        """


C = TypeVar("C", bound=AlgorithmConfig)
F = TypeVar("F", bound=Section)
V = TypeVar("V")


class SlurmConfig(Section):
    """How Slurm is asked for machines, with `launch --on slurm`."""

    model_config = ConfigDict(json_schema_extra=with_old_keys("slurm.launcher"))

    nodes: PositiveInt = Field(1, description="Machines; the ranks are shared equally among them.")
    options: dict[
        SlurmOption,
        Annotated[
            SlurmValue | int | None,
            one_sentence("text without blanks and quotes, a whole number, or null"),
        ],
    ] = Field(
        {},
        description="Further options of sbatch, such as {partition: gpu, time: 24:00:00, gres: gpu:8}; null: "
        "one without a value.",
    )


class KubernetesConfig(Section):
    """What Kubernetes is told, with `launch --on kubernetes`."""

    model_config = ConfigDict(json_schema_extra=with_old_keys("kubernetes.retries"))

    kind: Literal["job", "jobset", "trainjob"] = Field(
        "job",
        description="job: an Indexed Job and a headless Service; jobset: JobSet; trainjob: Kubeflow Trainer, "
        "version 2.2 or newer.",
    )
    nodes: PositiveInt = Field(1, description="Pods; the ranks are shared equally among them.")
    image: ImageName | None = Field(None, description="The image that has smolcluster installed.")
    namespace: KubernetesName = Field("default", description="Where the objects are made.")
    queue: KubernetesName | None = Field(
        None, description="Kueue's local queue in which the run waits; null: none."
    )
    claim: KubernetesName | None = Field(
        None,
        description="The PersistentVolumeClaim that is mounted as /runs; null: the run's files end with it.",
    )
    secrets: dict[EnvName, SecretKey] = Field(
        {},
        description="Environment variables from Secrets, as in {WANDB_API_KEY: name-of-the-secret/its-key}.",
    )
    env: dict[EnvName, str] = Field(
        {}, description="Environment variables of the pods; what is secret belongs into `secrets`."
    )
    gpus: NonNegativeInt = Field(0, description="GPUs of NVIDIA a pod.")
    runtime: KubernetesName = Field(
        "torch-distributed", description="Of a trainjob: its ClusterTrainingRuntime."
    )


class ClusterConfig(Section):
    """The machines and how they work together (`cluster_config_*.yaml`)."""

    model_config = ConfigDict(json_schema_extra=with_old_keys(*TOP_LEVEL))

    host_ip: dict[NodeName, Address] = Field(
        description="Address at which each node reaches the server."
    )
    port: int = Field(65432, ge=1, le=65535, description="The server's TCP port.")
    num_workers: PositiveInt = Field(description="Number of workers; equals len(workers).")
    workers: NodeNames = Field(description="Names of the worker nodes.")
    server: NodeName = Field(description="Name of the server's node.")
    servers: Servers = Field(
        None,
        description="Nodes among which the weights and their optimizer are spread (EDP, DiLoCo), or that add "
        "up the gradients (SyncPS), the server first; each worker sends them in pieces what it has "
        "computed. A list: as much each; a mapping: how much each takes, as in {mini1: 2, pi5: 1}; auto: "
        "`launch` measures the links and chooses by them; null: the server alone.",
    )
    algorithm: AlgorithmName | None = Field(
        None, description="What `smolcluster serve` serves; null: edp."
    )
    worker_update_interval: PositiveInt = Field(
        10,
        description="EDP: steps between two pulls of the server's weights by a worker. SyncPS: between two "
        "comparisons of its weights with the server's.",
    )
    codec: CodecName | None = Field(
        None, description="How gradients travel, such as int8: in 8 bits; null: as they are."
    )
    seed: int = Field(42, ge=0, lt=2**63, description="Seed of weights, split and sample order.")
    elastic: bool = Field(
        True, description="Accept worker ids above num_workers, and nodes that are not in host_ip."
    )
    min_workers: PositiveInt = Field(1, description="Training starts when so many have joined.")
    start_timeout_s: Wait = Field(
        120.0,
        description="Longest wait for a server (worker) or for min_workers (server), seconds.",
    )
    prepare_timeout_s: Wait = Field(
        1800.0,
        description="Longest time that a worker takes to load its data and build the model, seconds.",
    )
    empty_cluster_timeout_s: Wait = Field(
        120.0, description="Longest time without any worker in mid-run, seconds."
    )
    reconnect_timeout_s: Wait = Field(
        60.0, description="How long a worker tries to get back to a lost server, seconds."
    )
    restarts: NonNegativeInt = Field(
        3,
        description="How often in a row a launched worker that was killed, whose device failed or that met "
        "an internal error is started again; ten minutes of life begin the count anew. On Kubernetes: how "
        "often all pods are when one has failed.",
    )
    heartbeat_timeout_s: HeartbeatTimeout = Field(
        10.0,
        description="A peer silent for so long is lost, seconds; heartbeats go each second, or 4 times "
        "as often as this where that is sooner.",
    )
    checkpoint_steps: PositiveInt | None = Field(
        200,
        description="Server steps between two checkpoints; null: only one at the end, or when the server "
        "is stopped.",
    )
    metrics_port: MetricsPort = Field(
        9464,
        description="Port of the server's /metrics for Prometheus; worker n adds n; null: there is none.",
    )
    metrics_bind: Address | None = Field(
        None,
        description="Address on which /metrics is served; null: 127.0.0.1, for each machine alone; 0.0.0.0: "
        "every address, where anybody on the network reads it.",
    )
    observe: bool = Field(
        False,
        description="Whether a launch starts Grafana, Loki and Prometheus in Docker, as --observe does.",
    )
    loki_url: LokiUrl = Field(
        None,
        description="Where Loki takes the logs, such as http://192.168.1.10:3100; null: where the launcher "
        "runs it, if it does.",
    )
    keep_last: PositiveInt = Field(
        3, description="Checkpoints that are kept, besides the one of the lowest validation loss."
    )
    slurm: SlurmConfig = Field(
        SlurmConfig(), description="How Slurm is asked for machines, with `launch --on slurm`."
    )
    kubernetes: KubernetesConfig = Field(
        KubernetesConfig(), description="What Kubernetes is told, with `launch --on kubernetes`."
    )
    encryption: Encryption = Field(
        "auto",
        description="What travels between machines is encrypted (TLS 1.3). auto: but for loopback; on: that "
        "as well; off: only where the server asks for it, on cables that nobody else reaches.",
    )
    bind: Addresses | None = Field(
        None,
        description="Addresses to listen on; null: the host_ip values that are this machine's.",
    )
    nodes: dict[NodeName, NodeConfig] = Field(
        {}, description="Settings of single machines, by name."
    )
    local_names: dict[NodeName, NodeName] = Field(
        {},
        description="Set by --local: the worker that a name of the cluster file stands for, such as "
        "{pi5: worker1}.",
    )

    def node_of(self, name: str) -> str:
        """The node that a name stands for: with `--local` a worker's name in the cluster file is another."""
        return self.local_names.get(name, name)

    def by_any_name(self, values: Mapping[str, V]) -> dict[str, V]:
        """Values of nodes, also by the names that stand for these, see `node_of`."""
        others = {name: values[node] for name, node in self.local_names.items() if node in values}
        return {**values, **others}

    def stages_with(self, name: NodeName) -> StagesConfig | None:
        """Those of the worker that this node is a stage of; None: of none."""
        found = (each for each in self.pipelines.values() if self.node_of(name) in each.host_ip)
        return next(found, None)

    @property
    def pipelines(self) -> dict[str, StagesConfig]:
        """The stages of each worker that has some."""
        stages = ((name, node.stages) for name, node in self.nodes.items())
        return {name: each for name, each in stages if each is not None}

    @property
    def stage_nodes(self) -> tuple[str, ...]:
        """The nodes that are stages of workers, in the order of these."""
        stages = (self.pipelines[name] for name in self.workers if name in self.pipelines)
        return tuple(name for each in stages for name in each.host_ip)

    @property
    def store_nodes(self) -> tuple[str, ...]:
        """The nodes that hold slices of the weights, the server first."""
        return (self.server,) if self.servers in (None, "auto") else tuple(self.servers)

    @property
    def store_shares(self) -> tuple[float, ...] | None:
        """How much each of `store_nodes` takes; None: as much each."""
        return tuple(self.servers.values()) if isinstance(self.servers, dict) else None

    @property
    def machines(self) -> tuple[str, ...]:
        """All nodes that take part, each once, the server first."""
        return tuple(dict.fromkeys((*self.store_nodes, *self.workers, *self.stage_nodes)))

    def check_average(self, ema_decay: float | None) -> None:
        """Where weights lie on several hosts there is no average of them.

        Raises:
            ConfigError: one is asked for.
        """
        if len(self.store_nodes) > 1 and ema_decay is not None:
            raise ConfigError(
                f"ema_decay is {ema_decay} and servers lists several, but the weights are averaged where all "
                "of them lie; set ema_decay or servers to null"
            )

    def check_known(self, place: Place, name: str, verb: str = "lists") -> None:
        """Refuse a name that is no node's; the key at `place` lists it, or has it as a key.

        Raises:
            SettingError: there is no such node.
        """
        if name not in self.host_ip:
            allowed = f"a node of host_ip (known: {', '.join(self.host_ip) or 'none'})"
            meant = nearest(name, self.host_ip)
            also = ((*place, name),)
            raise SettingError(place, name, verb=verb, allowed=allowed, nearest=meant, also=also)


class GradientClipping(Section):
    """Clipping of the gradient: by its global L2 norm, or each of its values."""

    enabled: bool = True
    max_norm: PositiveFloat | None = Field(
        1.0, description="Largest L2 norm of the whole; null: none. With max_value it is null."
    )
    max_value: PositiveFloat | None = Field(
        None, description="Largest absolute value of each element; null: none."
    )

    @model_validator(mode="before")
    @classmethod
    def _one_of_them(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("max_value") is not None:
            return {"max_norm": None} | values
        return values

    @model_validator(mode="after")
    def _only_one_of_them(self) -> Self:
        if self.max_norm is not None and self.max_value is not None:
            problem = f"but max_norm is {self.max_norm:g}; set one of them to null"
            raise SettingError(("max_value",), self.max_value, problem, also=(("max_norm",),))
        if self.enabled and self.max_norm is None and self.max_value is None:
            problem = "must have max_norm or max_value, or be set to false"
            raise SettingError(("enabled",), True, problem, also=(("max_norm",), ("max_value",)))
        return self

    @property
    def bound(self) -> float | None:
        """The largest absolute value that an element may have; None: any."""
        return self.max_value if self.enabled else None


class SimpleNNConfig(Section):
    """Sizes of the two-layer perceptron, and its activation."""

    type: Literal["SimpleNN"] = "SimpleNN"
    input_dim: PositiveInt | None = Field(
        784, description="Features a sample; null: from the data."
    )
    hidden: PositiveInt = Field(128, description="Width of the hidden layer.")
    out: PositiveInt = Field(10, description="Number of classes.")
    activation: Activation = Field("relu", description="What follows on the hidden layer.")


class GPTConfig(Section):
    """Sizes of the GPT-2 style decoder; its vocabulary is the tokenizer's."""

    type: Literal["GPT"] = "GPT"
    model_dim: PositiveInt = Field(256, description="Width of the residual stream.")
    num_layers: PositiveInt = Field(6, description="Number of transformer blocks.")
    num_heads: PositiveInt = Field(4, description="Attention heads; a divisor of model_dim.")
    ff_dim: PositiveInt = Field(1024, description="Width of the feed-forward layers.")
    dropout: float = Field(0.1, ge=0, lt=1, description="Share of activations left out.")
    max_seq_len: PositiveInt = Field(128, description="Tokens a sample.")
    pretrained: LocalPath | None = Field(
        None,
        description="Folder of GPT-2 weights in the Hugging Face format to begin with; null: random ones.",
    )

    @model_validator(mode="after")
    def _heads_divide_the_width(self) -> Self:
        if self.model_dim % self.num_heads:
            problem = f"must divide model.model_dim, {self.model_dim}"
            raise SettingError(("num_heads",), self.num_heads, problem, also=(("model_dim",),))
        return self


def _type_of_model(model: Any) -> str:
    if isinstance(model, dict):
        return str(model.get("type", "SimpleNN"))
    return str(getattr(model, "type", "SimpleNN"))


ModelConfig = Annotated[
    Annotated[SimpleNNConfig, Tag("SimpleNN")] | Annotated[GPTConfig, Tag("GPT")],
    Discriminator(_type_of_model),
]


class LrSchedule(Section):
    """Linear warm-up, then cosine decay, as functions of the samples applied."""

    warmup_iters: int = Field(
        0,
        ge=0,
        description="Length of the warm-up in steps of each optimizer. A step has global_batch_size samples; "
        "null: batch_size x gradient_accumulation, x num_workers where workers have optimizers of their own "
        "(DiLoCo, and EDP's mixing).",
    )
    min_lr: NonNegativeFloat = Field(0.0, description="Learning rate at the end of the run.")


class LoggingConfig(Section):
    """Where metrics are reported."""

    project_name: str = Field("smolcluster", description="Weights & Biases project.")


class TrainConfig(Section):
    """What is trained (`nn_config*.yaml`, `gpt_config*.yaml`)."""

    workload: FunctionNamed | None = Field(
        None,
        description="A function of one's own that returns a Workload, which brings model, loss and data: "
        "FILE.py:FUNCTION or package.module:function; null: `model` on `dataset`.",
    )
    workload_args: dict[str, JsonValue] = Field(
        {}, description="Keyword arguments of the workload's function."
    )
    batch_size: AutoInt = Field(
        32,
        description="Samples a worker's step; null: 32 for sequences of up to 128 tokens, else 16.",
    )
    gradient_accumulation: PositiveInt = Field(
        1,
        description="So many times batch_size samples make a worker's step, batch_size computed at once.",
    )
    global_batch_size: PositiveInt | None = Field(
        None,
        description="Where workers share a step, and in a single process: its samples; null: "
        "batch_size x gradient_accumulation, x num_workers where they share it.",
    )
    batch: Literal["cut", "whole"] = Field(
        "cut",
        description="whole: no batch is computed in parts, for losses that couple its samples; in SyncPS one "
        "worker computes a step. cut: they may be.",
    )
    learning_rate: PositiveFloat = Field(0.001, description="Peak learning rate.")
    num_epochs: AutoInt = Field(
        2,
        description="Passes over the training samples; null: 30 for wikitext, 20 for snli, 10 for others.",
    )
    num_steps: PositiveInt | None = Field(
        None,
        description="Steps after which the run ends, and by which the schedule falls, instead of num_epochs; "
        "null: num_epochs end it.",
    )
    patience: PositiveInt | None = Field(
        None,
        description="Evaluations in a row without a lower validation loss that end the run; null: none do.",
    )
    precision: Precision = Field(
        "fp32",
        description="bf16, fp16: forward and backward in that type where autocast holds it safe; fp16 scales "
        "the loss.",
    )
    eval_steps: PositiveInt = Field(200, description="Server steps between two evaluations.")
    track_gradients: bool = Field(True, description="Report gradient norms by layer.")
    memory_profiling: bool = Field(
        False,
        description="Report the most memory that forward, backward and other phases have had.",
    )
    gradient_clipping: GradientClipping = Field(
        GradientClipping(), description="Scales a gradient down whose L2 norm is too large."
    )
    optimizer: OptimizerName = Field(
        "adam",
        description="adamw decays weights apart from the gradient; muon is Muon for hidden matrices and "
        "adamw for all else; auto: muon, or adamw where machines or ranks hold parts of matrices; adam, "
        "adamw and sgd are fused, capitalized ones PyTorch's classes.",
    )
    optimizer_args: OptimizerArgs = Field(
        {},
        description="The optimizer's other arguments, such as momentum of sgd or betas of adam; of muon also "
        "muon and adamw, patterns of the names of parameters that are that one's.",
    )
    weight_decay: NonNegativeFloat = Field(
        0.0, description="Of matrices only; biases and norms do not decay."
    )
    ema_decay: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="d of the average a <- d a + (1 - d) w of the weights after each step (in DiLoCo of one "
        "batch a worker), which is evaluated and exported beside them; null: there is none.",
    )
    lr_schedule: LrSchedule | None = Field(None, description="null: a constant learning rate.")
    model: ModelConfig = Field(SimpleNNConfig(), description="What is trained.")
    dataset: DatasetConfig = Field(description="What it is trained on.")
    logging: LoggingConfig = Field(LoggingConfig(), description="The project in Weights & Biases.")
    tensorboard: bool = Field(
        False, description="Also write TensorBoard's event files: tensorboard/ of the run's folder."
    )

    @property
    def samples_per_push(self) -> int:
        """Samples that a worker's step is computed from, where its batch is not cut short."""
        return self.batch_size * self.gradient_accumulation

    @property
    def samples_per_step(self) -> int:
        """Samples that an optimizer step is computed from, where its batch is not cut short."""
        return self.global_batch_size or self.samples_per_push

    def num_batches(self, num_samples: int) -> int:
        """The steps of the whole run, with `num_samples` training samples an epoch."""
        return self.num_steps or self.num_epochs * math.ceil(num_samples / self.samples_per_step)

    def total_samples(self, num_samples: int) -> int:
        """The samples of the whole run, with `num_samples` training samples an epoch."""
        epochs, steps = divmod(
            self.num_batches(num_samples), math.ceil(num_samples / self.samples_per_step)
        )
        return epochs * num_samples + steps * self.samples_per_step

    def with_epochs_of(self, num_samples: int) -> Self:
        """The same with the epochs, of `num_samples` each, that `num_steps` begin."""
        num_epochs = math.ceil(self.total_samples(num_samples) / num_samples)
        return self.model_copy(update={"num_epochs": num_epochs})

    @property
    def workload_label(self) -> str | None:
        """What the workload is called where no code may be named."""
        return None if self.workload is None else FunctionName.parse(self.workload).label

    def for_any_folder(self) -> Self:
        """The same with absolute paths of a workload's and a tokenizer's files that are here."""
        update: dict[str, Any] = {"dataset": self.dataset.with_absolute_tokenizer()}
        if self.workload is not None:
            update["workload"] = FunctionName.parse(self.workload).absolute().text
        return self.model_copy(update=update)

    def without_weights(self) -> Self:
        """The same, beginning with random weights whatever `model.pretrained` says."""
        if not isinstance(self.model, GPTConfig):
            return self
        model = self.model.model_copy(update={"pretrained": None})
        return self.model_copy(update={"model": model})

    @model_validator(mode="before")
    @classmethod
    def _choose_what_is_null(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        model, dataset = (values.get(key) for key in ("model", "dataset"))
        chosen: dict[str, Any] = {}
        if values.get("workload") is not None and isinstance(dataset, dict | None):
            chosen["dataset"] = {"name": OWN_DATA} | (dataset or {})
        if values.get("batch_size", 0) is None:
            length = model.get("max_seq_len") if isinstance(model, dict) else None
            is_long = isinstance(length, int) and length > SHORT_SEQUENCE
            chosen["batch_size"] = LONG_BATCH if is_long else SHORT_BATCH
        if values.get("num_epochs", 0) is None:
            name = dataset.get("name") if isinstance(dataset, dict) else None
            chosen["num_epochs"] = NUM_EPOCHS.get(str(name), DEFAULT_NUM_EPOCHS)
        return values | chosen

    @model_validator(mode="after")
    def _learning_rate_falls(self) -> Self:
        if self.lr_schedule and self.lr_schedule.min_lr > self.learning_rate:
            raise SettingError(
                ("lr_schedule", "min_lr"),
                self.lr_schedule.min_lr,
                f"must be at most learning_rate, {self.learning_rate:g}",
                also=(("learning_rate",),),
            )
        return self


class RunConfig(Section):
    """What travels from the server to every worker: the same for all of them."""

    run_id: str
    algorithm: AlgorithmName
    seed: int
    worker_update_interval: PositiveInt
    codec: CodecName | None = None
    heartbeat_timeout_s: HeartbeatTimeout
    reconnect_timeout_s: Wait
    workload: Annotated[str, StringConstraints(pattern=r"^[\w.]{1,200}$")] | None = None
    """What the server calls the workload; None: what `train` names. No machine looks for code by it."""
    own: dict[str, Any] = {}
    """What the algorithm alone understands, as plain values."""
    train: TrainConfig

    def of(self, config: type[C]) -> C:
        """What the algorithm has been told.

        Raises:
            ConfigError: it is not what this version of the algorithm understands.
        """
        try:
            return config.model_validate_json(json.dumps(self.own))
        except ValidationError as error:
            raise refused(config, error, self.algorithm) from None

    @model_validator(mode="after")
    def _holds_nothing_of_one_machine(self) -> Self:
        if self.train.workload is not None:
            raise ValueError("where a machine keeps a workload's code cannot travel")
        if self.train.dataset != self.train.dataset.anywhere:
            raise ValueError("where a machine keeps its data and tokenizer cannot travel")
        if isinstance(self.train.model, GPTConfig) and self.train.model.pretrained is not None:
            raise ValueError("model.pretrained belongs to the server's machine and cannot travel")
        return self


def config_of(spec: AlgorithmSpec) -> type[AlgorithmConfig]:
    """The class of what the algorithm alone understands."""
    found: type[AlgorithmConfig] = pkgutil.resolve_name(spec.config)
    return found


@dataclass(frozen=True)
class Settings:
    """Everything that a process on one machine has been told."""

    cluster: ClusterConfig
    train: TrainConfig
    node: NodeConfig
    name: str | None = field(default=None, compare=False)
    """The machine's; None: the server's."""

    @property
    def global_batch_size(self) -> int:
        """Samples in a step that all workers take together, however many of them are present."""
        return (
            self.train.global_batch_size or self.train.samples_per_push * self.cluster.num_workers
        )

    def num_threads(self, environ: Mapping[str, str] = os.environ) -> int | None:
        """Compute threads of one of the run's processes; None: PyTorch's choice.

        Where the user has set no number, the server and the workers that reach it on this very machine share
        its cores: with more threads than cores in all they hinder each other.
        """
        if self.node.threads is not None or "OMP_NUM_THREADS" in environ:
            return self.node.threads
        server, host_ip = self.cluster.server, self.cluster.host_ip
        others = (node for node in self.cluster.machines if node != server)
        here = [server, *(node for node in others if is_loopback_name(host_ip.get(node, "")))]
        is_alone = len(here) == 1 or (self.name or server) not in here
        return None if is_alone else max(1, (os.cpu_count() or 1) // len(here))

    def with_batch_size(self, batch_size: int | None) -> "Settings":
        """The same with so many samples a batch; None: as the configuration says."""
        if batch_size is None:
            return self
        return replace(self, train=self.train.model_copy(update={"batch_size": batch_size}))

    def run_config(self, run_id: str, algorithm: AlgorithmName) -> RunConfig:
        """What travels to the workers: nothing of any one machine."""
        cluster = self.cluster
        train: dict[str, object] = {"dataset": self.train.dataset.anywhere, "workload": None}
        own = self.of(config_of(spec_of(algorithm)))
        train |= own.pinned(self)
        trained = self.train.without_weights()
        shared = {name: getattr(trained, name) for name in TrainConfig.model_fields}
        return RunConfig(
            run_id=run_id,
            algorithm=algorithm,
            seed=cluster.seed,
            worker_update_interval=cluster.worker_update_interval,
            codec=cluster.codec,
            heartbeat_timeout_s=cluster.heartbeat_timeout_s,
            reconnect_timeout_s=cluster.reconnect_timeout_s,
            workload=self.train.workload_label,
            own=own.model_dump(mode="json"),
            train=TrainConfig.model_validate(shared | train),
        )

    def of(self, config: type[C]) -> C:
        """What an algorithm alone understands."""
        told = {**dict(self.cluster), **dict(self.train)}
        return config.model_validate(
            {name: told[name] for name in config.model_fields if name in told}
        )

    def to_yaml(self, *, env_names: bool = False) -> str:
        """The resolved configuration with all defaults, one mapping a section, to keep with a run.

        The machines' `env` is left out, for others may read the file; with `env_names` its names are there,
        each with `***` as its value.
        """
        sections = {
            SECTIONS["cluster"]: self.cluster,
            SECTIONS["training"]: self.train,
            NODE_SECTION: self.node,
        }
        dumped = {name: part.model_dump(mode="json") for name, part in sections.items()}
        for node in (dumped[NODE_SECTION], *dumped[SECTIONS["cluster"]]["nodes"].values()):
            if env_names:
                node[ENV] = dict.fromkeys(node[ENV], HIDDEN)
            else:
                del node[ENV]
        return dump_yaml(dumped)


@cache
def cluster_section() -> type[ClusterConfig]:
    """The cluster file with the keys of all algorithms that are installed."""
    return _with_algorithms(ClusterConfig, of_training=False)


@cache
def train_section() -> type[TrainConfig]:
    """The training file with the keys of all algorithms that are installed."""
    return _with_algorithms(TrainConfig, of_training=True)


def own_keys(name: str) -> frozenset[str]:
    """The keys that the algorithm of that name alone understands; none where there is no such algorithm."""
    return frozenset(config_of(spec_of(name)).model_fields)


def own_old_keys(name: str) -> frozenset[str]:
    """The keys of earlier versions that the algorithm of that name alone understands."""
    own = own_keys(name)
    renamed = {key for key, old in OLD_KEYS.items() if old.now in own}
    return config_of(spec_of(name)).old_keys | renamed


def _with_algorithms(shared: type[F], *, of_training: bool) -> type[F]:
    owners = dict.fromkeys((*ClusterConfig.model_fields, *TrainConfig.model_fields), "everybody's")
    declared: dict[str, type] = {}
    fields: dict[str, Any] = {}
    for spec in algorithms().values():
        config = config_of(spec)
        for name, key in config.model_fields.items():
            origin = next(each for each in config.__mro__ if name in each.__annotations__)
            if declared.get(name) is origin and origin is not config:  # they have it from one class
                continue
            declared[name] = origin
            if name in owners:
                raise ConfigError(
                    f"the algorithm {spec.name} has the key {name}, which is {owners[name]} already"
                )
            owners[name] = f"the algorithm {spec.name}'s"
            if (name in config.training_keys) is of_training:
                fields[name] = (key.annotation, key)
    return create_model(shared.__name__, __base__=shared, __doc__=shared.__doc__, **fields)
