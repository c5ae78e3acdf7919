"""An orchestrator and its workers, said in Python."""

import copy
import logging
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import orchestrated_ranks
import smolcluster
from harness import SECRET, Outcome, free_port
from processes import Processes
from smolcluster.api import arrivals as module
from smolcluster.api.arrivals import Arrivals
from smolcluster.api.settings import server_settings
from smolcluster.data.permutation import epoch_permutation
from smolcluster.errors import AuthError, ClusterEmpty, ConfigError, PortBusy, Rejected
from smolcluster.runs.events import Evaluated, read_events
from smolcluster.runs.summary import read_summary
from smolcluster.training.hooks import EvaluationDone, Hooks, StepDone
from smolcluster.training.recipe import Training
from smolcluster.wire.handshake import introduce
from smolcluster.wire.messages import sets_of

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "orchestrator"


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, width), nn.Linear(width, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.first(inputs).tanh())
        return outputs


def samples(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, generator=generator)
    return TensorDataset(inputs, inputs[:, :3].argmax(dim=1))


def loader(count: int = 96, seed: int = 1) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(samples(count, seed), batch_size=8, shuffle=True)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> smolcluster.DistributedConfig:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("SMOLCLUSTER_RUNS_DIR", str(tmp_path / "runs"))
    return smolcluster.DistributedConfig(
        master_port=free_port(), num_workers=2, learning_rate=0.02, start_timeout=100.0
    )


def worker(config: smolcluster.DistributedConfig, number: int, **options: Any) -> Outcome:
    given: dict[str, Any] = {"model_ctor": Net, "name": f"w{number}", "threads": 1} | options
    made = smolcluster.NetworkWorker(0, config, **given)
    return Outcome(f"worker {number}", made.connect_and_train)


@pytest.mark.nightly
@pytest.mark.parametrize("algorithm", ["syncps", "edp", "diloco"])
def test_workers_without_data_train_the_orchestrator_s_model(
    config: smolcluster.DistributedConfig, tmp_path: Path, algorithm: str
) -> None:
    config.algorithm = algorithm
    config.overrides = ["checkpoint_steps=10"]
    model = Net()
    validation = samples(64, 2).tensors
    before = functional.cross_entropy(model(validation[0]), validation[1]).item()
    steps: list[StepDone] = []
    orchestrator = smolcluster.Orchestrator(config)
    orchestrator.register_model(
        model,
        loss_fn=functional.cross_entropy,
        training=Training(hooks=Hooks(on_step=steps.append)),
    )
    workers = [worker(config, 1), worker(config, 2)]
    assert orchestrator.wait_for_workers(timeout=60) == 2
    summary = orchestrator.start_training(
        train_loader=loader(),
        val_loader=DataLoader(samples(64, 2), batch_size=16),
        num_epochs=4,
        val_interval=5,
    )
    for each in workers:
        each.finish()
    assert summary.samples_applied == 4 * 96
    assert {share.node for share in summary.workers} == {"w1", "w2"}
    assert {share.rank for share in summary.workers} == {0, 1}
    num_samples = 16 if algorithm == "syncps" else 8
    assert {step.num_samples for step in steps} == {num_samples}
    after = functional.cross_entropy(model(validation[0]), validation[1]).item()
    assert summary.final.val_loss is not None
    assert after == pytest.approx(summary.final.val_loss, rel=1e-5)
    assert after < before
    kept = {file.parts[-2] for file in tmp_path.glob("runs/*/own/*/step-*.safetensors")}
    own = {f"worker-rank{share.rank}-{share.node}" for share in summary.workers}
    assert kept == (own if algorithm == "diloco" else set())
    path = orchestrator.save_checkpoint(tmp_path / "made" / "final.pt")
    assert [path] == [*path.parent.iterdir()] == [tmp_path / "made" / "final.pt"]
    saved = load_file(path)
    assert saved.keys() == model.state_dict().keys()
    assert all(torch.equal(saved[name], value) for name, value in model.state_dict().items())


def cut_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def right(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return (model(batch[0]).argmax(dim=1) == batch[1]).sum(), len(batch[1])


@pytest.mark.nightly
@pytest.mark.parametrize("has_metric", [True, False])
def test_workers_with_some_of_the_layers_evaluate_what_the_orchestrator_holds_out(
    config: smolcluster.DistributedConfig, tmp_path: Path, has_metric: bool
) -> None:
    config.model_parallel, config.pipeline_parallel = not has_metric, has_metric
    config.micro_batches = 2
    model, evaluations = cut_net(), list[EvaluationDone]()
    metrics = {"right": right}
    alone, steps = copy.deepcopy(model), list[StepDone]()
    orchestrator = smolcluster.Orchestrator(config)
    hooks = Hooks(on_step=steps.append, on_evaluation=evaluations.append)
    orchestrator.register_model(model, metrics=metrics, training=Training(hooks=hooks))
    options = {"model_ctor": cut_net} | ({"metrics": metrics} if has_metric else {})
    workers = [worker(config, number, **options) for number in (1, 2)]
    assert orchestrator.wait_for_workers(timeout=60) == 2
    held_out = DataLoader(samples(40, 2), batch_size=16)  # the last batch is a smaller one
    summary = orchestrator.start_training(loader(), held_out, num_epochs=2, val_interval=5)
    for each in workers:
        each.finish()
    inputs, targets = samples(96, 1).tensors
    first = epoch_permutation(config.seed, 0, 96)[: steps[0].num_samples].long()
    loss = functional.cross_entropy(alone(inputs[first]), targets[first])
    assert steps[0].loss == pytest.approx(loss.item(), rel=1e-5)
    inputs, targets = samples(40, 2).tensors
    with torch.no_grad():
        logits = model(inputs)
    expected = functional.cross_entropy(logits, targets).item()
    assert summary.final.val_loss == pytest.approx(expected, rel=1e-5)
    assert [each.step for each in evaluations] == [*range(5, summary.steps, 5), summary.steps]
    assert evaluations[-1].loss < evaluations[0].loss
    accuracy = (logits.argmax(dim=1) == targets).float().mean().item()
    found = evaluations[-1].metrics
    assert found == (pytest.approx({"right": accuracy}) if has_metric else {})
    [log] = tmp_path.glob("runs/pipeline-*/logs/server*.log")
    assert log.read_text().count("metric right is missing") == (0 if has_metric else 1)


@pytest.mark.nightly
def test_a_run_goes_on_with_more_epochs(config: smolcluster.DistributedConfig) -> None:
    config.num_workers, config.run_id = 1, "goes-on"
    applied: list[int] = []
    orchestrator = smolcluster.Orchestrator(config)
    orchestrator.register_model(Net())
    for num_epochs, resume in ((1, None), (3, "goes-on")):
        one = worker(config, 1)
        orchestrator.wait_for_workers(timeout=60)
        summary = orchestrator.start_training(loader(), num_epochs=num_epochs, resume=resume)
        one.finish()
        applied.append(summary.samples_applied)
    assert applied == [96, 3 * 96]
    with pytest.raises(ConfigError, match="the workers of the training before have ended with it"):
        orchestrator.start_training(loader())
    assert orchestrator.config.run_id == "goes-on"


def own_loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target) * 2


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("registered", "options", "error", "reason"),
    [
        ({}, {"model_ctor": lambda: Net(width=9)}, Rejected, "model"),
        ({"loss_fn": own_loss}, {"loss_fn": nn.CrossEntropyLoss()}, Rejected, "code"),
        ({"loss_fn": own_loss}, {}, ConfigError, "loss_fn"),
    ],
)
def test_another_model_or_loss_is_refused(
    config: smolcluster.DistributedConfig,
    registered: dict[str, Any],
    options: dict[str, Any],
    error: type[Exception],
    reason: str,
) -> None:
    config.num_workers = 1
    orchestrator = smolcluster.Orchestrator(config)
    orchestrator.register_model(Net(), **registered)
    wrong = worker(config, 1, **options)
    assert orchestrator.wait_for_workers(timeout=60) == 1
    training = Outcome("orchestrator", lambda: orchestrator.start_training(loader(), num_epochs=1))
    refused = wrong.failure()
    assert isinstance(refused, error)
    assert reason in str(refused)
    worker(config, 1, loss_fn=registered.get("loss_fn")).finish()  # a right one
    training.finish()


@pytest.mark.slow
def test_too_few_workers_in_time_is_an_error(config: smolcluster.DistributedConfig) -> None:
    with smolcluster.Orchestrator(config) as orchestrator:
        orchestrator.register_model(Net())
        one = worker(config, 1)
        config.num_workers = 1
        assert orchestrator.wait_for_workers(timeout=60) == 1
        config.num_workers = 2
        with pytest.raises(ClusterEmpty, match=r"1 of 2 workers came within .* \(w1\)"):
            orchestrator.wait_for_workers(timeout=0.2)
        with pytest.raises(PortBusy):
            smolcluster.Orchestrator(config).wait_for_workers(timeout=0.1)
        config.num_workers = 1
        orchestrator.start_training(loader(), num_epochs=1)
        one.finish()


def test_two_workers_of_one_name_are_one_until_the_first_has_gone(
    config: smolcluster.DistributedConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = server_settings(config, ["w1", "w2"], {})
    with closing(Arrivals(settings, "syncps", SECRET, logging.Logger("test"))) as arrivals:
        for number, name in enumerate(("w1", "w1", "w2")):
            refused = arrivals._answer(number, introduce(name, 0, sets_of("syncps")))
            assert ("taken" in refused.sentence) == (number == 1)
        assert arrivals.names == ["w1", "w2"]
        monkeypatch.setattr(module, "GONE_S", 0.0)
        refused = arrivals._answer(3, introduce("w1", 0, sets_of("syncps")))
        assert "not begun" in refused.sentence


@pytest.mark.nightly
def test_a_compiled_model_is_saved_under_its_plain_names(
    config: smolcluster.DistributedConfig, tmp_path: Path
) -> None:
    orchestrator, model = smolcluster.Orchestrator(config), Net()
    orchestrator.register_model(torch.compile(model))  # type: ignore[arg-type]
    saved = load_file(orchestrator.save_checkpoint(tmp_path / "model"))
    assert saved.keys() == model.state_dict().keys()


def test_what_is_missing_is_said(config: smolcluster.DistributedConfig) -> None:
    with pytest.raises(ConfigError, match="register_model"):
        smolcluster.Orchestrator(config).save_checkpoint("model.pt")
    with pytest.raises(ConfigError, match="model_ctor"):
        smolcluster.NetworkWorker(0, config)
    with pytest.raises(ConfigError, match="gpu_id is -1"):
        smolcluster.NetworkWorker(-1, config, Net)
    config.master_ip = "192.0.2.1"
    with pytest.raises(AuthError, match="secret"):
        smolcluster.NetworkWorker(0, config, Net).connect_and_train()


@pytest.mark.nightly
def test_the_seed_s_two_commands_train_on_two_processes(processes: Processes) -> None:
    """Those of seed 000, with addresses of this machine."""
    port = str(free_port())
    environ = processes.environ | {"LOG_STEP_EVERY": "20", "COMPACT_LOG": "1"}
    processes.environ = environ
    orchestrator = processes.start(
        *(sys.executable, str(EXAMPLES / "orchestrator_train.py"), "--master-ip", "127.0.0.1"),
        *("--master-port", port, "--gpus", "2", "--train-batches", "100", "--val-interval", "20"),
        *("--checkpoint-dir", str(processes.folder / "checkpoints")),
    )
    workers = processes.start(
        *(sys.executable, str(EXAMPLES / "guava_worker.py"), "--gpu-ids", "0,1"),
        *("--master-ip", "127.0.0.1", "--master-port", port, "--world-size", "2"),
    )
    assert orchestrator.wait() == 0, orchestrator.output
    assert workers.wait() == 0, workers.output
    assert "2 workers are here" in orchestrator.output
    assert "step 40, epoch 1, 640 samples" in orchestrator.output
    said = " ".join(orchestrator.output.split())
    if not torch.cuda.is_available():
        assert workers.output.count("no CUDA") == 1
    saved = processes.folder / "checkpoints" / "orchestrator_final.pt"
    assert f"{saved} is in the safetensors format: safetensors.torch.load_file" in said
    assert f"saved {saved}" in said
    assert "tokens.weight" in load_file(saved)
    [folder] = processes.runs.glob("syncps-*")
    summary = read_summary(folder / "summary.json")
    assert (summary.samples_applied, summary.steps, len(summary.workers)) == (800, 50, 2)
    evaluated = [r.event for r in read_events(folder / "events.jsonl")]
    assert sum(isinstance(event, Evaluated) for event in evaluated) >= 3


@pytest.mark.nightly
@pytest.mark.parametrize(
    "told",
    [
        pytest.param(("WORKERS=1", "TENSOR_PARALLEL_SIZE=2"), marks=pytest.mark.nightly),
        pytest.param(
            ("WORKERS=2", "TENSOR_PARALLEL_SIZE=2", "DATA_PARALLEL=1"), marks=pytest.mark.nightly
        ),
        pytest.param(
            ("WORKERS=2", "TENSOR_PARALLEL_SIZE=2", "PIPELINE_PARALLEL=1", "MICRO_BATCHES=4"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_tensors_are_split_within_layers(processes: Processes, told: tuple[str, ...]) -> None:
    """Alone, and together with samples or layers that are shared."""
    child = processes.start(
        sys.executable, orchestrated_ranks.__file__, "TENSOR_PARALLEL=1", *told, forked=False
    )
    assert child.wait() == 0, child.output


@pytest.mark.nightly
def test_a_rank_that_cannot_begin_is_not_waited_for(processes: Processes) -> None:
    """As each is a process that imports the script, which must not train there."""
    script = processes.folder / "script.py"
    script.write_text("import orchestrated_ranks\norchestrated_ranks.main()\n")
    told = ("TENSOR_PARALLEL=1", "WORKERS=1", "TENSOR_PARALLEL_SIZE=2")
    processes.environ["PYTHONPATH"] = str(Path(orchestrated_ranks.__file__).parent)
    child = processes.start(sys.executable, str(script), *told, forked=False)
    assert child.wait() != 0
    assert "LaunchError: rank 1 of tensor_parallel has ended" in child.output.replace(
        "smolcluster.errors.", ""
    )


@pytest.mark.nightly
def test_the_example_splits_tensors_by_its_environment_alone(processes: Processes) -> None:
    processes.environ |= {"TENSOR_PARALLEL": "1", "TENSOR_PARALLEL_SIZE": "2"}
    flags = ("--train-batches", "6", "--checkpoint-dir", str(processes.folder))
    child = processes.start(
        sys.executable, str(EXAMPLES / "orchestrator_train.py"), *flags, forked=False
    )
    assert child.wait() == 0, child.output
    assert "dp 1 x fsdp 1 x tp 2 x pp 1" in child.output
    assert (processes.folder / "orchestrator_final.pt").is_file()
