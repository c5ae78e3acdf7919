import shlex

import pytest

from smolcluster.algorithms.registry import get_algorithm
from smolcluster.configs.resolve import localise
from smolcluster.configs.schema import ClusterConfig
from smolcluster.launch.plan import LaunchPlan, Request, plan_by_hand, plan_local

CLUSTER = ClusterConfig(
    host_ip={"mini1": "10.10.0.1", "macbook": "10.10.0.1", "pi5": "192.168.50.1"},
    port=6000,
    num_workers=2,
    workers=("pi5", "macbook"),
    server="mini1",
)


def request(
    *overrides: str,
    config: str | None = None,
    train_config: str | None = None,
    num_workers: int | None = None,
) -> Request:
    return Request(get_algorithm("edp"), config, train_config, overrides, num_workers)


def local(asked: Request, cluster: ClusterConfig = CLUSTER, **facts: list[str]) -> LaunchPlan:
    cluster = localise(cluster, asked.num_workers)
    return plan_local(asked, cluster, run_id="edp-1", python="/usr/bin/python", **facts)


def test_a_local_server_gets_everything_the_user_said() -> None:
    asked = request("num_epochs=5", "device=cpu", config="edp", train_config="nn", num_workers=2)
    server = local(asked).server
    assert (server.node, server.role, server.rank, server.folder) == ("mini1", "server", None, None)
    assert server.argv == (
        *("/usr/bin/python", str(get_algorithm("edp").server), "--local", "--workers", "2"),
        *("--run-id", "edp-1", "--no-progress", "--config", "edp", "--train-config", "nn"),
        *("--override", "num_epochs=5", "--override", "device=cpu", "--override", "threads=1"),
    )


def test_a_local_worker_gets_its_place_and_only_what_belongs_to_a_machine() -> None:
    plan = local(request("num_epochs=5", "device=cpu", "dataset.root=/data", config="edp"))
    assert [(worker.node, worker.rank) for worker in plan.workers] == [("pi5", 0), ("macbook", 1)]
    assert plan.workers[1].argv == (
        *("/usr/bin/python", str(get_algorithm("edp").worker), "2", "macbook", "--local"),
        *("--server", "127.0.0.1:6000", "--config", "edp"),
        *(
            "--override",
            "device=cpu",
            "--override",
            "dataset.root=/data",
            "--override",
            "threads=1",
        ),
    )


def test_the_files_that_a_command_names_exist() -> None:
    plan = local(request())
    assert all(get_algorithm("edp").folder.joinpath(name).is_file() for name in ("server.py",))
    assert {process.argv[1] for process in plan.workers} == {str(get_algorithm("edp").worker)}


def test_threads_that_the_user_has_set_stay() -> None:
    plan = local(request(), with_threads=["mini1", "macbook"])
    assert ["threads=1" in process.argv for process in plan.processes] == [False, True, False]


@pytest.mark.parametrize(("count", "nodes"), [(1, ["pi5"]), (3, ["pi5", "macbook", "local3"])])
def test_the_number_of_workers_is_what_the_user_wants(count: int, nodes: list[str]) -> None:
    plan = local(request(num_workers=count))
    assert [worker.node for worker in plan.workers] == nodes
    for process in plan.processes:
        assert process.argv[process.argv.index("--workers") + 1] == str(count)


def test_an_ipv6_address_is_bracketed() -> None:
    cluster = localise(CLUSTER, 1).model_copy(update={"host_ip": {"mini1": "::1", "pi5": "::1"}})
    plan = plan_local(request(), cluster, run_id="edp-1", python="python")
    assert "[::1]:6000" in plan.workers[0].argv


def test_by_hand_each_machine_gets_the_command_that_a_person_types() -> None:
    plan = plan_by_hand(request("num_epochs=5", "threads=4", config="/my files/c.yaml"), CLUSTER)
    assert plan.lines() == [
        "server mini1:",
        "  cd src/smolcluster/algorithms/EDP && uv run server.py --config '/my files/c.yaml' "
        "--override num_epochs=5 --override threads=4",
        "worker 1 pi5:",
        "  cd src/smolcluster/algorithms/EDP && uv run worker.py 1 pi5 --config '/my files/c.yaml' "
        "--override threads=4",
        "worker 2 macbook:",
        "  cd src/smolcluster/algorithms/EDP && uv run worker.py 2 macbook "
        "--config '/my files/c.yaml' --override threads=4",
    ]


def test_a_printed_command_can_be_pasted_into_a_shell() -> None:
    server = local(request("dataset.root=/my data/$HOME", "bind=[127.0.0.1, '::1']")).server
    assert tuple(shlex.split(server.command)) == server.argv
