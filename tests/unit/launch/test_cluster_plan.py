"""From a configuration to the processes on the machines of a cluster."""

import dataclasses
import itertools
import shlex
from pathlib import Path

import pytest
from rich.console import Console

from harness import local_settings
from smolcluster.algorithms.entry import store_parser, worker_parser
from smolcluster.algorithms.process import worker_settings
from smolcluster.cli import main
from smolcluster.configs.function_name import FunctionName
from smolcluster.configs.load import dump_yaml, find_config, read_config
from smolcluster.configs.meant import cluster_source
from smolcluster.configs.resolve import cluster_without, load_settings
from smolcluster.configs.schema import (
    AlgorithmName,
    ClusterConfig,
    NodeConfig,
    Settings,
    StagesConfig,
)
from smolcluster.configs.spec import get_algorithm
from smolcluster.errors import ConfigError, LaunchError
from smolcluster.launch import places
from smolcluster.launch.flow import LaunchOptions, launch
from smolcluster.launch.host import Done, Host
from smolcluster.launch.kept import StoredOptions, cluster_bytes, keep
from smolcluster.launch.places import keys_of, machines_of, place_overrides
from smolcluster.launch.plan import (
    CLUSTER_FILE,
    NO_PROGRESS,
    TRAIN_FILE,
    Machine,
    Request,
    plan,
)
from smolcluster.launch.project import Project
from smolcluster.launch.requests import resolved
from smolcluster.launch.run_in_sessions import RunInSessions
from smolcluster.launch.saved import resume
from smolcluster.launch.take_in import script_of, with_worker, workload_of
from smolcluster.runs.launched import Launched, write_launched
from smolcluster.runs.paths import create_run

RUN_ID = "edp-1"
CLUSTER = ClusterConfig(
    host_ip={"mini1": "10.10.0.1", "pi5": "192.168.50.1", "mac.book-2": "10.10.0.1"},
    port=6000,
    num_workers=2,
    workers=("pi5", "mac.book-2"),
    server="mini1",
    nodes={"pi5": NodeConfig(device="cpu")},
)
SETTINGS = local_settings()
PROJECT = Project({"src/a.py": b""})
PLACES = {
    "mini1": Machine(Host("mini1", "mini1"), "~/smolcluster", "~/smolcluster/runs"),
    "pi5": Machine(
        Host("pi5", "pi@192.168.50.2"),
        project_dir="/opt/smolcluster",
        runs_dir="/mnt/my disk/runs",
        overrides=("dataset.root=~/data",),
    ),
    "mac.book-2": Machine(
        Host("mac.book-2"),
        project_dir="/home/u/main",
        runs_dir="/home/u/main/runs",
        python="/usr/bin/python3",
    ),
}


def of(cluster: ClusterConfig) -> Settings:
    return dataclasses.replace(SETTINGS, cluster=cluster)


def planned(
    *overrides: str, cluster: ClusterConfig = CLUSTER, algorithm: AlgorithmName = "edp"
) -> Launched:
    request = Request(get_algorithm(algorithm), overrides=overrides)
    return plan(request, of(cluster), PLACES, RUN_ID)


def overrides_of(argv: tuple[str, ...]) -> list[str]:
    return [after for word, after in itertools.pairwise(argv) if word == "--override"]


def test_each_process_runs_on_its_machine_in_its_own_session() -> None:
    launched = planned()
    assert (launched.run_id, launched.algorithm, launched.port) == (RUN_ID, "edp", 6000)
    assert [(each.title, each.ssh, each.session) for each in launched.processes] == [
        ("server mini1", "mini1", "edp-1-server"),
        ("worker 1 (pi5)", "pi@192.168.50.2", "edp-1-worker1"),
        ("worker 2 (mac.book-2)", None, "edp-1-worker2"),
    ]
    assert [each.run_dir for each in launched.processes] == [
        "~/smolcluster/runs/edp-1",
        "/mnt/my disk/runs/edp-1",
        "/home/u/main/runs/edp-1",
    ]
    assert [each.project_dir for each in launched.processes] == [
        place.project_dir for place in PLACES.values()
    ]
    assert [each.device for each in launched.processes] == [None, "cpu", None]


def test_the_server_gets_everything_the_user_said() -> None:
    launched = planned("num_epochs=5", "nodes.pi5.threads=2", "port=6000")
    folder = "~/smolcluster/runs/edp-1"
    assert launched.server.argv == (
        *(".venv/bin/python", "src/smolcluster/algorithms/EDP/server.py", "--run-id", RUN_ID),
        *("--config", f"{folder}/{CLUSTER_FILE}", "--train-config", f"{folder}/{TRAIN_FILE}"),
        *("--override", "num_epochs=5", "--override", "nodes.pi5.threads=2"),
        *("--override", "port=6000", "--override", 'runs_dir="~/smolcluster/runs"'),
    )
    assert launched.overrides == ("num_epochs=5", "nodes.pi5.threads=2", "port=6000")


def test_a_worker_gets_its_place_and_only_what_belongs_to_a_machine() -> None:
    [first, second] = planned("num_epochs=5", "device=mps", "host_ip.pi5=10.0.0.1").workers
    assert first.argv == (
        *(".venv/bin/python", "src/smolcluster/algorithms/EDP/worker.py", "1", "pi5"),
        *("--run-id", "edp-1", "--restarts", "3"),
        *("--config", f"/mnt/my disk/runs/edp-1/{CLUSTER_FILE}"),
        *("--override", "dataset.root=~/data"),
        *("--override", "device=mps", "--override", "host_ip.pi5=10.0.0.1"),
        *("--override", 'runs_dir="/mnt/my disk/runs"'),
    )
    assert second.argv[:4] == (
        *("/usr/bin/python3", "src/smolcluster/algorithms/EDP/worker.py", "2", "mac.book-2"),
    )


@pytest.mark.parametrize("runs_dir", ["~/my runs", "/a: b #c", "/ünï😀/'x'\""])
def test_processes_write_where_the_launcher_looks(
    runs_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the cluster file or a variable says something else to them."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SMOLCLUSTER_RUNS_DIR", "/elsewhere")
    places = dict.fromkeys(PLACES, Machine(Host("x", "x"), "~/p", runs_dir))
    request = Request(get_algorithm("edp"), overrides=("runs_dir=/other",))
    launched = plan(request, of(CLUSTER), places, RUN_ID)
    for process in launched.processes:
        settings = load_settings("edp", "nn", overrides=overrides_of(process.argv))
        assert str(settings.node.runs_dir) == runs_dir.replace("~", str(tmp_path), 1)
        assert process.run_dir == f"{runs_dir}/{RUN_ID}"


def test_workers_and_stores_dial_the_server_that_an_override_names(tmp_path: Path) -> None:
    """Their copy of the cluster file has the other one, first among `servers`, too."""
    stated = CLUSTER.model_copy(update={"servers": {"mini1": 2.0, "pi5": 1.0}})
    config = tmp_path / "cluster.yaml"
    config.write_text(stated.model_dump_json(exclude_unset=True))
    overrides = ("server=pi5", "servers={pi5: 1, mini1: 1, mac.book-2: 1}")
    cluster = load_settings(config, "digits", overrides=overrides).cluster
    launched = planned(*overrides, cluster=cluster)
    assert launched.server.node == "pi5"
    parsers = {"worker": worker_parser, "store": store_parser}
    others = launched.others
    assert [each.role for each in others] == ["store", "store", "worker", "worker"]
    for process in others:
        place = process.argv.index("--config") + 1
        argv = (*process.argv[2:place], str(config), *process.argv[place + 1 :])
        args = parsers[process.role](get_algorithm("edp")).parse_args(argv)
        assert worker_settings("edp", args).cluster.server == "pi5"


def test_sessions_have_names_that_tmux_leaves_as_they_are() -> None:
    launched = plan(Request(get_algorithm("edp")), of(CLUSTER), PLACES, "my.run:1")
    assert launched.server.session == "my_run_1-server"
    assert launched.server.run_dir.endswith("/my.run:1")


def test_a_local_run_in_sessions_runs_the_commands_of_a_local_run(tmp_path: Path) -> None:
    place = Machine(Host("x"), str(tmp_path), str(tmp_path), python="python")
    places = dict.fromkeys(CLUSTER.machines, place)
    request = Request(get_algorithm("edp"))
    children, launched = (
        plan(request, of(CLUSTER), places, RUN_ID, is_local=True, in_sessions=in_sessions)
        for in_sessions in (False, True)
    )
    assert (launched.is_local, launched.has_sessions, children.has_sessions) == (True, True, False)
    assert NO_PROGRESS in children.server.argv
    for ours, theirs in zip(launched.processes, children.processes, strict=True):
        assert ours.argv == tuple(word for word in theirs.argv if word != NO_PROGRESS)
        assert (ours.title, ours.run_dir) == (theirs.title, str(tmp_path / RUN_ID))


# With the configuration's files


THREE = (
    "host_ip: {mini1: 10.0.0.1, mini2: 10.0.0.1, pi5: 10.0.0.7}\n"
    "num_workers: 2\nworkers: [mini2, pi5]\nserver: mini1\n"
    "nodes: {pi5: {device: cpu, ssh: pi@10.0.0.5}}\n"
)


def three(tmp_path: Path, more: str = "") -> str:
    file = tmp_path / "three.yaml"
    file.write_text(THREE + more)
    return str(file)


def test_a_machine_that_is_left_out_is_in_no_command_and_may_join_later(tmp_path: Path) -> None:
    more = "servers: [mini1, pi5]\nstore_shares: [3, 1]\nsyncps: {batch_share: {mini2: 0.5, pi5: 0.5}}\n"
    path = Path(three(tmp_path, more))
    kept = cluster_without(path, ["pi5"])
    path.write_text(dump_yaml(kept))  # as it is kept with the run
    cluster = load_settings(path, "digits").cluster
    assert cluster.machines == ("mini1", "mini2")
    assert (kept["servers"], kept["batch_share"]) == ({"mini1": 3}, {"mini2": 1.0})
    path.write_text(dump_yaml(with_worker(kept, "pi5", str(kept["host_ip"]["pi5"]), {})))
    back = load_settings(path, "digits", "pi5").cluster
    assert (back.workers, str(back.host_ip["pi5"])) == (("mini2", "pi5"), "10.0.0.7")
    assert (back.nodes["pi5"].device, back.nodes["pi5"].ssh) == ("cpu", "pi@10.0.0.5")


def test_a_launch_without_a_machine_plans_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["launch", "edp", "--config", three(tmp_path), "--dry-run", "--without"]
    assert main([*words, "pi5"]) == 0
    assert "pi5" not in capsys.readouterr().out


def test_a_run_goes_on_without_a_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SMOLCLUSTER_RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    file, train = Path(three(tmp_path)), find_config("digits", "training")
    cluster = load_settings(file, "digits").cluster
    paths = create_run(tmp_path / "runs", RUN_ID)
    told = StoredOptions(environ={}, overrides=())
    keep(paths, file.read_bytes(), train.read_bytes(), told)
    request = Request(get_algorithm("edp"), config=str(file))
    places = machines_of(request, of(cluster), file, train, here=tmp_path / "runs", project=PROJECT)
    write_launched(paths.launched, plan(request, of(cluster), places, RUN_ID))
    assert main(["resume", RUN_ID, "--dry-run"]) == 0
    assert "pi5" in capsys.readouterr().out
    assert main(["resume", RUN_ID, "--dry-run", "--without", "pi5"]) == 0
    shown = capsys.readouterr().out
    assert "mini2" in shown
    assert "pi5" not in shown
    keep(paths, dump_yaml(cluster_without(file, ["pi5"])).encode(), train.read_bytes(), told)
    assert main(["resume", RUN_ID, "--dry-run"]) == 0
    assert "pi5" not in capsys.readouterr().out, "it has to join"


def test_a_run_of_one_machine_goes_on_with_all_that_it_has(tmp_path: Path) -> None:
    create_run(tmp_path, RUN_ID).config.touch()
    with pytest.raises(ConfigError, match=r"--without pi5: .* run edp-1 has none"):
        resume(str(tmp_path / RUN_ID), None, [], LaunchOptions(), without=["pi5"])


def test_machines_that_are_left_out_are_not_asked_and_what_they_run_is_ended_if_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = create_run(tmp_path, RUN_ID)
    launched = planned()
    write_launched(paths.launched, launched)
    asked = set()

    def run(host: Host, *_: object, **__: object) -> Done:
        asked.add(host.node)
        if host.node == "pi5":
            raise host.unreachable("timed out")
        return Done(0, "gone\n", "")

    monkeypatch.setattr(Host, "run", run)
    again = RunInSessions(launched, paths, Console())
    again.keep_what_waits(without=["pi5"])
    assert asked == {"mini1", "mac.book-2"}
    again._end_outdated()
    assert asked == {"mini1", "mac.book-2", "pi5"}


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["mini1"], "--without mini1: the server is there"),
        (["pi6"], "did you mean pi5"),
        (["mini2", "pi5"], "leaves no worker"),
    ],
)
def test_what_cannot_be_left_out_is_told(tmp_path: Path, names: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_settings(three(tmp_path), "digits", without=names)


def test_a_machine_that_does_not_answer_may_be_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(host: Host, *_: object, **__: object) -> Done:
        if host.node == "pi5":
            raise host.unreachable("timed out")
        return Done(0, "", "")

    monkeypatch.setenv("SMOLCLUSTER_RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(Host, "run", run)
    request = Request(get_algorithm("edp"), config=three(tmp_path))
    with pytest.raises(LaunchError, match="--without pi5"):
        launch(resolved(request, local=False), LaunchOptions())


def test_where_a_run_lives_is_what_the_file_says(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "host_ip: {mini1: 10.0.0.1, pi5: 10.0.0.1, here: 10.0.0.1}\n"
        "num_workers: 2\nworkers: [pi5, here]\nserver: mini1\n"
        "nodes:\n"
        "  pi5: {ssh: pi@10.0.0.2, project_dir: ~/my/project, runs_dir: /mnt/runs/,"
        " dataset: {root: ~/pi-data}}\n"
        "  here: {ssh: local}\n"
    )
    train = tmp_path / "train.yaml"
    train.write_text("dataset: {name: MNIST, root: ~/data, download: false}\n")
    cluster = load_settings(file, train, environ={}).cluster
    request = Request(get_algorithm("edp"))
    places = machines_of(request, of(cluster), file, train, here=tmp_path / "runs", project=PROJECT)
    assert (places["mini1"].host.destination, places["mini1"].runs_dir) == (
        "mini1",
        "~/smolcluster/runs",
    )
    assert places["pi5"].host.destination == "pi@10.0.0.2"
    assert places["pi5"].runs_dir == "/mnt/runs"
    assert places["pi5"].project_dir == "~/my/project", "its own clone"
    assert places["mini1"].project_dir == PROJECT.folder("auto")
    assert places["pi5"].overrides == ("dataset.download=false",), "its own data folder stays"
    assert places["mini1"].overrides == ("dataset.root=~/data", "dataset.download=false")
    assert places["here"].is_here
    assert places["here"].runs_dir == str(tmp_path / "runs")


def test_what_a_flag_or_the_environment_says_of_a_machine_wins_over_both_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, train = Path(three(tmp_path)), tmp_path / "train.yaml"
    file.write_text(
        THREE.replace("mini1: 10.0.0.1", "mini1: 10.0.0.1, here: 10.0.0.1").replace(
            "nodes: {", "nodes: {mini2: {ssh: local, dataset: {root: /own}}, "
        )
    )
    train.write_text("dataset: {name: MNIST, root: ~/data, download: false}\n")
    monkeypatch.setenv("SMOLCLUSTER_NODES__PI5__SECRET_FILE", "~/s")
    monkeypatch.setenv("SMOLCLUSTER_DATASET__DOWNLOAD", "true")
    stated = ("nodes.pi5.runs_dir=~/long runs", 'nodes={"pi5": {"dataset": {"root": "~/more"}}}')
    request = Request(get_algorithm("edp"), config=str(file), overrides=stated)
    cluster = load_settings(file, train, overrides=stated).cluster
    found = machines_of(request, of(cluster), file, train, here=tmp_path, project=PROJECT)
    assert (found["pi5"].runs_dir, found["pi5"].secret_file) == ("~/long runs", "~/s")
    assert found["pi5"].overrides == ()
    assert found["mini1"].overrides == ("dataset.root=~/data",)
    assert found["mini2"].is_here
    assert found["mini2"].overrides == ()


def test_a_tokenizer_s_path_in_the_training_file_is_every_worker_s_but_who_has_another(
    tmp_path: Path,
) -> None:
    train = tmp_path / "train.yaml"
    train.write_text("data: {tokenizer: ~/gpt2}\ntraining: {}\n")
    assert places._data_settings(train) == {"tokenizer_path": "~/gpt2"}
    train.write_text("data: {tokenizer: openai-community/gpt2}\ntraining: {}\n")
    assert places._data_settings(train) == {}
    (tmp_path / "pair").mkdir()
    local = local_settings("dataset.name=text", f"dataset.tokenizer={tmp_path}/pair")
    assert f"dataset.tokenizer_path={tmp_path}/pair" in place_overrides(local)


def test_a_cluster_file_in_this_folder_is_meant_where_none_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cluster_source(None, "edp") == "edp"
    (tmp_path / "cluster_config_edp.yaml").touch()
    assert cluster_source(None, "edp") == "cluster_config_edp.yaml"
    assert cluster_source("mine.yaml", "edp") == "mine.yaml"
    assert cluster_source(None, "syncps") == "syncps"


def test_keys_of_a_machine_are_in_no_command_and_in_no_file_of_the_plan() -> None:
    launched = planned("num_epochs=5", "nodes.pi5.env.HF_TOKEN=hf_sentinel")
    assert "sentinel" not in launched.model_dump_json()
    assert "num_epochs=5" in overrides_of(launched.server.argv)


def test_a_machine_s_environment_does_not_travel_to_the_others(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "port: 6000\nnodes: {pi5: {env: {HF_TOKEN: sentinel}, threads: 2}, mini1: null}\n"
    )
    sent = cluster_bytes(file)
    assert b"sentinel" not in sent
    (tmp_path / "sent.yaml").write_bytes(sent)
    assert read_config(tmp_path / "sent.yaml", "cluster") == {
        "port": 6000,
        "nodes": {"pi5": {"threads": 2}, "mini1": {}},
    }
    file.write_text("port: 6000  # as it is\n")
    assert cluster_bytes(file) == file.read_bytes()


@pytest.mark.parametrize(
    ("seen", "told"),
    [
        ("ours/train.py:workload", "{run}/launch/workload/ours/train.py:workload"),
        ("./ours.train:workload", "{run}/launch/workload/ours.train:workload"),
        ("installed.train:workload", "installed.train:workload"),
    ],
)
def test_each_machine_is_told_the_workload_in_its_own_folder_of_the_run(
    seen: str, told: str
) -> None:
    launched = plan(
        Request(get_algorithm("edp"), overrides=("workload=/me/x.py:y",), workload=seen),
        of(CLUSTER),
        PLACES,
        RUN_ID,
    )
    for process in launched.processes:
        argv = process.argv
        assert argv[argv.index("--workload") + 1] == told.format(run=process.run_dir)
        assert "workload=/me/x.py:y" not in argv
        assert FunctionName.parse(workload_of(process) or "") == FunctionName.parse(seen)


def test_each_worker_is_told_the_script_in_its_own_folder_of_the_run() -> None:
    script = shlex.join(["train it.py", "--name", "two words"])
    request = Request(get_algorithm("edp"), overrides=("num_epochs=3",), script=script)
    launched = plan(request, of(CLUSTER), PLACES, RUN_ID)
    file = f"{launched.server.run_dir}/launch/cluster.yaml"
    serve = ["-P", "-m", "smolcluster.cli", "serve", file, "--algorithm", "edp"]
    assert list(launched.server.argv[1:10]) == [*serve, "--run-id", RUN_ID]
    assert "--train-config" not in launched.server.argv
    for worker in launched.workers:
        argv = worker.argv
        assert argv[1].endswith("api/script.py")
        assert argv[2:4] == (str((worker.rank or 0) + 1), worker.node)
        there = f"{worker.run_dir}/launch/workload/train it.py"
        assert shlex.split(argv[argv.index("--script") + 1]) == [there, "--name", "two words"]
        assert shlex.split(script_of(worker) or "") == shlex.split(script)


def test_a_store_runs_on_its_machine_in_its_own_session() -> None:
    cluster = CLUSTER.model_copy(update={"servers": ("mini1", "pi5")})
    [store] = planned("num_epochs=5", cluster=cluster).helpers
    assert (store.node, store.ssh, store.session) == ("pi5", "pi@192.168.50.2", "edp-1-store-pi5")
    assert store.argv[1:4] == ("src/smolcluster/algorithms/EDP/store.py", "pi5", "--run-id")
    assert 'runs_dir="/mnt/my disk/runs"' in store.argv
    assert "num_epochs=5" not in store.argv


def test_a_stage_runs_on_its_machine_in_its_own_session_and_knows_where_its_data_are() -> None:
    stages = StagesConfig(host_ip={"mini1": "127.0.0.1", "pi5": "192.168.50.2"})
    cluster = CLUSTER.model_copy(update={"nodes": {"pi5": NodeConfig(stages=stages)}})
    first, last = planned("num_epochs=5", cluster=cluster, algorithm="diloco").helpers
    assert (first.node, first.session) == ("mini1", "edp-1-stage-mini1")
    assert (last.node, last.ssh, last.session) == ("pi5", "pi@192.168.50.2", "edp-1-stage-pi5")
    assert last.argv[1:4] == ("src/smolcluster/algorithms/DiLoCo/stage.py", "pi5", "--run-id")
    assert "dataset.root=~/data" in last.argv
    assert "--restarts" in last.argv
    assert "num_epochs=5" not in last.argv


@pytest.mark.parametrize(
    ("algorithm", "node", "data", "environ", "keys"),
    [
        ("edp", "mini1", {}, {"WANDB_API_KEY": "k"}, ["WANDB_API_KEY"]),
        ("edp", "pi5", {}, {"WANDB_API_KEY": "k"}, ["WANDB_API_KEY"]),
        ("edp", "pi5", {}, {"WANDB_API_KEY": "k", "WANDB_MODE": "offline"}, []),
        ("edp", "store", {}, {"WANDB_API_KEY": "k"}, []),
        ("mesh", "pi5", {}, {"WANDB_API_KEY": "k"}, []),
        ("edp", "pi5", {"name": "huggingface"}, {"WANDB_MODE": "disabled"}, ["HF_TOKEN"]),
        ("edp", "store", {"name": "snli"}, {}, ["HF_TOKEN"]),
        ("edp", "store", {"name": "stdlib", "tokenizer": "gpt2"}, {}, ["HF_TOKEN"]),
        ("edp", "store", {"name": "stdlib", "tokenizer": "./mine"}, {}, []),
    ],
)
def test_only_who_needs_a_key_gets_it(
    algorithm: AlgorithmName,
    node: str,
    data: dict[str, str],
    environ: dict[str, str],
    keys: list[str],
) -> None:
    settings = local_settings()
    dataset = settings.train.dataset.model_copy(update=data)
    train = settings.train.model_copy(update={"dataset": dataset})
    settings = dataclasses.replace(settings, cluster=CLUSTER, train=train)
    request = Request(get_algorithm(algorithm))
    assert keys_of(node, request, settings, environ) == keys
    own_code = dataclasses.replace(request, workload="mine.py:make")
    assert "HF_TOKEN" in keys_of(node, own_code, settings, environ)
