import json
from dataclasses import replace
from pathlib import Path

import pytest

from harness import local_settings
from smolcluster.algorithms.context import ServerContext
from smolcluster.algorithms.entry import (
    server_parser,
    stage_parser,
    store_parser,
    worker_parser,
)
from smolcluster.algorithms.process import serve, worker_settings
from smolcluster.configs.machines import localise
from smolcluster.configs.schema import AlgorithmName, ClusterConfig, NodeConfig, StagesConfig
from smolcluster.configs.spec import get_algorithm
from smolcluster.errors import ConfigError
from smolcluster.launch.host import Host
from smolcluster.launch.places import machines_here
from smolcluster.launch.plan import Machine, Request, plan
from smolcluster.runs.launched import Launched
from smolcluster.runs.summary import Summary

CLUSTER = ClusterConfig(
    host_ip={"mini1": "10.10.0.1", "macbook": "10.10.0.1", "pi5": "192.168.50.1"},
    port=6000,
    num_workers=2,
    workers=("pi5", "macbook"),
    server="mini1",
)

SETTINGS = local_settings()


def request(
    *overrides: str,
    config: str | None = None,
    train_config: str | None = None,
    num_workers: int | None = None,
    algorithm: AlgorithmName = "edp",
) -> Request:
    return Request(get_algorithm(algorithm), config, train_config, overrides, num_workers)


def local(asked: Request, cluster: ClusterConfig = CLUSTER) -> Launched:
    return here(asked, localise(cluster, asked.num_workers))


def here(asked: Request, cluster: ClusterConfig) -> Launched:
    place = Machine(Host("here"), "/runs", "/runs", python="/usr/bin/python", threads=1)
    places = dict.fromkeys(cluster.machines, place)
    settings = replace(SETTINGS, cluster=cluster)
    return plan(asked, settings, places, "edp-1", is_local=True, in_sessions=False)


def test_a_local_server_gets_everything_the_user_said() -> None:
    asked = request("num_epochs=5", "device=cpu", config="edp", train_config="nn", num_workers=2)
    server = local(asked).server
    assert (server.node, server.role, server.rank) == ("mini1", "server", None)
    assert server.argv == (
        *("/usr/bin/python", str(get_algorithm("edp").server), "--local", "--workers", "2"),
        *("--run-id", "edp-1", "--no-progress", "--config", "edp", "--train-config", "nn"),
        *("--override", "num_epochs=5", "--override", "device=cpu", "--override", "threads=1"),
    )


def test_a_local_process_starts_where_its_launch_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative path that the user says means the same to it, in tmux as well."""
    monkeypatch.chdir(tmp_path)
    machines = machines_here(request(config="edp"), SETTINGS, tmp_path / "runs")
    assert {each.project_dir for each in machines.values()} == {str(tmp_path)}


def test_a_local_worker_gets_its_place_and_only_what_belongs_to_a_machine() -> None:
    launched = local(request("num_epochs=5", "device=cpu", "dataset.root=/data", config="edp"))
    assert [(worker.node, worker.rank) for worker in launched.workers] == [
        ("worker1", 0),
        ("worker2", 1),
    ]
    assert launched.workers[1].argv == (
        *("/usr/bin/python", str(get_algorithm("edp").worker), "2", "worker2", "--local"),
        *("--server", "127.0.0.1:6000", "--run-id", "edp-1", "--restarts", "3", "--config", "edp"),
        *("--override", "start_timeout_s=86400", "--override", "device=cpu"),
        *("--override", "dataset.root=/data", "--override", "threads=1"),
    )


@pytest.fixture
def shared_out(tmp_path: Path) -> Path:
    """A cluster file in which each worker has a share of the batch."""
    path = tmp_path / "cluster.yaml"
    shares = {"pi5": 0.75, "macbook": 0.25}
    path.write_text(json.dumps(CLUSTER.model_dump(exclude_unset=True) | {"batch_share": shares}))
    return path


def test_a_worker_understands_the_command_that_it_is_given(shared_out: Path) -> None:
    shares = "batch_share={pi5: 0.5, worker2: 0.25, worker3: 0.25}"
    asked = request(
        "microbatch=8", shares, config=str(shared_out), num_workers=3, algorithm="syncps"
    )
    launched = local(asked)
    assert shares in launched.server.argv
    for worker in launched.workers:
        args = worker_parser(asked.algorithm).parse_args(worker.argv[2:])
        settings = worker_settings("syncps", args)
        assert settings.node.microbatch == 8
        assert settings.cluster.host_ip[worker.node] == "127.0.0.1"


def test_a_server_refuses_what_its_algorithm_cannot_follow() -> None:
    asked = request("global_batch_size=1", config="syncps", algorithm="syncps")
    args = server_parser(asked.algorithm).parse_args(local(asked).server.argv[2:])

    def serve_run(_: ServerContext) -> Summary:
        pytest.fail("the server has begun")

    with pytest.raises(ConfigError, match="global_batch_size is 1, must be at least num_workers"):
        serve("syncps", args, serve_run)


def test_an_ipv6_address_is_bracketed() -> None:
    cluster = localise(CLUSTER, 1).model_copy(
        update={"host_ip": {"mini1": "::1", "worker1": "::1"}}
    )
    launched = here(request(), cluster)
    assert "[::1]:6000" in launched.workers[0].argv


def test_each_further_server_gets_a_store_which_is_told_what_belongs_to_its_machine() -> None:
    cluster = CLUSTER.model_copy(update={"servers": ("mini1", "pi5")})
    launched = local(request("num_epochs=5", "device=cpu", config="edp"), cluster)
    assert [each.role for each in launched.processes] == ["server", "store", "worker", "worker"]
    [store] = launched.helpers
    assert (store.title, store.stem) == ("store worker1", "store-worker1")
    assert "num_epochs=5" not in store.argv
    args = store_parser(get_algorithm("edp")).parse_args(store.argv[2:])
    assert (args.node, args.server, args.run_id) == ("worker1", "127.0.0.1:6000", "edp-1")
    assert worker_settings("edp", args).cluster.host_ip["worker1"] == "127.0.0.1"
    assert store in launched.resumed().processes


def test_a_worker_that_is_a_pipeline_gets_its_stages_which_find_it_by_the_configuration() -> None:
    stages = StagesConfig(host_ip={"macbook": "10.10.0.2", "pi5": "192.168.50.2"})
    cluster = CLUSTER.model_copy(update={"nodes": {"pi5": NodeConfig(stages=stages)}})
    asked = request("num_epochs=5", "nodes.pi5.stages.microbatches=2", algorithm="diloco")
    launched = local(asked, cluster)
    titles = [each.title for each in launched.processes]
    assert titles[1:3] == ["stage worker2", "stage worker1"]
    assert [each.node for each in launched.workers] == ["worker1", "worker2"]
    stage = launched.helpers[0]
    args = stage_parser(asked.algorithm).parse_args(stage.argv[2:])
    assert (args.node, args.server, args.run_id) == ("worker2", None, "edp-1")
    assert "num_epochs=5" not in stage.argv
    assert "nodes.pi5.stages.microbatches=2" in stage.argv
    assert localise(cluster, None).stages_with("pi5") == stages.model_copy(
        update={"host_ip": dict.fromkeys(("worker2", "worker1"), "127.0.0.1")}
    )
