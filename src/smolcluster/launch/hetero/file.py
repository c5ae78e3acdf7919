"""`hetero_config.json`: the machines of a pipeline with their addresses and layers, copied to each of them.

{"coordinator": {"ip": "192.168.1.10", "port": 9999},
 "workers": [{"id": 1, "ip": "192.168.1.20", "device": "cuda"}],
 "shard_plan": [{"id": "local", "start": 0, "end": 12},
                {"id": 1, "start": 12, "end": 32, "is_last": true}],
 "output_dir": "./lora_unsloth_sft_distributed"}
"""

import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    model_validator,
)

from smolcluster.configs.keys import setting_errors
from smolcluster.configs.problems import SettingError
from smolcluster.configs.schema import HIDDEN
from smolcluster.errors import ConfigError
from smolcluster.utils.words import as_command, one_line

DEFAULT_FILE = "hetero_config.json"
DEFAULT_PORT = 9999
COORDINATOR, LOCAL = "coordinator", "local"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Machine(_Section):
    """Where a machine is; `port`: where a coordinator listens.

    Attributes:
        device: auto, cuda, cuda:1, mps or cpu.
        device_index: which of its GPUs; the same as `cuda:` and the number.
    """

    ip: str = Field(min_length=1)
    hostname: str | None = None
    port: int = Field(DEFAULT_PORT, ge=1, le=65535)
    device: str = "auto"
    device_index: NonNegativeInt | None = None

    @model_validator(mode="after")
    def _check_index(self) -> Self:
        index = self.device_index
        if index is not None and self.device not in ("auto", "cuda", f"cuda:{index}"):
            problem = (
                f"which says a GPU of CUDA, but device is {self.device}: leave out one of them"
            )
            raise SettingError(("device_index",), index, problem)
        return self

    @property
    def own_device(self) -> str:
        """What `device` and `device_index` say together."""
        return self.device if self.device_index is None else f"cuda:{self.device_index}"


class Worker(Machine):
    """A process of its own for each entry: a machine with two GPUs is listed twice."""

    id: PositiveInt
    num_gpus: PositiveInt = 1


def _stage_id(value: object) -> object:
    if value == LOCAL or (type(value) is int and value > 0):
        return value
    raise ValueError("must be local, or the id of a worker")


class Stage(_Section):
    """Layers `[start, end)` of a worker, or of the coordinator's own machine (`local`)."""

    id: Annotated[str | int, BeforeValidator(_stage_id)]
    start: NonNegativeInt
    end: PositiveInt
    is_last: bool = False


class Training(BaseModel):
    """What is drawn at the start; all other keys are those of a training file."""

    model_config = ConfigDict(extra="allow", frozen=True)

    visualize: bool = True
    visualization_format: Literal["png", "svg", "pdf", "mmd"] = "png"
    log_level: str = "INFO"

    @property
    def overrides(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class HeteroConfig(_Section):
    """The whole file.

    Attributes:
        output_dir: where runs and the diagram are kept, on each machine; None: as the program says.
        secret: what the machines prove to each other that they belong together; None: the one that each
            machine keeps.
        pipeline: keys of PipelineParallel's cluster file, such as `schedule` and `microbatches`.
        workload_args: of the program's function that makes what is trained.
    """

    version: str = "0.1.0"
    coordinator: Machine
    workers: tuple[Worker, ...] = Field(min_length=1)
    shard_plan: tuple[Stage, ...] = Field(min_length=1)
    training: Training = Training()
    output_dir: Path | None = None
    secret: str | None = Field(None, min_length=32, repr=False)
    pipeline: dict[str, Any] = {}
    workload_args: dict[str, Any] = {}

    @property
    def nodes(self) -> list[str]:
        """The names of the processes that have layers, in the layers' order."""
        return list(dict.fromkeys(node_of(stage.id) for stage in self.shard_plan))

    def machine_of(self, node: str) -> Machine:
        if node in (COORDINATOR, LOCAL):
            return self.coordinator
        return next(each for each in self.workers if node_of(each.id) == node)

    def cluster(self, output_dir: Path, secret_file: Path | None) -> dict[str, Any]:
        """The same as PipelineParallel's cluster file says it."""
        own: dict[str, Any] = {"runs_dir": str(output_dir)}
        if secret_file is not None:
            own["secret_file"] = str(secret_file)
        devices = self._devices()
        ranges: dict[str, list[list[int]]] = {}
        for stage in self.shard_plan:
            ranges.setdefault(node_of(stage.id), []).append([stage.start, stage.end])
        return {
            **self.pipeline,
            "host_ip": dict.fromkeys((COORDINATOR, *self.nodes), self.coordinator.ip),
            "port": self.coordinator.port,
            "num_workers": len(self.nodes),
            "workers": self.nodes,
            "server": COORDINATOR,
            "shard_plan": ranges,
            "nodes": {
                COORDINATOR: own,
                **{node: {**own, "device": devices[node]} for node in self.nodes},
            },
        }

    def described(self, node: str) -> str:
        """What a process of this machine does, in words."""
        if node == COORDINATOR:
            return f"coordinates the run, at {self.coordinator.ip}, port {self.coordinator.port}"
        own = [each for each in self.shard_plan if node_of(each.id) == node]
        layers = ", ".join(f"[{each.start}, {each.end})" for each in own)
        machine = self.machine_of(node)
        index = "" if machine.device_index is None else f" (device_index {machine.device_index})"
        return f"layers {layers} on device {self._devices()[node] or 'auto'}{index}"

    def _devices(self) -> dict[str, str | None]:
        """Of each process; several on one machine that say `cuda` get a GPU each."""
        found: dict[str, str | None] = {}
        taken: Counter[str] = Counter()
        gpus = Counter(
            each.ip for each in map(self.machine_of, self.nodes) if each.own_device == "cuda"
        )
        for node in self.nodes:
            machine = self.machine_of(node)
            found[node] = None if machine.own_device == "auto" else machine.own_device
            if machine.own_device == "cuda" and gpus[machine.ip] > 1:
                found[node] = f"cuda:{taken[machine.ip]}"
                taken[machine.ip] += 1
        return found


def node_of(stage: str | int) -> str:
    return LOCAL if stage == LOCAL else f"worker{stage}"


def is_hetero(path: Path) -> bool:
    """Whether a JSON file is one of these, right or wrong, and no plan."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and not content.keys().isdisjoint({COORDINATOR, "shard_plan"})


def read_hetero(path: Path) -> HeteroConfig:
    """Read and check a file.

    Raises:
        ConfigError: one line with what is wrong first.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_each_key_once)
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: there is no such file; {as_command('init', '--hetero')} writes one"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {one_line(str(error))}") from None
    try:
        config = HeteroConfig.model_validate(content)
    except ValidationError as error:
        first, *_ = setting_errors(HeteroConfig, error, str(path))
        if first.place == ("secret",):
            first.value = HIDDEN
        raise first from None
    check_plan(config, str(path))
    return config


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for key, times in Counter(key for key, _ in pairs).items():
        if times > 1:
            raise ValueError(f'duplicate key "{key}"; keep one of them')
    return dict(pairs)


def check_plan(config: HeteroConfig, told: str) -> None:
    """Raise ConfigError unless the plan has each layer once, and its last stage is the one that says so."""
    stages = config.shard_plan
    known = {LOCAL, *(each.id for each in config.workers)}
    twice = [id_ for id_, times in Counter(each.id for each in config.workers).items() if times > 1]
    if twice:
        raise ConfigError(f"{told}: workers: the id {twice[0]} is there twice")
    reached = 0
    for stage in stages:
        if stage.id not in known:
            raise ConfigError(f"{told}: shard_plan: there is no worker with the id {stage.id}")
        if stage.start != reached or stage.end <= stage.start:
            raise ConfigError(
                f"{told}: shard_plan: the stage of {stage.id} has layers [{stage.start}, {stage.end}), must "
                f"begin with layer {reached} and have one at least"
            )
        reached = stage.end
    if [each.is_last for each in stages] != [False] * (len(stages) - 1) + [True]:
        raise ConfigError(
            f"{told}: shard_plan: is_last must be true of the last stage, and of no other"
        )
    idle = [each.id for each in config.workers if node_of(each.id) not in config.nodes]
    if idle:
        raise ConfigError(f"{told}: shard_plan gives no layers to the worker with the id {idle[0]}")
