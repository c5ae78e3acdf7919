"""Whatever is trained, however many workers compute it: the steps are those of one process."""

from pathlib import Path

import pytest

from own_workloads import KINDS, assert_takes_the_same_steps, run, settings_for, steps_alone
from smolcluster.configs.schema import AlgorithmName
from smolcluster.training.optimizer import STEP_COUNT
from tiers import at_night

ONE_WORKER: list[tuple[AlgorithmName, int]] = [("edp", 1), ("syncps", 1)]
EACH: list[tuple[AlgorithmName, int]] = [*ONE_WORKER, ("diloco", 1)]
SEVERAL: list[tuple[AlgorithmName, int]] = [("edp", 1), ("syncps", 2)]


@pytest.mark.parametrize(
    ("kind", "algorithm", "num_workers"),
    [
        *(("ragged", *way) for way in (*ONE_WORKER, ("syncps", 2), ("syncps", 3))),
        *(("momentum", *way) for way in SEVERAL),
        *((kind, *way) for kind in ("buffers", "two heads") for way in ONE_WORKER),
        ("LoRA", "syncps", 1),
        *((kind, *way) for kind in ("so many steps", "float16") for way in EACH),
        *at_night(*((kind, *way) for kind in ("RMSprop", "NAdam") for way in SEVERAL)),
        *at_night(
            *(
                (kind, *way)
                for kind in ("compiled", "Hugging Face", "torchvision")
                for way in ONE_WORKER
            )
        ),
    ],
)
def test_a_cluster_trains_as_one_process(
    tmp_path: Path, kind: str, algorithm: AlgorithmName, num_workers: int
) -> None:
    """Its steps, weights, buffers and optimizer; with one worker bit for bit."""
    settings = settings_for(algorithm, num_workers, *KINDS[kind].overrides)
    workload = KINDS[kind].make(settings)
    cluster = run(settings, tmp_path, algorithm, workload)
    steps, training = steps_alone(settings, workload, algorithm)
    assert_takes_the_same_steps(cluster, steps, training)
    theirs, own = cluster.training.replica, training.replica
    assert theirs.optimizer.state.keys() == own.optimizer.state.keys()
    if algorithm != "diloco":  # whose workers have it
        assert theirs.optimizer.state.get(STEP_COUNT) == own.optimizer.state.get(STEP_COUNT)
    if settings.train.num_steps is not None:
        assert len(steps) == settings.train.num_steps
        assert f"{len(steps)} steps have been taken" in cluster.log_lines[-1]
    if own.scaler is not None:
        assert theirs.scaler is not None
        skipped = own.scaler.num_overflows
        assert theirs.scaler.num_overflows == skipped >= 3
        assert cluster.metrics.steps[-1].values["overflows"] == skipped
        assert cluster.core.report.status("ended").overflows == skipped
        said = sum("is skipped: a gradient overflowed" in line for line in cluster.log_lines)
        assert said >= 3
