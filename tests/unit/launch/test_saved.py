"""Saved runs: listed, exported, resumed."""

import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from harness import Cluster, local_settings, state_of
from made_runs import summary_of
from pretrained_models import WORKLOAD, text_arguments
from smolcluster.cli import main
from smolcluster.commands.checkpoints import export_model, show_checkpoints
from smolcluster.configs.begun import remember_workload
from smolcluster.configs.resolve import load_resolved, save_resolved
from smolcluster.errors import CheckpointError, ConfigError, DataError, RunBusy
from smolcluster.launch.flow import LaunchOptions
from smolcluster.launch.saved import resume, store_of
from smolcluster.runs.launched import LAUNCHED, Launched, LaunchedProcess, write_launched
from smolcluster.runs.lock import run_lock
from smolcluster.runs.paths import RunPaths, create_run, find_run
from smolcluster.runs.summary import write_summary
from smolcluster.training import checkpoint
from smolcluster.training.checkpoint import Snapshot
from smolcluster.training.named import load_named
from smolcluster.training.replica import Replica
from smolcluster.utils.stopping import Interrupted

EPOCHS = 3000
"""More than any machine gets through before the run is stopped."""


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a SyncPS run that was stopped after some steps, with checkpoints; not to be changed."""
    paths = create_run(tmp_path_factory.mktemp("begun"), "syncps-1")
    settings = local_settings(
        f"num_epochs={EPOCHS}",
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
    return paths.root


@pytest.fixture
def run(begun: Path, tmp_path: Path) -> RunPaths:
    """A copy of that run."""
    return RunPaths(shutil.copytree(begun, tmp_path / "syncps-1", symlinks=True))


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
    store_of(paths).save(Snapshot.of(replica, state_of(1)))
    return paths


@pytest.mark.slow
def test_a_fine_tuned_model_is_merged_or_written_as_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    arguments = text_arguments(tmp_path)
    model: Any = load_named(WORKLOAD, arguments, 42).new_model()
    replica = Replica(model, "sgd")
    named = [f"workload={WORKLOAD}", f"workload_args={json.dumps(arguments)}"]
    paths = finished(tmp_path / "runs", replica, *named)
    command = ["merge", str(paths.root), "--into", str(tmp_path / "merged")]
    assert main([*command, "--workload", WORKLOAD]) == 0
    assert str(tmp_path / "model") in capsys.readouterr().out
    remember_workload(paths.root, load_resolved(paths.config).train, {})  # as if it had trained
    export_model(str(paths.root), tmp_path / "adapters", best=False, transformers=True)
    assert (tmp_path / "adapters" / "adapter_config.json").is_file()
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    expected = model.merge_and_unload().state_dict()
    assert all(torch.equal(merged[name], expected[name]) for name in merged)


HANDED_OVER = """
from pathlib import Path
import torch
from torch import nn
from smolcluster.training.workload import Workload

Path({mark!r}).touch()

def loss(model, batch):
    return model(batch).square().mean()

def workload(width: int = 2):
    rows = torch.randn(8, 4).unbind()
    return Workload(nn.Linear(4, width), loss, rows, rows[:4], name="given")
"""
NOT_IMPORTED = (
    ["merge", "RUN", "--into", "OUT"],
    ["export", "RUN", "--to", "OUT", "--transformers"],
    ["train", "--resume", "RUN", "--override", "num_epochs=9"],
    ["train", "--config", "RUN/config.yaml"],
    ["launch", "edp", "--local", "--no-tmux", "--train-config", "RUN/config.yaml"],
    ["resume", "RUN", "--no-tmux", "--override", "num_epochs=9"],
)
"""Commands that need the code, each of which refuses it."""
ONLY_READ = (
    ["generate", "RUN"],
    ["join", "RUN"],
    ["report", "RUN"],
    ["compare", "RUN", "RUN"],
    ["checkpoints", "RUN"],
    ["status", "RUN"],
    ["stop", "RUN"],
    ["export", "RUN", "--to", "OUT/plain"],
)


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """A file with a workload, and the file that is there when it was imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("SMOLCLUSTER_RUNS_DIR", str(tmp_path / "mine"))
    file, mark = tmp_path / "given_over.py", tmp_path / "imported"
    file.write_text(HANDED_OVER.format(mark=str(mark)))
    yield file, mark
    sys.modules.pop("given_over", None)


def words_for(command: list[str], run: Path, out: Path) -> list[str]:
    return [word.replace("RUN", str(run)).replace("OUT", str(out)) for word in command]


def trained_given(file: Path, mark: Path) -> RunPaths:
    """A run of this user's, `mine/given`, that trained the workload of `file`; it counts as not imported."""
    own = ("workload_args.width=3", "metrics_port=null", "batch_size=4", "num_epochs=1")
    words = ["train", "--workload", f"{file}:workload", "--run-id", "given", "--override", *own]
    assert main(words) == 0
    forget_import(mark)
    return find_run(Path(os.environ["SMOLCLUSTER_RUNS_DIR"]), "given")


def forget_import(mark: Path) -> None:
    assert mark.exists()
    mark.unlink()
    sys.modules.pop("given_over")


def assert_nothing_of_it_runs(
    run: Path,
    mark: Path,
    capsys: pytest.CaptureFixture[str],
    named: str,
    commands: Sequence[list[str]] = NOT_IMPORTED,
) -> None:
    for command in commands:
        words = words_for(command, run, run.with_name("out"))
        capsys.readouterr()
        code = main(words)
        said = capsys.readouterr().err
        assert not mark.exists(), words
        if command in NOT_IMPORTED:
            assert code == 2, (words, said)
            assert named in said, words
            assert "--workload" in said, words
            assert len(said.splitlines()) == 1, said


@pytest.mark.usefixtures("as_a_process")
def test_code_that_a_folder_of_somebody_else_s_names_is_not_imported(
    given: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, mark = given
    for name, args in (
        ("os:system", {"command": f"touch {mark}"}),
        (f"{tmp_path}/theirs/edp-1/evil.py:workload", {"width": 2}),
        (f"{tmp_path}/theirs/edp-1/launch/workload/evil.py:workload", {"width": 2}),
    ):
        named = [f"workload={name}", f"workload_args={json.dumps(args)}"]
        paths = finished(tmp_path / "theirs", Replica(Adapted(), "sgd"), *named)
        for folder in (paths.root, paths.root / "launch" / "workload"):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "evil.py").write_text(HANDED_OVER.format(mark=str(mark)))
        (paths.root / "launch" / "workload.name").write_text("evil.py:workload")
        commands = (*NOT_IMPORTED, *ONLY_READ) if "launch" in name else NOT_IMPORTED
        assert_nothing_of_it_runs(paths.root, mark, capsys, name, commands)


@pytest.mark.usefixtures("as_a_process")
def test_a_folder_with_the_name_of_a_run_of_one_s_own_gets_no_other_code_to_run(
    given: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, mark = given
    own = trained_given(*given)
    theirs = tmp_path / "theirs" / own.run_id
    shutil.copytree(own.root, theirs, symlinks=True)
    config = (theirs / "config.yaml").read_text()
    evil = theirs / "given_over.py"
    shutil.copy(file, evil)
    (theirs / "config.yaml").write_text(config.replace(str(file), str(evil)))
    commands = (*NOT_IMPORTED, *ONLY_READ)
    assert_nothing_of_it_runs(theirs, mark, capsys, str(evil), commands)
    (theirs / "config.yaml").write_text(config.replace("width: 3", "width: 4"))
    assert_nothing_of_it_runs(theirs, mark, capsys, str(file))
    (theirs / "config.yaml").write_text(config)
    file.write_text(file.read_text() + "# no longer what was trained\n")
    assert_nothing_of_it_runs(theirs, mark, capsys, str(file))


@pytest.mark.usefixtures("as_a_process")
def test_a_run_of_one_s_own_goes_on_and_is_exported_without_its_workload_being_named(
    given: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, mark = given
    own = trained_given(*given)
    for command in (
        ["export", "RUN", "--transformers", "--to", "OUT"],
        ["merge", "RUN", "--into", "OUT"],
    ):
        assert main(words_for(command, own.root, tmp_path / "out")) == 2
        assert "no Pretrained(folder)" in " ".join(capsys.readouterr().err.split())
        forget_import(mark)
    assert main(["train", "--resume", "given", "--override", "num_epochs=2"]) == 0
    forget_import(mark)
    file.write_text(file.read_text() + "# by its user\n")
    assert main(["resume", "given", "--override", "num_epochs=4"]) == 0
    forget_import(mark)
    moved = tmp_path / "elsewhere" / "given"
    shutil.move(own.root, moved)
    file.write_text(file.read_text() + "# by its user\n")
    words = ["--override", "num_epochs=5"]
    assert main(["resume", str(moved), *words]) == 2
    assert "whose code is another one now" in capsys.readouterr().err
    assert main(["resume", str(moved), "--workload", f"{file}:workload", *words]) == 0
    forget_import(mark)
    assert main(["resume", str(moved), "--override", "num_epochs=6"]) == 0
    assert mark.exists()


def test_launch_files_that_no_launcher_of_one_s_own_wrote_are_not_followed(
    run: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    script, mark = run.root / "evil.py", run.root / "ran"
    script.write_text(HANDED_OVER.format(mark=str(mark)))
    server = LaunchedProcess(node="mini1", role="server")
    argv = ("python", "script.py", "1", "pi5", "--script", str(script))
    scripted = LaunchedProcess(node="pi5", role="worker", rank=0, argv=argv)
    remote = LaunchedProcess(node="pi5", role="worker", rank=0, ssh="pi5")
    job = server.model_copy(update={"scheduler": "slurm", "session": "job"})
    kept = run.root / "launch"
    kept.mkdir()
    env = f"nodes: {{server: {{ssh: local, env: {{PYTHONSTARTUP: {script}}}}}}}\n"
    (kept / "cluster.yaml").write_text(env)
    (kept / "train.yaml").write_text("dataset: {name: digits}\n")
    environ = {"PYTHONSTARTUP": str(script)}
    (kept / "told.json").write_text(json.dumps({"environ": environ, "overrides": []}))
    for processes in ((server, scripted), (server, remote), (job,)):
        launched = Launched(run_id="syncps-1", algorithm="syncps", processes=processes)
        LAUNCHED.write(run.launched, launched)
        for command in ("resume", "join"):
            code = main([command, str(run.root), "--no-tmux"][: 3 if command == "resume" else 2])
            said = capsys.readouterr().err
            assert code in (1, 2), said
            assert command == "join" or "was not launched from here" in " ".join(said.split())
    assert "PYTHONSTARTUP" not in os.environ
    assert not mark.exists()


@pytest.mark.parametrize(
    "part",
    [
        {"ssh": "-oProxyCommand=touch ran"},
        {"session": "--kubeconfig=evil.yaml", "scheduler": "kubernetes"},
    ],
)
def test_a_list_of_processes_holds_no_options(
    run: RunPaths, part: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    process = {"node": "mini1", "role": "server", **part}
    listed = {"run_id": "syncps-1", "algorithm": "syncps", "processes": [process]}
    run.launched.write_text(json.dumps(listed))
    with pytest.raises(DataError, match="is damaged"):
        resume(str(run.root), None, [], LaunchOptions(dry_run=True))
    assert main(["stop", str(run.root)]) != 0
    assert "is damaged" in capsys.readouterr().err


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
    run: RunPaths, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint's tensors are its server's alone to load, which may be large."""
    monkeypatch.setattr(checkpoint, "load_file", None)
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
    assert resume(str(run.root), 3, ["batch_size=16"], LaunchOptions(dry_run=True)) == 0
    assert "global_batch_size=32" in capsys.readouterr().out.splitlines()[1]


def test_a_run_goes_on_whose_server_has_a_name_with_dots(
    run: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    stated = run.config.read_text().replace("mini1", "mini1.local")
    run.config.write_text(stated.replace("microbatch: null", "microbatch: 4"))
    assert resume(str(run.root), None, ["num_epochs=31"], LaunchOptions(dry_run=True)) == 0
    server = shlex.split(capsys.readouterr().out.splitlines()[1])
    assert 'nodes={"mini1.local": {"microbatch": 4}}' in server


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
    with run_lock(run.starting, "started"), pytest.raises(RunBusy, match="is being started"):
        resume(str(run.root), None, [], LaunchOptions())
    write_summary(run.summary, summary_of(epochs=EPOCHS))
    with pytest.raises(
        CheckpointError, match=f"has ended; to train on, raise num_epochs above {EPOCHS}"
    ):
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
