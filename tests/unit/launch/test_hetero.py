"""`hetero_config.json`: read, checked, written, and turned into the processes of one machine."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from made_runs import MadeRun
from smolcluster.algorithms.PipelineParallel.config import PipelineConfig
from smolcluster.cli import main as cli
from smolcluster.configs.resolve import load_settings
from smolcluster.errors import ConfigError, LaunchError
from smolcluster.launch.diagram import of_cluster
from smolcluster.launch.hetero.file import HeteroConfig, read_hetero
from smolcluster.launch.hetero.start import Part, _say_of, main, own_nodes
from smolcluster.runs.events import RunResumed
from smolcluster.runs.paths import point_latest
from smolcluster.training.checkpoint import CheckpointStore

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
CONTENT: dict[str, Any] = {
    "coordinator": {"hostname": "mini", "ip": "10.0.0.1"},
    "workers": [
        {"id": 1, "hostname": "box", "ip": "10.0.0.2", "port": 9999, "device": "cuda"},
        {"id": 2, "ip": "10.0.0.2", "port": 10000, "device": "cuda", "num_gpus": 1},
    ],
    "training": {"visualize": True, "visualization_format": "mmd", "num_epochs": 2},
    "shard_plan": [
        {"id": "local", "start": 0, "end": 2},
        {"id": 2, "start": 2, "end": 4},
        {"id": 1, "start": 4, "end": 8, "is_last": True},
    ],
}


def written(folder: Path, **changes: Any) -> Path:
    path = folder / "hetero_config.json"
    path.write_text(json.dumps({**CONTENT, **changes}), encoding="utf-8")
    return path


def of(folder: Path, **changes: Any) -> HeteroConfig:
    return read_hetero(written(folder, **changes))


def test_it_is_a_cluster_file_with_a_plan(tmp_path: Path) -> None:
    cluster = of(tmp_path, pipeline={"microbatches": 8}).cluster(tmp_path, None)
    assert (cluster["port"], cluster["microbatches"]) == (9999, 8)
    assert cluster["workers"] == ["local", "worker2", "worker1"]
    assert set(cluster["host_ip"].values()) == {"10.0.0.1"}
    assert cluster["shard_plan"] == {"local": [[0, 2]], "worker2": [[2, 4]], "worker1": [[4, 8]]}
    devices = {node: own.get("device") for node, own in cluster["nodes"].items()}
    assert devices == {"coordinator": None, "local": None, "worker2": "cuda:0", "worker1": "cuda:1"}
    assert len(of_cluster(cluster, "drawn").boxes) == 4


def test_a_gpu_may_be_said_by_its_number(tmp_path: Path) -> None:
    first, second = CONTENT["workers"]
    workers = [first | {"device_index": 3}, second | {"device": "auto", "device_index": 0}]
    config = of(tmp_path, workers=workers)
    nodes = config.cluster(tmp_path, None)["nodes"]
    assert (nodes["worker1"]["device"], nodes["worker2"]["device"]) == ("cuda:3", "cuda:0")
    assert config.described("worker1") == "layers [4, 8) on device cuda:3 (device_index 3)"
    assert config.described("local") == "layers [0, 2) on device auto"


@pytest.mark.parametrize(
    ("addresses", "hostname", "nodes"),
    [
        ({"10.0.0.1", "127.0.0.1"}, "mini", ["coordinator", "local"]),
        ({"10.0.0.2"}, "other", ["worker2", "worker1"]),
        (set(), "box", ["worker1"]),
    ],
)
def test_a_machine_finds_its_part_by_its_addresses(
    tmp_path: Path, addresses: set[str], hostname: str, nodes: list[str]
) -> None:
    assert own_nodes(of(tmp_path), addresses, hostname) == nodes


def test_a_machine_that_is_not_in_the_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"10\.0\.0\.1, 10\.0\.0\.2"):
        own_nodes(of(tmp_path), {"10.0.0.9"}, "stranger")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shard_plan": CONTENT["shard_plan"][:2]}, "is_last"),
        ({"shard_plan": CONTENT["shard_plan"][1:]}, "must begin with layer 0"),
        (
            {"shard_plan": [{"id": 7, "start": 0, "end": 2, "is_last": True}]},
            "no worker with the id 7",
        ),
        ({"shard_plan": [{"id": "local", "start": 0, "end": 2, "is_last": True}]}, "no layers to"),
        ({"workers": [CONTENT["workers"][0]] * 2}, "twice"),
        ({"workers": []}, "workers"),
        (
            {"coordinator": {"ip": "10.0.0.1", "port": 0}},
            r"coordinator\.port is 0, must be a whole number from 1 to 65535$",
        ),
        ({"coordinator": {}}, r"coordinator\.ip is missing, must be text that is not empty$"),
        (
            {"workers": [{"id": 1, "ip": "10.0.0.2", "device_index": "a"}]},
            r"workers\[0\]\.device_index is 'a', must be a whole number of 0 or more, or null$",
        ),
        (
            {"shard_plan": [{"id": "coord", "start": 0, "end": 2, "is_last": True}]},
            r"shard_plan\[0\]\.id is 'coord', must be local, or the id of a worker$",
        ),
        ({"secret": "sesame"}, r"secret is '\*\*\*', must be text of at least 32 characters"),
        ({"shards": []}, "shards is not a setting; did you mean shard_plan"),
        (
            {"workers": [{"id": 1, "ip": "10.0.0.2", "device_indx": 1}]},
            r"workers\[0\]\.device_indx is not a setting; did you mean device_index\?",
        ),
        (
            {"workers": [{"id": 1, "ip": "10.0.0.2", "device": "cpu", "device_index": 1}]},
            r"workers\[0\]\.device_index is 1, .* device is cpu",
        ),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        of(tmp_path, **changes)
    assert "\n" not in str(refused.value)


def test_no_file_and_no_json_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "program.py"
    for text in (None, "{", "[1]", '{"version": "1", "version": "2"}'):
        path = tmp_path / "hetero_config.json"
        if text is not None:
            path.write_text(text, encoding="utf-8")
        said = ["--config", str(path)]
        assert main(program, output_dir=str(tmp_path), training={}, arguments=said) == 2
    told = capsys.readouterr().err
    assert "init --hetero" in told
    assert 'duplicate key "version"; keep one of them' in told
    assert "hetero_config.json: is [1], must be a mapping with keys of version, coord" in told


def test_the_files_of_a_machine_s_part(tmp_path: Path) -> None:
    config = of(tmp_path, secret="0" * 64, workload_args={"max_length": 8})
    part = Part(config, tmp_path / "program.py", tmp_path / "out", {"num_epochs": 1})
    part.write()
    server, worker = (part.process(node, resume=True).argv for node in ("coordinator", "worker1"))
    assert "--no-progress" not in server, "who coordinates sees steps and losses"
    assert {"num_epochs=2", 'workload_args={"max_length": 8}', "latest"} < set(server)
    assert worker[2:4] == ("3", "worker1")
    there = {"SMOLCLUSTER_RUNS_DIR": "elsewhere"}
    for argv in (server, worker):
        told = ["dataset.name=workload", *(each for each in argv if each.startswith("runs_dir="))]
        file = tmp_path / "out" / "cluster.yaml"
        own = load_settings(file, "workload", "worker1", told, environ=there)
        assert own.node.runs_dir == tmp_path / "out", "where --resume_step looks"
    settings = load_settings(
        tmp_path / "out" / "cluster.yaml",
        "workload",
        "worker2",
        ["dataset.name=workload"],
        environ={},
    )
    assert settings.node.device == "cuda:0"
    ranges = settings.of(PipelineConfig).shard_plan
    assert ranges == {"local": [(0, 2)], "worker2": [(2, 4)], "worker1": [(4, 8)]}
    secret = tmp_path / "out" / "secret"
    assert secret.stat().st_mode & 0o77 == 0
    cluster = json.loads((tmp_path / "out" / "cluster.yaml").read_text(encoding="utf-8"))
    assert cluster["nodes"]["worker1"]["secret_file"] == str(secret)
    changed = Part(of(tmp_path, secret="1" * 64), tmp_path / "program.py", tmp_path / "out", {})
    changed.write()
    cluster = json.loads((tmp_path / "out" / "cluster.yaml").read_text(encoding="utf-8"))
    assert Path(cluster["nodes"]["worker1"]["secret_file"]).read_text().strip() == "1" * 64
    with pytest.raises(ConfigError, match="no run"), part.going_on_from(20):
        pytest.fail("there is none to go on with")


@pytest.mark.parametrize("resumes", [False, True])
def test_a_summary_stays_where_no_server_has_gone_on_with_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, resumes: bool
) -> None:
    monkeypatch.setattr(CheckpointStore, "make_latest", lambda *_: None)
    made = MadeRun(tmp_path)
    made.event(RunResumed(step=50, samples_applied=400))  # an earlier time
    made.summary()
    point_latest(tmp_path, made.paths.run_id)
    before = made.paths.summary.read_bytes()
    part = Part(of(tmp_path), tmp_path / "program.py", tmp_path, {})
    with pytest.raises(LaunchError), part.going_on_from(20):
        assert not made.paths.summary.exists(), "with it a server takes the run for ended"
        if resumes:
            made.event(RunResumed(step=20, samples_applied=160))
        raise LaunchError("the server has ended")
    assert made.paths.summary.exists() is not resumes
    assert resumes or made.paths.summary.read_bytes() == before
    assert not list(made.paths.root.glob("summary.before"))


def test_the_examples_write_a_file_and_draw_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the folder where their user is; without a file it is said how one is made."""
    monkeypatch.chdir(tmp_path)

    def run(name: str, *words: str) -> object:
        monkeypatch.setattr(sys, "argv", [name, *words])
        try:
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        except SystemExit as ended:
            return ended.code
        return 0

    assert run("demo_real.py", "--format", "mmd") == 2, "there is no file yet"
    machines = ("--server", "10.0.0.1", "--worker", "10.0.0.2", "--layers", "8")
    assert run("init_config.py", *machines) == 0
    assert run("demo_real.py", "--format", "mmd") == 0
    drawn = (tmp_path / "architecture.mmd").read_text(encoding="utf-8")
    assert 'n2["worker1<br/>layers 4 to 7<br/>10.0.0.2"]' in drawn
    assert cli(["diagram", "hetero_config.json", "--format", "mmd", "--to", "other.mmd"]) == 0
    assert (tmp_path / "other.mmd").read_text(encoding="utf-8") == drawn


def test_init_writes_a_file_that_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "hetero_config.json"
    workers = ("--worker", "10.0.0.2", "--worker", "10.0.0.3")
    said = ["init", "--hetero", "--server", "10.0.0.1", *workers]
    assert cli([*said, "--layers", "8", "--to", str(path)]) == 0
    config = read_hetero(path)
    assert [(each.start, each.end) for each in config.shard_plan] == [(0, 3), (3, 5), (5, 8)]
    assert config.coordinator.port == 9999
    assert config.secret is not None
    assert path.stat().st_mode & 0o77 == 0
    assert cli([*said, "--layers", "2", "--to", str(tmp_path / "other.json")]) == 2


def test_what_a_process_says_cannot_move_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    _say_of("box")("loss 0.5\x1b[2J\x07")
    assert capsys.readouterr().out == "[box] loss 0.5" + r"\x1b[2J\x07" + "\n"
