"""A short loss curve of each algorithm, of one seed on the digits, is the one that earlier versions had."""

from pathlib import Path

import pytest

from harness import local_settings
from own_workloads import alone, run
from smolcluster.configs.schema import AlgorithmName

REL = 1e-3
"""Processors round otherwise, and twelve steps enlarge that."""
OVERRIDES = ("num_epochs=1", "batch_size=128", "global_batch_size=128", "learning_rate=0.003")
OWN: dict[AlgorithmName, tuple[str, ...]] = {
    "edp": ("worker_update_interval=1",),
    "diloco": ("mode=sync", "local_steps=4", "codec_up=fp32", "codec_down=fp32"),
}
ALONE = (
    *(2.31535, 2.26232, 2.23983, 2.18074, 2.15597, 2.12950),
    *(2.07824, 2.03018, 2.03449, 1.95436, 1.95627, 1.89388),
)
CURVES: dict[AlgorithmName, tuple[float, ...]] = {
    "edp": ALONE,
    "syncps": ALONE,
    "diloco": (*ALONE[:6], 2.07039, 2.02229, 2.02897, 1.94668, 1.92114, 1.85240),
    "pipeline": ALONE,
}


@pytest.mark.parametrize("algorithm", CURVES)
def test_one_worker_learns_as_it_did(tmp_path: Path, algorithm: AlgorithmName) -> None:
    own = OWN.get(algorithm, ())
    settings = local_settings(*OVERRIDES, *own, workers=1, algorithm=algorithm)
    cluster = run(settings, tmp_path, algorithm)
    assert cluster.losses == pytest.approx(CURVES[algorithm], rel=REL)


def test_one_process_learns_as_it_did() -> None:
    losses, _ = alone(local_settings(*OVERRIDES, workers=1, algorithm="syncps"))
    assert losses == pytest.approx(ALONE, rel=REL)
