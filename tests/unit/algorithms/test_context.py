"""What every algorithm's server is given, and where it listens."""

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from harness import free_port, local_settings
from peers import Echo, Parts, next_event, server_parts
from smolcluster.algorithms.context import codec_for
from smolcluster.configs.schema import ClusterConfig
from smolcluster.errors import ConfigError
from smolcluster.server.listening import listening_addresses
from smolcluster.wire.inbox import Call
from waiting import DEADLINE_S

ELSEWHERE = "203.0.113.7"  # of a block that is nobody's


def cluster(host_ip: dict[str, str], **changes: object) -> ClusterConfig:
    values: dict[str, object] = {
        "host_ip": host_ip,
        "num_workers": 1,
        "workers": [list(host_ip)[-1]],
        "server": next(iter(host_ip)),
    }
    return ClusterConfig.model_validate(values | changes)


def test_the_server_listens_on_every_stated_address_that_is_its_own() -> None:
    """A Pi on a subnet of its own reaches the server at another address than the rest."""
    host_ip = {"mini1": "127.0.0.1", "win": ELSEWHERE, "pi5": "127.0.0.2", "mini2": "127.0.0.1"}
    expected = ["127.0.0.1", "127.0.0.2"]
    try:
        socket.create_server(("127.0.0.2", 0)).close()
    except OSError:  # macOS has only the first
        expected = ["127.0.0.1"]
    assert listening_addresses(cluster(host_ip)) == expected


def test_bind_overrides_the_stated_addresses() -> None:
    config = cluster({"mini1": "127.0.0.1", "pi5": ELSEWHERE}, bind=["0.0.0.0"])  # noqa: S104
    assert listening_addresses(config) == ["0.0.0.0"]  # noqa: S104


def test_a_machine_without_any_of_the_addresses_is_told_what_to_do() -> None:
    with pytest.raises(ConfigError) as caught:
        listening_addresses(cluster({"mini1": ELSEWHERE, "pi5": "203.0.113.8"}))
    for part in (ELSEWHERE, "203.0.113.8", "host_ip", "bind", "--local"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "dtype", "codec"),
    [
        ((), torch.float32, "fp32"),
        ((), torch.float64, "fp64"),
        (("use_quantization=true",), torch.float32, "int8"),
        (("codec=bf16",), torch.float32, "bf16"),
        (("codec=fp16",), torch.float32, "fp16"),
        (("codec=int8", "use_quantization=true"), torch.float32, "int8"),
    ],
)
def test_gradients_travel_as_configured_and_lossless_by_default(
    overrides: tuple[str, ...], dtype: torch.dtype, codec: str
) -> None:
    run = local_settings(*overrides).run_config("run-1", "edp")
    assert codec_for(run, dtype) == codec


@pytest.mark.parametrize("codec", ["int8", "bf16"])
def test_a_codec_that_cannot_hold_the_parameters_is_refused(codec: str) -> None:
    run = local_settings(f"codec={codec}").run_config("run-1", "edp")
    with pytest.raises(ConfigError, match=rf"^codec {codec} works on float32.*float64"):
        codec_for(run, torch.float64)


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    with server_parts(local_settings(f"port={free_port()}"), tmp_path) as parts:
        yield parts


def test_an_open_hub_listens_and_a_closed_one_frees_the_port(parts: Parts) -> None:
    with parts.context.open_pool(Echo):
        socket.create_connection(("127.0.0.1", parts.port), timeout=DEADLINE_S).close()
    with socket.create_server(("127.0.0.1", parts.port)):
        pass
    assert any(
        "listening on 127.0.0.1" in line and str(parts.port) in line for line in parts.log_lines
    )


def test_the_weights_are_evaluated_as_often_as_the_training_file_says(tmp_path: Path) -> None:
    settings = local_settings("eval_steps=3", f"port={free_port()}")
    with server_parts(settings, tmp_path) as parts:
        report = parts.context.new_report()
        with parts.context.new_evaluator(report) as evaluator:
            for version in (1, 2, 3, 4):
                evaluator.after_step(version, 0)
            next_event(parts.context.inbox, Call).run()
        assert report.evaluated_version == 3
    assert parts.context.inbox.get(0.0) is None


def test_the_batch_of_all_workers_together_must_fit_where_they_share_one(tmp_path: Path) -> None:
    """One worker may have to take the whole of it."""
    settings = local_settings("batch_size=100", f"port={free_port()}", algorithm="syncps")
    assert settings.cluster.num_workers == 3
    with (
        server_parts(settings, tmp_path, bucket_bytes=1024, algorithm="syncps") as parts,
        pytest.raises(ConfigError, match="batch of 300 samples is too large, must be at most 256"),
    ):
        parts.context.open_pool(Echo)


def test_settings_that_no_message_holds_are_refused_before_anybody_knocks(tmp_path: Path) -> None:
    settings = local_settings(f"port={free_port()}")
    words = [f"word {number}" for number in range(8000)]
    train = settings.train.model_copy(update={"workload_args": {"vocabulary": words}})
    with (
        server_parts(replace(settings, train=train), tmp_path) as parts,
        pytest.raises(ConfigError, match="must be at most 64512: give workload_args less"),
    ):
        parts.context.open_pool(Echo)
