"""The examples of `attach`, and the libraries whose loops it knows, with a real server beside them."""

import importlib.util
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import smolcluster
from harness import Outcome, free_port
from integration.test_attach import DATA, NUM_SAMPLES, Served, assert_close
from smolcluster.api import callbacks
from smolcluster.runs.summary import read_summary
from smolcluster.wire.security import ensure_secret

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Served:
    """A server of EDP, and what a process of the first worker finds in its environment."""
    secret = tmp_path / "secret"
    for name, value in {
        "NAME": "ann",
        "RUNS_DIR": str(tmp_path / "runs"),
        "SECRET_FILE": str(secret),
    }.items():
        monkeypatch.setenv(f"SMOLCLUSTER_{name}", value)
    return Served(tmp_path, "edp", secret=ensure_secret(secret))


def example(name: str, folder: str = "attach") -> ModuleType:
    file = EXAMPLES / folder / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"example_{name}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with warnings.catch_warnings():  # what the libraries say of themselves
        warnings.simplefilter("ignore")
        spec.loader.exec_module(module)
    return module


@pytest.mark.nightly
def test_a_gan_trains_two_networks(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    example("gan").main(str(served.file))
    served.server.finish()
    served.cluster.finish()
    assert len(served.cluster.losses) == 2 * 100
    assert "mean radius" in capsys.readouterr().out


@pytest.fixture
def own_model(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The scripts of `own_model` import their neighbour, `train`."""
    monkeypatch.syspath_prepend(str(EXAMPLES / "own_model"))
    sys.modules.pop("train", None)
    yield
    sys.modules.pop("train", None)


@pytest.mark.usefixtures("own_model")
def test_a_model_of_one_s_own_in_a_loop(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    example("loop", "own_model").main(str(served.file))
    served.server.finish()
    assert served.cluster.finish().samples_applied == 2 * 1500
    [said] = [line for line in capsys.readouterr().out.splitlines() if "accuracy" in line]
    assert float(said.split()[1]) > 0.5


@pytest.mark.nightly
@pytest.mark.usefixtures("own_model")
def test_a_model_of_one_s_own_said_in_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("SMOLCLUSTER_RUNS_DIR", str(tmp_path / "runs"))
    main, port = example("orchestrate", "own_model").main, ("--master-port", str(free_port()))
    owner = Outcome("owner", lambda: main([*port, "--workers", "1", "--epochs", "2"]))
    worker = Outcome("worker", lambda: main(["worker", *port]))
    owner.finish()
    worker.finish()
    [summary_file] = (tmp_path / "runs").glob("syncps-*/summary.json")
    summary = read_summary(summary_file)
    assert summary.samples_applied == 2 * 1500
    assert summary.final.model_dump()["val_accuracy"] > 0.5


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
def test_lightning_has_a_callback(served: Served, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    example("lightning_loop").main(str(served.file), str(tmp_path / "trained"))
    served.server.finish()
    summary = served.cluster.finish()
    assert summary.samples_applied == 4 * 320
    steps = served.cluster.losses
    assert steps[-1] < steps[0] / 4
    assert summary.final.val_loss is not None


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_lightning_shuffles_apart_from_the_first_batch_on(
    num_workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where processes load it has asked for the first samples before the run has begun."""
    pytest.importorskip("lightning")
    lines = example("lightning_loop")
    drawn: list[list[float]] = []

    class Line(lines.Line):  # type: ignore[misc, name-defined]
        def training_step(self, batch: torch.Tensor, number: int) -> Any:
            drawn[-1] += batch.flatten().tolist()
            return super().training_step([batch.expand(-1, 3), batch], number)

    for rank in (0, 0, 1):
        torch.manual_seed(0)
        drawn.append([])
        cluster = MagicMock(rank=rank, running=True)
        cluster.__enter__.return_value = cluster
        monkeypatch.setattr(callbacks, "attach", Mock(return_value=cluster))
        numbers: Any = torch.arange(64.0).reshape(64, 1)
        loader: DataLoader[Any] = DataLoader(numbers, 8, shuffle=True, num_workers=num_workers)
        trainer = lines.lightning.Trainer(
            max_epochs=1,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
            callbacks=[callbacks.lightning_callback()],
        )
        trainer.fit(Line(), loader)
    first, again, other = drawn
    assert sorted(first) == sorted(other) == list(range(64))
    assert first == again
    assert first[:8] != other[:8]


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
def test_accelerate_needs_no_more_than_attach(served: Served) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model: nn.Module = nn.Linear(6, 2)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(DATA, batch_size=20)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with smolcluster.attach(model, optimizer, served.file, num_samples=NUM_SAMPLES) as cluster:
        while cluster.running:
            for inputs, targets in loader:
                optimizer.zero_grad()
                loss = functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                cluster.loss = loss
                optimizer.step()
    assert served.finish().steps == 2 * len(loader)
    assert_close(served.weights, accelerator.unwrap_model(model))
