"""What each layer of the model costs on this machine, as a process of its own.

`python -m smolcluster.launch.advise.layer_speed FOLDER` finds in the folder what `speed` finds there, and
prints one JSON object, a `LayerSpeeds`. Nothing is written.
"""

import sys
from math import ceil
from pathlib import Path

from smolcluster.configs.schema import Settings
from smolcluster.errors import SmolclusterError
from smolcluster.launch.advise.speed import asked_in, settings_in
from smolcluster.runs.model_file import ModelFile
from smolcluster.training.builtin import load_workload
from smolcluster.training.stages.measure import LayerSpeeds, measure_workload
from smolcluster.utils.device import pick_device, use_threads

LAYER_SPEEDS = ModelFile[LayerSpeeds](LayerSpeeds, "is damaged")


def measure(settings: Settings, num_microbatches: int) -> LayerSpeeds:
    """Measure all layers on a microbatch of the training data.

    Raises:
        SmolclusterError: the model cannot be cut, or not be computed here.
    """
    train, node, seed = settings.train, settings.node, settings.cluster.seed
    use_threads(node.threads)
    workload = load_workload(train, seed, node.dataset)
    size = (workload.batch_size or train.batch_size) * train.gradient_accumulation
    device = pick_device(node.device)
    return measure_workload(workload, seed, ceil(size / num_microbatches), device)


def main(folder: Path) -> None:
    """Measure what the folder asks for, and print it.

    Raises:
        SmolclusterError: it cannot be measured.
    """
    asked = asked_in(folder)
    speeds = measure(settings_in(folder, asked), asked.num_microbatches)
    sys.stdout.write(f"{speeds.model_dump_json()}\n")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except SmolclusterError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
