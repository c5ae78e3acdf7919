"""Saved runs: listed, exported, resumed."""

import json
import shlex
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from harness import Cluster, local_settings, summary_of
from pretrained_models import WORKLOAD, text_arguments
from smolcluster.cli import main
from smolcluster.configs.resolve import save_resolved
from smolcluster.errors import CheckpointError, ConfigError, RunBusy
from smolcluster.launch.remote import LaunchOptions
from smolcluster.launch.saved import export_model, merge_model, resume, show_checkpoints, store_of
from smolcluster.runs.launched import Launched, LaunchedProcess, write_launched
from smolcluster.runs.lock import run_lock
from smolcluster.runs.paths import RunPaths, create_run
from smolcluster.runs.summary import write_summary
from smolcluster.training.checkpoint import Snapshot, TrainingState
from smolcluster.training.named import load_named
from smolcluster.training.replica import Replica
from smolcluster.utils.stopping import Interrupted

STATE = TrainingState(
    run_id="edp-1",
    algorithm="edp",
    incarnation="here",
    step=1,
    samples_applied=4,
    epoch=0,
    dataset_fingerprint="data",
    seed=0,
    codec="fp32",
)


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    """A SyncPS run that was stopped after some steps, with three checkpoints."""
    paths = create_run(tmp_path, "syncps-1")
    settings = local_settings(
        "num_epochs=30",
        *("checkpoint_steps=10", "eval_steps=10", "reconnect_timeout_s=1"),
        workers=2,
        algorithm="syncps",
    )
    save_resolved(settings, paths.config)
    cluster = Cluster(settings, paths.root, algorithm="syncps")
    workers = [cluster.worker(each) for each in (1, 2)]
    while len(cluster.metrics.steps) < 40 and cluster.server.is_alive():
        cluster.server.join(0.01)
    cluster.stop.note(signal.SIGTERM)
    assert isinstance(cluster.server.failure(), Interrupted)
    for worker in workers:
        worker.failure()
    return paths


def test_checkpoints_are_listed_and_exported(
    run: RunPaths, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show_checkpoints(str(run.root)) == 0
    steps = sorted(int(each.name.removeprefix("step-")) for each in run.checkpoints.glob("step-*"))
    shown = capsys.readouterr().out
    assert all(f"{step:,}" in shown for step in steps)
    assert show_checkpoints(str(run.root), as_json=True) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [each["step"] for each in listed] == steps
    assert listed[-1].keys() == {
        *("step", "train_loss", "val_loss", "size_bytes", "written_at", "problem", "names", "path")
    }
    assert listed[-1]["problem"] is None
    for name in ("latest", "best"):
        [step] = [each["step"] for each in listed if name in each["names"]]
        assert (run.checkpoints / name).resolve().name == f"step-{step:08}"
    assert "latest" in listed[-1]["names"]
    assert Path(listed[-1]["path"], "model.safetensors").is_file()
    assert export_model(str(run.root), tmp_path / "newest", best=False, transformers=False) == 0
    assert export_model(str(run.root), tmp_path / "best", best=True, transformers=False) == 0
    for kind, name in (("newest", "latest"), ("best", "best")):
        exported = load_file(tmp_path / kind / "model.safetensors")
        kept = load_file(run.checkpoints / name / "model.safetensors")
        assert exported.keys() == kept.keys()
        assert all(torch.equal(exported[each], kept[each]) for each in kept)


class Adapted(nn.Module):
    """Looks like what `peft` makes: a frozen base, a trained adapter, and `peft_config`."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(requires_grad=False)
        self.adapter = nn.Linear(4, 2)
        self.peft_config: dict[str, object] = {}


def test_exported_adapters_come_without_their_base_which_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replica = Replica(Adapted(), "sgd")
    paths = finished(tmp_path, replica)
    export_model(str(paths.root), tmp_path / "out", best=False, transformers=False)
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == {"adapter.weight", "adapter.bias"}
    assert replica.base is not None
    assert replica.base in capsys.readouterr().out


def finished(folder: Path, replica: Replica, *overrides: str) -> RunPaths:
    """A run of one step, with a checkpoint of what it trained."""
    paths = create_run(folder, "edp-1")
    save_resolved(local_settings(*overrides), paths.config)
    store_of(paths).save(Snapshot.of(replica, STATE))
    return paths


def test_a_fine_tuned_model_is_merged_or_written_as_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    arguments = text_arguments(tmp_path)
    model: Any = load_named(WORKLOAD, arguments, 42).new_model()
    replica = Replica(model, "sgd")
    named = [f"workload={WORKLOAD}", f"workload_args={json.dumps(arguments)}"]
    paths = finished(tmp_path / "runs", replica, *named)
    assert main(["merge", str(paths.root), "--into", str(tmp_path / "merged")]) == 0
    assert str(tmp_path / "model") in capsys.readouterr().out
    export_model(str(paths.root), tmp_path / "adapters", best=False, transformers=True)
    assert (tmp_path / "adapters" / "adapter_config.json").is_file()
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    expected = model.merge_and_unload().state_dict()
    assert all(torch.equal(merged[name], expected[name]) for name in merged)


def test_a_model_without_a_base_is_not_merged(tmp_path: Path) -> None:
    paths = finished(tmp_path, Replica(Adapted(), "sgd"))
    with pytest.raises(ConfigError, match="Pretrained"):
        merge_model(str(paths.root), tmp_path / "merged", best=False)


def test_a_damaged_checkpoint_is_named_and_not_exported(
    run: RunPaths, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = (run.checkpoints / "latest").resolve()
    data = bytearray((newest / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (newest / "model.safetensors").write_bytes(data)
    assert show_checkpoints(str(run.root)) == 1
    assert "damaged" in capsys.readouterr().out
    export_model(str(run.root), tmp_path / "out", best=False, transformers=False)
    assert newest.name not in capsys.readouterr().out


def test_a_resumed_run_keeps_its_batch_whatever_the_number_of_workers(
    run: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    assert resume(str(run.root), 3, ["num_epochs=31"], LaunchOptions(dry_run=True)) == 0
    server = capsys.readouterr().out.splitlines()[1]
    for part in (
        "--resume auto",
        "--run-id syncps-1",
        "--workers 3",
        "global_batch_size=64",
        "num_epochs=31",
        str(run.config),
        f'runs_dir="{run.root.parent}"',
    ):
        assert part in server


def test_a_script_s_run_goes_on_with_the_script(
    run: RunPaths, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train it.py"
    worker = ("python", "script.py", "1", "pi5", "--script", f"'{script}' --depth 3")
    processes = (
        LaunchedProcess(node="mini1", role="server"),
        LaunchedProcess(node="pi5", role="worker", rank=0, argv=worker),
    )
    launched = Launched(run_id="syncps-1", algorithm="syncps", processes=processes)
    write_launched(run.launched, launched)
    with pytest.raises(ConfigError, match=r"--script is .*train it\.py: there is no such file"):
        resume(str(run.root), None, [], LaunchOptions(dry_run=True))
    script.touch()
    assert resume(str(run.root), None, [], LaunchOptions(dry_run=True)) == 0
    server, worker_s = capsys.readouterr().out.splitlines()[1:4:2]
    assert f"serve {run.config} --algorithm syncps" in server
    assert f"--train-config {run.config}" in server
    assert "--resume auto" in server
    words = shlex.split(worker_s)
    assert shlex.split(words[words.index("--script") + 1]) == [str(script), "--depth", "3"]


def test_a_run_of_attached_processes_that_nobody_launched_is_to_be_served_again(
    run: RunPaths,
) -> None:
    run.config.write_text(run.config.read_text().replace("name: digits", "name: attached"))
    with pytest.raises(ConfigError, match="smolcluster serve CLUSTER --algorithm syncps --resume"):
        resume(str(run.root), None, [], LaunchOptions(dry_run=True))


def test_what_cannot_be_resumed_is_one_line(run: RunPaths, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run 'nono'"):
        resume("nono", None, [], LaunchOptions(dry_run=True))
    with run_lock(run.lock), pytest.raises(RunBusy, match="is being written"):
        resume(str(run.root), None, [], LaunchOptions(dry_run=True))
    write_summary(run.summary, summary_of(30))
    with pytest.raises(CheckpointError, match="has ended; to train on, raise num_epochs above 30"):
        resume(str(run.root), None, [], LaunchOptions(dry_run=True))
    run.summary.unlink()
    config = run.config.read_text()
    run.config.write_text(config.replace("127.0.0.1", "10.0.0.1"))
    with pytest.raises(ConfigError, match="was not a local one"):
        resume(str(run.root), None, [], LaunchOptions(dry_run=True))
    run.config.write_text(config)
    run.events.unlink()
    assert resume(str(run.root), None, [], LaunchOptions(dry_run=True)) == 0, (
        "its checkpoints say what it is"
    )
    shutil.rmtree(run.checkpoints)
    with pytest.raises(ConfigError, match="did not get as far as to begin"):
        resume(str(run.root), None, [], LaunchOptions(dry_run=True))
    with pytest.raises(CheckpointError, match="has no good checkpoint"):
        export_model(str(run.root), tmp_path, best=False, transformers=False)
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        show_checkpoints(f"{tmp_path}/")


def test_of_damaged_checkpoints_alone_no_run_is_resumed(run: RunPaths) -> None:
    for each in run.checkpoints.glob("step-*/model.safetensors"):
        each.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"none of the \d checkpoints of syncps-1 is good"):
        resume(str(run.root), None, [], LaunchOptions(dry_run=True))
