"""A pipeline's run: server and stages as threads, equal to one process, whatever the cut and the schedule."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import own_workloads
from harness import Cluster, local_settings
from pretrained_models import adapters, saved
from smolcluster.algorithms.PipelineParallel import worker
from smolcluster.configs.resolve import Settings
from smolcluster.configs.schema import GPTConfig
from smolcluster.models.gpt import GPT
from smolcluster.training.build import stage_replica
from smolcluster.training.builtin import cross_entropy
from smolcluster.training.finetune import next_token_loss
from smolcluster.training.pretrained import Pretrained
from smolcluster.training.replica import Replica
from smolcluster.training.workload import Workload

SIZES = GPTConfig(
    type="GPT", model_dim=16, num_layers=8, num_heads=2, ff_dim=32, max_seq_len=8, dropout=0.0
)


@pytest.fixture(autouse=True)
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's generator is a process's, and so are initial weights drawn: by one thread after the other."""
    lock, build = threading.Lock(), stage_replica

    def locked(*args: Any) -> Replica:
        with lock:
            return build(*args)

    monkeypatch.setattr(worker, "stage_replica", locked)


def text() -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    return [(each[:-1], each[1:]) for each in torch.randint(0, 11, (52, 9), generator=generator)]


def gpt(dtype: torch.dtype = torch.float32) -> Workload:
    """Its embedding is its head as well."""
    return Workload(lambda: GPT(SIZES, 11).to(dtype), cross_entropy, text(), text()[:10])


def fine_tuned(folder: Path) -> Workload:
    model = Pretrained(saved(folder), lora=adapters("q_proj", "down_proj"))
    return Workload(model, next_token_loss, text(), text()[:10])


def settings_for(workers: int, *overrides: str) -> Settings:
    own = "num_epochs=2", "batch_size=8", "microbatches=4", "eval_steps=4", f"min_workers={workers}"
    return local_settings(*own, *overrides, workers=workers, algorithm="pipeline")


def run(settings: Settings, folder: Path, workload: Workload) -> Cluster:
    return own_workloads.run(settings, folder, "pipeline", workload)


@pytest.mark.parametrize(
    ("workers", "schedule", "dtype"),
    [
        (1, "1f1b", torch.float32),
        (2, "gpipe", torch.float32),
        (3, "1f1b", torch.float64),
        (4, "zero-bubble", torch.float32),
        (2, "zb-v", torch.float64),
        (3, "interleaved", torch.float32),
    ],
)
def test_losses_are_those_of_one_process(
    tmp_path: Path, workers: int, schedule: str, dtype: torch.dtype
) -> None:
    settings = settings_for(workers, f"schedule={schedule}")
    cluster = run(settings, tmp_path, gpt(dtype))
    expected, _ = own_workloads.alone(settings, gpt(dtype), "pipeline")
    rel = 1e-9 if dtype == torch.float64 else 1e-5
    assert own_workloads.losses_of(cluster) == pytest.approx(expected, rel=rel)


def test_adapters_on_a_model_of_a_folder(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    settings = settings_for(2)
    cluster = run(settings, tmp_path / "run", fine_tuned(tmp_path / "model"))
    expected, _ = own_workloads.alone(settings, fine_tuned(tmp_path / "model"), "pipeline")
    assert own_workloads.losses_of(cluster) == pytest.approx(expected, rel=1e-5)
