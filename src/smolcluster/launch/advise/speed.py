"""How fast this machine trains: real steps for a few seconds, or each layer, as a process of its own.

`python -m smolcluster.launch.advise.speed FOLDER` finds in the folder what it is asked (`Asked`) and the
configuration, and prints one JSON object, a `Speed` or `LayerSpeeds`. Nothing is written, and what was
trained is forgotten.
"""

import os
import sys
import time
from contextlib import closing
from math import ceil
from pathlib import Path
from statistics import median

from pydantic import BaseModel, ConfigDict

from smolcluster.configs.function_name import FunctionName
from smolcluster.configs.overrides import workload_overrides
from smolcluster.configs.resolve import load_settings
from smolcluster.configs.schema import Settings
from smolcluster.errors import DataError, SmolclusterError
from smolcluster.runs.model_file import ModelFile

ASKED_FILE, CLUSTER_FILE, TRAIN_FILE, CODE_FOLDER = (
    *("asked.json", "cluster.yaml", "train.yaml"),
    "workload",
)
NUM_ROUNDS, ROUND_S = 3, 1.0
"""Rounds that are compared to see whether the machine has other things to do; each has a step at least."""
WARM_UP_STEPS = 2
MEETING_S = 120.0
"""Longest wait for the others that are to be measured at the same time."""


class Asked(BaseModel):
    """What is to be measured.

    Attributes:
        node: whose settings are taken; None: the server's.
        environ: settings and keys of the environment.
        workload: the function, as it is seen from the folder of the code; None: what the training file names.
        has_code: whether the code lies in the folder; else it is installed.
        num_microbatches: of a pipeline's step, of whose layers each is measured; None: whole steps are.
        is_local: whether all of the cluster is on one machine, with `num_workers` workers.
        meeting: a folder in which as many processes as `crowd` meet before they measure; None: nobody waits.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_microbatches: int | None = None
    node: str | None = None
    overrides: tuple[str, ...] = ()
    environ: dict[str, str] = {}
    workload: str | None = None
    has_code: bool = False
    is_local: bool = False
    num_workers: int | None = None
    meeting: str | None = None
    crowd: int = 1


class Speed(BaseModel):
    """How fast a machine trains.

    Attributes:
        compute_s: seconds of forward and backward of so many samples, the median of each round.
        update_s: seconds of clipping and an optimizer step.
        batch_size: samples of a worker's step.
        num_params: weights that are trained.
        num_samples: of an epoch.
        tokens_per_sample: 0 where samples are no text.
        device: in words.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    compute_s: tuple[float, ...]
    update_s: float
    batch_size: int
    num_params: int
    num_samples: int
    tokens_per_sample: int = 0
    device: str = ""


ASKED = ModelFile[Asked](Asked, "is damaged")
SPEED = ModelFile[Speed](Speed, "is damaged")


def settings_in(folder: Path, asked: Asked) -> Settings:
    """The settings of a process of the run on this machine.

    Raises:
        ConfigError: one line with what is wrong.
    """
    stated = []
    if asked.workload is not None:
        name = FunctionName.parse(asked.workload)
        seen = name.below(str(folder / CODE_FOLDER)) if asked.has_code else name
        stated = workload_overrides(seen.text)
    return load_settings(
        folder / CLUSTER_FILE,
        folder / TRAIN_FILE,
        asked.node,
        [*asked.overrides, *stated],
        local=asked.is_local,
        local_workers=asked.num_workers,
    )


def measure_layers(settings: Settings, num_microbatches: int) -> BaseModel:
    """What each layer takes for a microbatch of the training data: `LayerSpeeds`.

    Raises:
        SmolclusterError: the model cannot be cut, or not be computed here.
    """
    from smolcluster.training.builtin import load_workload  # noqa: PLC0415 - the process says first what is wrong
    from smolcluster.training.stages.measure import measure_workload  # noqa: PLC0415
    from smolcluster.utils.device import pick_device, use_threads  # noqa: PLC0415

    train, node, seed = settings.train, settings.node, settings.cluster.seed
    use_threads(node.threads)
    workload = load_workload(train, seed, node.dataset)
    size = (workload.batch_size or train.batch_size) * train.gradient_accumulation
    return measure_workload(workload, seed, ceil(size / num_microbatches), pick_device(node.device))


def measure(settings: Settings, meeting: Path | None = None, crowd: int = 1) -> Speed:
    """Train for some seconds as the settings say, and forget it.

    Raises:
        SmolclusterError: it cannot be trained here.
    """
    from smolcluster.training.build import build  # noqa: PLC0415 - the process says first what is wrong
    from smolcluster.utils.device import describe, pick_device, use_threads  # noqa: PLC0415

    train, node = settings.train, settings.node
    use_threads(node.threads)
    training = build(
        train,
        settings.cluster.seed,
        node.dataset,
        pick_device(node.device),
        microbatch=node.microbatch,
    )
    with closing(training):
        batch = training.workload.batch_size or train.batch_size
        batch_size = batch * train.gradient_accumulation
        indices = training.order(0)[:batch_size]
        scale = batch_size / len(indices)  # an epoch may have fewer
        computed, updated = list[float](), list[float]()

        def step() -> None:
            began = time.perf_counter()
            training.compute(indices)
            changed = time.perf_counter()
            training.replica.clip(train.gradient_clipping)
            training.replica.step(train.learning_rate)
            computed.append(changed - began)
            updated.append(time.perf_counter() - changed)

        for _ in range(WARM_UP_STEPS):
            step()
        if meeting is not None:
            meet(meeting, crowd)
        rounds = []
        for _ in range(NUM_ROUNDS):
            computed.clear()
            end = time.perf_counter() + ROUND_S
            while not computed or time.perf_counter() < end:
                step()
            rounds.append(scale * median(computed))
        return Speed(
            compute_s=tuple(rounds),
            update_s=median(updated),
            batch_size=batch_size,
            num_params=training.replica.params.numel(),
            num_samples=training.num_samples,
            tokens_per_sample=training.workload.tokens_per_sample or 0,
            device=describe(training.replica.device),
        )


def meet(folder: Path, crowd: int) -> None:
    """Wait in a folder until so many processes do.

    Raises:
        DataError: they do not come in time.
    """
    (folder / str(os.getpid())).touch()
    end = time.monotonic() + MEETING_S
    while len(list(folder.iterdir())) < crowd:
        if time.monotonic() > end:
            raise DataError(f"not all of {crowd} processes were ready within {MEETING_S:.0f} s")
        time.sleep(0.01)


def main(folder: Path) -> None:
    """Measure what the folder asks for, and print it.

    Raises:
        SmolclusterError: it cannot be measured.
    """
    asked = ASKED.read(folder / ASKED_FILE)
    os.environ.update(asked.environ)
    settings = settings_in(folder, asked)
    if asked.num_microbatches is None:
        meeting = Path(asked.meeting) if asked.meeting else None
        found: BaseModel = measure(settings, meeting, asked.crowd)
    else:
        found = measure_layers(settings, asked.num_microbatches)
    sys.stdout.write(f"{found.model_dump_json()}\n")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except SmolclusterError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
