"""From a configuration to the commands that are the ranks of a group."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from smolcluster.algorithms.Mesh.config import MeshConfig
from smolcluster.cli import main
from smolcluster.configs.checks import check_algorithm
from smolcluster.configs.resolve import load_settings
from smolcluster.configs.schema import MeshSizes, Settings
from smolcluster.configs.spec import get_algorithm
from smolcluster.distributed_training import configuration, parser
from smolcluster.errors import ConfigError
from smolcluster.launch.flow import LaunchOptions, launch
from smolcluster.launch.host import Host
from smolcluster.launch.plan import PROGRAM, Machine, Machines, Request, plan
from smolcluster.launch.prepare import check_systems
from smolcluster.launch.requests import resolved

MESH = get_algorithm("mesh")
PLACES: Machines = {
    "node1": Machine(Host("node1", "node1"), "~/smolcluster", "~/smolcluster/runs"),
    "node2": Machine(Host("node2", "me@node2"), "/opt/s", "/mnt/runs"),
}


def settings(*overrides: str) -> Settings:
    return load_settings("mesh", "stdlib", None, ("encryption=off", *overrides), environ={})


def remote(request: Request | None = None, **update: Any) -> Any:
    told = settings()
    cluster = told.cluster.model_copy(update=update)
    return plan(request or Request(MESH), replace(told, cluster=cluster), PLACES, "mesh-1")


def test_the_folder_in_which_the_ranks_start_brings_no_code(tmp_path: Path) -> None:
    for module in ("argparse", "typing", "smolcluster"):
        (tmp_path / f"{module}.py").write_text(f"raise SystemExit('{module} of this folder ran')")
    words = [sys.executable, "-P", *PROGRAM, "--help"]
    done = subprocess.run(
        words, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_one_command_a_machine_starts_its_share_of_the_ranks() -> None:
    launched = remote()
    first, second = (parser().parse_args(each.argv[4:]) for each in launched.processes)
    assert (first.world_size, first.rank, first.nproc_per_node, first.machine) == (8, 0, 4, "node1")
    assert (second.world_size, second.rank, second.nproc_per_node, second.machine) == (
        8,
        4,
        4,
        "node2",
    )
    assert (second.master_addr, second.master_port) == ("10.10.0.1", 29500)
    assert second.cluster == "/mnt/runs/mesh-1/launch/cluster.yaml"
    assert [each.ssh for each in launched.processes] == ["node1", "me@node2"]
    assert launched.is_group
    assert launched.resumed().server.argv[-2:] == ("--resume", "auto")


def test_machines_between_which_nothing_is_encrypted_are_refused_unless_that_is_said() -> None:
    told = settings("encryption=auto")
    with pytest.raises(ConfigError, match=r"nothing of a mesh is encrypted .* encryption=off"):
        plan(Request(MESH), told, PLACES, "mesh-1")
    one = {name: replace(each, host=Host("node1", "node1")) for name, each in PLACES.items()}
    assert plan(Request(MESH), told, one, "mesh-1").is_group


@pytest.mark.parametrize("on", ["slurm", "kubernetes"])
@pytest.mark.parametrize("dry_run", [True, False])
def test_nodes_of_a_scheduler_are_refused_alike(
    on: Literal["slurm", "kubernetes"], *, dry_run: bool
) -> None:
    request = Request(MESH, train_config="stdlib", overrides=(f"{on}.nodes=2", "mesh.pp=2"))
    with pytest.raises(ConfigError, match=r"nothing of a mesh is encrypted"):
        launch(resolved(request, local=False), LaunchOptions(on=on, dry_run=dry_run))


def test_the_command_on_this_machine_takes_the_mesh_from_the_file(tmp_path: Path) -> None:
    request = Request(MESH, train_config="stdlib", overrides=("mesh.tp=1", "mesh.dp=2"))
    told = settings(*request.overrides)
    place = Machine(Host("here"), str(tmp_path), str(tmp_path), python="python3")
    places = {told.cluster.server: place}
    launched = plan(request, told, places, "mesh-1", is_local=True)
    args = parser().parse_args(launched.server.argv[4:])
    own = configuration(args, None)
    assert args.machine == launched.server.node == own.cluster.server
    config = own.of(MeshConfig)
    assert (config.mesh, config.microbatches) == (MeshSizes(dp=2, pp=4), 8)
    assert own.train.dataset.name == "stdlib"


def test_flags_win_over_the_cluster_file() -> None:
    args = parser().parse_args(["--cluster", "mesh", "--tp", "4", "--no-nccl", "--batch-size", "4"])
    told = configuration(args, None)
    config = told.of(MeshConfig)
    assert (config.mesh.tp, config.mesh.pp, config.backend) == (4, 4, "gloo")
    assert told.train.samples_per_step == 4


def test_nccl_is_refused_where_the_cluster_file_says_that_there_is_no_cuda() -> None:
    told = settings("backend=nccl", "nodes.node2.device=cpu")
    with pytest.raises(ConfigError, match="backend is nccl, which needs CUDA"):
        plan(Request(MESH), told, PLACES, "mesh-1")


def test_a_launch_without_cuda_refuses_nccl_before_it_is_started(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    words = ("launch", "mesh", "--local", "--dry-run", "--override")
    assert main([*words, "backend=nccl"]) == 2
    assert "backend is nccl, which needs CUDA" in capsys.readouterr().err
    assert main([*words, "backend=mpi"]) == 2
    assert "no wheel of PyTorch has: build PyTorch from source" in capsys.readouterr().err


def test_how_long_a_mesh_may_hang_is_a_key_and_a_flag() -> None:
    for words in (("--hang-timeout", "7"), ("--override", "hang_timeout_s=7")):
        for cluster in ((), ("--cluster", "mesh")):
            told = configuration(parser().parse_args([*cluster, *words]), None)
            assert told.of(MeshConfig).hang_timeout_s == 7


@pytest.mark.parametrize(
    ("update", "told"),
    [
        ({"server": "node2"}, "server is node2, which has rank 0, but workers begins with node1"),
        ({"workers": ("node1",) * 3}, "8 ranks, which the 3 machines"),
        ({"host_ip": {"node1": "127.0.0.1", "node2": "10.0.0.1"}}, "host_ip.node1 is 127.0.0.1"),
        ({"host_ip": {"node1": "10.0.0.1", "node2": "localhost"}}, "host_ip.node2 is localhost"),
    ],
)
def test_ranks_that_cannot_be_laid_out(update: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        remote(**update)


@pytest.mark.parametrize(
    ("request_", "told"),
    [(Request(MESH, num_workers=3), "--workers is 3"), (Request(MESH, script="a.py"), "--script")],
)
def test_what_a_group_has_not(request_: Request, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        remote(request_)


def test_machines_of_two_systems_are_refused() -> None:
    check_systems({"a": "Linux", "b": "Linux"})
    with pytest.raises(ConfigError, match="a runs Linux and b Darwin"):
        check_systems({"a": "Linux", "b": "Darwin"})


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("schedule=zbw", "schedule is 'zbw'"),
        ("mesh.tp=8", "4 heads"),
        ("mesh.pp=8", "microbatches"),
        ("mesh.dp=3", "change batch_size"),
        ("mesh.dp=0", "mesh.dp is 0, must be"),
        ("mesh.sp=8", "mesh.sp is not a setting"),
        ("optimizer=lion", "optimizer"),
        ("ema_decay=0.9", "ema_decay is 0.9"),
        ("schedule=zbv", "the model has 4 layers"),
    ],
)
def test_what_a_mesh_cannot_follow_is_said_before_anything_starts(override: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check_algorithm(settings("microbatches=4", override), "mesh")
