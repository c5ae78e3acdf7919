"""The examples whose workloads are named, each with two workers of both algorithms."""

import copy
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import Cluster, local_settings
from smolcluster.configs.schema import AlgorithmName
from smolcluster.training.named import load_named
from smolcluster.training.workload import Workload
from tiers import at_night

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NODES = ("pi5", "win")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Workload]]:
    """The workload of a folder of `examples`; each of them calls its module `train`."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def load(folder: str, **args: Any) -> Workload:
        monkeypatch.delitem(sys.modules, "train", raising=False)
        return load_named(str(EXAMPLES / folder / "train.py:workload"), args, seed=42)

    yield load
    sys.modules.pop("train", None)


def with_one_model(workload: Workload) -> Workload:
    """The same with a model that is made now: its frozen weights are drawn by one thread alone."""
    made = copy.copy(workload)
    made.maker = workload.new_model()
    return made


def trained(
    folder: Path,
    algorithm: AlgorithmName,
    workload: Workload,
    *overrides: str,
    falls_to: float = 0.8,
) -> Cluster:
    """A run of two epochs with two workers, in which the loss falls to this part of what it was."""
    size = "batch_size=32" if algorithm == "edp" else "global_batch_size=64"
    settings = local_settings(
        *("num_epochs=2", "min_workers=2", "learning_rate=0.01", size, *overrides),
        workers=2,
        algorithm=algorithm,
    )
    cluster = Cluster(settings, folder, algorithm=algorithm, workload=with_one_model(workload))
    cluster.finish(*(cluster.worker(i + 1, node=node) for i, node in enumerate(NODES)))
    summary = cluster.server.summary
    assert summary is not None
    assert summary.samples_applied == 2 * workload.train.num_samples, "every sample of every epoch"
    seen = cluster.losses
    assert sum(seen[-5:]) < falls_to * sum(seen[:5])
    return cluster


@pytest.mark.parametrize("algorithm", ["syncps", *at_night("edp")])
def test_a_model_with_batch_norm_tied_and_frozen_weights_learns_digits(
    tmp_path: Path, algorithm: AlgorithmName, example: Callable[..., Workload]
) -> None:
    cluster = trained(tmp_path, algorithm, example("own_model", width=32))
    names = [name for name, _ in cluster.training.replica.layers]
    assert "first.weight" in names
    assert "second.weight" not in names, "it is the first layer's"
    assert "features.weight" not in names, "it is frozen"


@pytest.mark.nightly
@pytest.mark.parametrize("algorithm", ["edp", "syncps"])
def test_a_resnet_learns_digits(
    tmp_path: Path, algorithm: AlgorithmName, example: Callable[..., Workload]
) -> None:
    trained(tmp_path, algorithm, example("digits_resnet", channels=4, num_blocks=1))


@pytest.mark.nightly
def test_a_llama_is_fine_tuned_by_its_adapters(
    tmp_path: Path, example: Callable[..., Workload]
) -> None:
    pytest.importorskip("peft", reason="needs peft: uv pip install peft")
    workload = example("llama_lora", rank=2, length=256)
    cluster = trained(tmp_path, "syncps", workload, "learning_rate=0.05", falls_to=0.98)
    assert all("lora_" in name for name, _ in cluster.training.replica.layers)


def test_a_base_model_may_lie_in_the_folder_of_its_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name is no path to a tokenizer then, which could be one of the hub."""
    pytest.importorskip("peft", reason="needs peft: uv pip install peft")
    from pretrained_models import text_arguments

    monkeypatch.chdir(tmp_path)
    text_arguments(tmp_path)
    row = {"instruction": "Count.", "output": "1 2 3"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row), encoding="utf-8")
    program = EXAMPLES / "demo_llama8b4bit_distributed.py"
    told = {"base_model": "model", "data": "rows.jsonl", "max_length": 96}
    workload = load_named(f"{program}:workload", told, seed=42)
    assert workload.train.num_samples == 1
