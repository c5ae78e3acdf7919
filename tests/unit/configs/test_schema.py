from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from smolcluster.configs.schema import (
    ClusterConfig,
    DatasetConfig,
    NodeConfig,
    RunConfig,
    TrainConfig,
)


def cluster(**changes: Any) -> ClusterConfig:
    values: dict[str, Any] = {
        "host_ip": {"mini1": "10.10.0.1", "pi5": "192.168.50.1", "win": "10.10.0.1"},
        "num_workers": 2,
        "workers": ["pi5", "win"],
        "server": "mini1",
    }
    return ClusterConfig.model_validate(values | changes)


def test_yaml_lists_whole_numbers_and_text_become_what_the_fields_hold() -> None:
    config = cluster(timeout=2, bind=["10.10.0.1"], nodes={"pi5": {"secret_file": "/etc/secret"}})
    assert config.workers == ("pi5", "win")
    assert config.bind == ("10.10.0.1",)
    assert isinstance(config.timeout, float)
    assert config.nodes["pi5"].secret_file == Path("/etc/secret")


def test_paths_may_start_in_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = NodeConfig.model_validate({"runs_dir": "~/runs", "dataset": {"root": "~/data"}})
    assert config.runs_dir == Path("/home/me/runs")
    assert config.dataset.root == Path("/home/me/data")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_workers": 3}, r"num_workers is 3, but workers lists 2 \(pi5, win\); the two must"),
        ({"workers": [], "num_workers": 2}, r"num_workers is 2, but workers lists 0 \(none\)"),
        ({"workers": ["pi5", "pi5"]}, "workers lists 'pi5' twice, must list each node once"),
        ({"server": "mini2"}, r"server is 'mini2', must .* \(known: .*\); did you mean mini1\?"),
        ({"workers": ["pi5", "mac"]}, r"workers lists 'mac', must be a node of host_ip \(known: m"),
        ({"nodes": {"wim": {}}}, r"nodes has the key 'wim', must .*; did you mean win\?"),
        ({"min_workers": 3, "elastic": False}, "min_workers is 3, must be at most num_workers, 2"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        cluster(**changes)


def test_an_elastic_cluster_may_wait_for_more_workers_than_it_lists() -> None:
    assert cluster(min_workers=3).min_workers == 3


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "-x", "a b", 65 * "a", "a\n"])
def test_names_that_could_not_be_part_of_a_file_name_are_refused(name: str) -> None:
    with pytest.raises(ValidationError):
        cluster(server=name, host_ip={name: "10.10.0.1", "pi5": "10.10.0.1", "win": "10.10.0.1"})


def run(dataset: DatasetConfig) -> RunConfig:
    return RunConfig(
        run_id="edp-1",
        algorithm="edp",
        seed=42,
        worker_update_interval=10,
        use_quantization=False,
        staleness=cluster().staleness,
        heartbeat_timeout_s=10,
        reconnect_timeout_s=60,
        train=TrainConfig(dataset=dataset),
    )


def test_a_run_survives_the_journey_as_json() -> None:
    sent = run(DatasetConfig(name="digits"))
    assert RunConfig.model_validate_json(sent.model_dump_json()) == sent


def test_a_run_cannot_carry_a_path_of_one_machine() -> None:
    with pytest.raises(ValidationError, match=r"dataset\.root belongs to a machine"):
        run(DatasetConfig(name="MNIST", root=Path("/data")))
