import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from smolcluster.configs import schema
from smolcluster.configs.checks import check_cluster
from smolcluster.configs.problems import SettingError, UnknownKey
from smolcluster.configs.schema import (
    OWN_FILES,
    AlgorithmName,
    ClusterConfig,
    DatasetConfig,
    DatasetPlace,
    NodeConfig,
    RunConfig,
    ScheduleKeys,
    TrainConfig,
    cluster_section,
    config_of,
)
from smolcluster.configs.spec import SINGLE, algorithms, get_algorithm
from smolcluster.errors import ConfigError
from smolcluster.training.schedules.instructions import SCHEDULES


def cluster(**changes: Any) -> ClusterConfig:
    values: dict[str, Any] = {
        "host_ip": {"mini1": "10.10.0.1", "pi5": "192.168.50.1", "win": "10.10.0.1"},
        "num_workers": 2,
        "workers": ["pi5", "win"],
        "server": "mini1",
    }
    return ClusterConfig.model_validate(values | changes)


def test_paths_may_start_in_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = NodeConfig.model_validate({"runs_dir": "~/runs", "dataset": {"root": "~/data"}})
    assert config.runs_dir == Path("/home/me/runs")
    assert config.dataset.root == Path("/home/me/data")


@pytest.mark.parametrize("path", ["~", "~/", "/", "~/my project", "/it's"])
def test_a_folder_of_another_machine(path: str) -> None:
    assert NodeConfig.model_validate({"project_dir": path}).project_dir == path


@pytest.mark.parametrize(
    "path", ["", "a", "~u/a", "/a\nb", "/a\\", "~/a\\b", "/a\\'; touch oops; '"]
)
def test_a_folder_that_some_shell_might_misread_is_refused(path: str) -> None:
    """To fish a backslash in single quotes is none before another one or a quote."""
    with pytest.raises(ValidationError):
        NodeConfig.model_validate({"project_dir": path})


def stages(port: int = 65433, **host_ip: str) -> dict[str, Any]:
    return {"stages": {"host_ip": host_ip, "port": port}}


NODE = "a node of host_ip (known: mini1, pi5, win)"


@pytest.mark.parametrize(
    ("changes", "key", "value", "says"),
    [
        ({"workers": [], "num_workers": 2}, "num_workers", 2, "but workers lists 0 (none)"),
        ({"server": "mini2"}, "server", "mini2", NODE),
        ({"servers": ["pi5"]}, "servers", ("pi5",), "must begin with server, 'mini1'"),
        ({"servers": ["mini1", "mac"]}, "servers", "mac", NODE),
        ({"servers": ["mini1", "pi5", "pi5"]}, "servers", ..., "must list each node once"),
        ({"servers": {"pi5": 1, "mini1": 2}}, "servers", ..., "must begin with server, 'mini1'"),
        ({"workers": ["pi5", "mac"]}, "workers", "mac", NODE),
        ({"nodes": {"wim": {}}}, "nodes", "wim", NODE),
        ({"min_workers": 3, "elastic": False}, "min_workers", 3, "must be at most num_workers, 2"),
        (
            {"nodes": {"mini1": stages(mini1="127.0.0.1")}},
            "nodes.mini1.stages",
            ...,
            "but mini1 is not one of workers (pi5, win)",
        ),
        (
            {"workers": ["mini1", "win"], "nodes": {"mini1": stages(65432, win="10.10.0.1")}},
            "nodes.mini1.stages.port",
            65432,
            "and port of the same machine as well",
        ),
        (
            {"nodes": {"pi5": stages(mini1="10.0.0.9"), "win": stages(win="10.0.0.9")}},
            "nodes.win.stages.port",
            65433,
            "and nodes.pi5.stages.port of the same machine",
        ),
    ],
)
def test_contradictions_are_refused(
    changes: dict[str, Any], key: str, value: object, says: str
) -> None:
    with pytest.raises(SettingError) as caught:
        check_cluster(cluster(**changes))
    error = caught.value
    assert error.key == key
    assert error.value == value or value is ...
    assert (error.allowed or error.problem).startswith(says)


@pytest.mark.parametrize("servers", [{"mini1": 1, "pi5": 0}, {"mini1": "x"}, "all", 5])
def test_what_names_no_servers_is_refused(servers: object) -> None:
    with pytest.raises(
        ValidationError, match="must be auto, a list of nodes, nodes with what each"
    ):
        cluster(servers=servers)


@pytest.mark.parametrize(
    ("servers", "nodes", "shares"),
    [
        (None, ("mini1",), None),
        ("auto", ("mini1",), None),
        (["mini1", "win"], ("mini1", "win"), None),
        ({"mini1": 2, "win": 0.5}, ("mini1", "win"), (2, 0.5)),
    ],
)
def test_servers_may_be_nodes_with_shares(
    servers: object, nodes: tuple[str, ...], shares: tuple[float, ...] | None
) -> None:
    config = cluster(servers=servers)
    check_cluster(config)
    assert (config.store_nodes, config.store_shares) == (nodes, shares)


def test_pipelines_on_machines_of_their_own_may_have_one_port() -> None:
    own = {"pi5": stages(pi5="127.0.0.1", mini1="10.0.0.8"), "win": stages(win="127.0.0.1")}
    config = cluster(nodes=own)
    check_cluster(config)
    assert config.stage_nodes == ("pi5", "mini1", "win")


def test_all_schedules_are_described() -> None:
    told = ScheduleKeys.model_fields["schedule"].description or ""
    assert set(SCHEDULES) <= set(re.findall(r"[\w-]+", told))


def test_an_elastic_cluster_may_wait_for_more_workers_than_it_lists() -> None:
    check_cluster(cluster(min_workers=3))


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "-x", "a b", 65 * "a", "a\n"])
def test_names_that_could_not_be_part_of_a_file_name_are_refused(name: str) -> None:
    with pytest.raises(ValidationError):
        cluster(server=name, host_ip={name: "10.10.0.1", "pi5": "10.10.0.1", "win": "10.10.0.1"})


@pytest.mark.parametrize(("global_batch_size", "samples"), [(None, 10), (96, 96)])
def test_a_step_takes_the_global_batch_and_without_one_a_batch(
    global_batch_size: int | None, samples: int
) -> None:
    dataset = DatasetConfig(name="digits")
    train = TrainConfig(batch_size=10, global_batch_size=global_batch_size, dataset=dataset)
    assert train.samples_per_step == samples


def run(dataset: DatasetConfig, algorithm: AlgorithmName = "edp") -> RunConfig:
    return RunConfig(
        run_id="edp-1",
        algorithm=algorithm,
        seed=42,
        worker_update_interval=10,
        codec="bf16",
        own={"staleness": {"exponent": 0.25, "bound": 4}},
        heartbeat_timeout_s=10,
        reconnect_timeout_s=60,
        train=TrainConfig(dataset=dataset),
    )


@pytest.mark.parametrize("algorithm", [*algorithms(), SINGLE])
def test_a_run_survives_the_journey_as_json(algorithm: AlgorithmName) -> None:
    sent = run(DatasetConfig(name="digits"), algorithm)
    assert RunConfig.model_validate_json(sent.model_dump_json()) == sent


def test_a_run_cannot_carry_a_path_of_one_machine() -> None:
    with pytest.raises(ValidationError, match=r"cannot travel"):
        run(DatasetConfig(name="MNIST", root=Path("/data")))


@pytest.mark.parametrize(
    "tokenizer", ["/there", "~/there", "./there", "a/../there", "a/b/c", "<files>"]
)
def test_a_tokenizer_s_path_stays_on_its_machine_and_each_worker_has_its_own(
    tokenizer: str,
) -> None:
    sent = run(DatasetConfig(name="text", tokenizer=tokenizer).anywhere).train.dataset
    assert sent.tokenizer == OWN_FILES
    assert sent.at(DatasetPlace(tokenizer_path=Path("/mine"))).tokenizer == "/mine"
    assert sent.at(DatasetPlace()).tokenizer == OWN_FILES


@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2", "openai-community/gpt2"])
def test_a_tokenizer_s_name_travels_and_is_the_same_everywhere(tokenizer: str) -> None:
    sent = run(DatasetConfig(name="text", tokenizer=tokenizer).anywhere).train.dataset
    assert sent.at(DatasetPlace(tokenizer_path=Path("/mine"))).tokenizer == tokenizer


def test_what_this_version_of_an_algorithm_does_not_know_is_refused_by_its_key() -> None:
    run_of_newer = run(DatasetConfig(name="digits")).model_copy(update={"own": {"newer": 1}})
    with pytest.raises(UnknownKey) as caught:
        run_of_newer.of(config_of(get_algorithm("edp")))
    assert (caught.value.source, caught.value.key) == ("edp", "newer")


def test_an_algorithm_may_not_take_a_key_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    edp = get_algorithm("edp")
    other = dataclasses.replace(edp, name="other")
    monkeypatch.setattr(schema, "algorithms", lambda: {"edp": edp, "other": other})
    with pytest.raises(ConfigError, match="other has the key update_rule"):
        cluster_section.__wrapped__()
