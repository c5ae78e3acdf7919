"""`/metrics`: what a scrape finds, and what happens where it cannot be served."""

import math
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from unittest.mock import Mock

import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from exporting import METER, NOW, a_status, a_worker
from harness import free_port
from smolcluster.configs.resolve import load_settings
from smolcluster.observability import exporter
from smolcluster.observability.exporter import (
    MAX_CLIENTS,
    MAX_FURTHER_PORTS,
    RunCollector,
    free_ports,
    metrics_address,
    serve_metrics,
)
from smolcluster.runs.launched import Process
from smolcluster.runs.status import RunStatus
from smolcluster.utils.meter import PHASES, Meter
from waiting import DEADLINE_S, eventually

SERVER = Process(node="mini1", role="server")
Series = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


def collector(
    status: RunStatus | None = None,
    meter: Meter = METER,
    runs: Path = Path("/"),
    who: Process = SERVER,
) -> RunCollector:
    return RunCollector(who, meter, runs, status=lambda: status, now=lambda: NOW)


def scraped(source: RunCollector) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """All series by name and labels, as Prometheus reads them."""
    registry = CollectorRegistry()
    registry.register(source)
    text = generate_latest(registry).decode()
    return {
        (sample.name.removeprefix("smolcluster_"), frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(series: Series, name: str, **labels: str) -> float:
    return series[name, frozenset(labels.items())]


def test_the_server_tells_how_the_run_stands() -> None:
    series = scraped(collector(a_status(step=120)))
    assert value(series, "run_info", run="r1", algorithm="edp") == 1
    expected = {
        "step": 120,
        "samples_applied": 960,
        "samples_target": 3200,
        "loss": 0.25,
        "validation_accuracy": 0.9,
        "learning_rate": 0.001,
        "staleness_bound_steps": 8,
    }
    assert {name: value(series, name) for name in expected} == expected


def test_the_server_tells_of_each_worker() -> None:
    series = scraped(collector(a_status()))
    assert value(series, "worker_up", rank="1", node="win") == 0
    expected = {
        "worker_up": 1,
        "worker_silent_seconds": 0.5,
        "link_round_trip_seconds": 0.004,
        "codec_ratio": 3.9,
    }
    assert {name: value(series, name, rank="0", node="pi5") for name in expected} == expected
    for direction, nbytes in (("sent", 1000), ("received", 2000)):
        told = value(series, "link_bytes_total", rank="0", node="pi5", direction=direction)
        assert told == nbytes


def in_a_row(*statuses: RunStatus) -> list[Series]:
    """What one process tells, status by status."""
    told = iter(statuses)
    source = RunCollector(SERVER, METER, Path("/"), status=lambda: next(told))
    return [scraped(source) for _ in statuses]


def test_what_a_resumed_run_has_counted_before_is_not_counted_again() -> None:
    """Else Prometheus would take a checkpoint's 6000 samples for work of the last second."""

    def status(samples: int, stale: int, returned: int, *ranks: int) -> RunStatus:
        workers = [a_worker(rank, "pi5", samples=samples) for rank in ranks]
        pushes = {"applied": 117, "stale": stale}
        return a_status(workers=workers, pushes=pushes, leases_returned=returned)

    told = in_a_row(status(6000, 3, 2, 0), status(6100, 5, 3, 0, 1), status(6150, 5, 3, 0, 1))
    pushes = [value(series, "pushes_total", reason="stale") for series in told]
    returned = [value(series, "leases_returned_total") for series in told]
    samples = [value(series, "worker_samples_total", rank="0", node="pi5") for series in told]
    assert (pushes, returned, samples) == ([0, 2, 2], [0, 1, 1], [0, 100, 150])
    late = [value(each, "worker_samples_total", rank="1", node="pi5") for each in told[1:]]
    assert late == [0, 50], "who comes back later has its samples of before, too"


def test_staleness_is_a_histogram() -> None:
    """Of τ = 0, 1, 2, 3-4, 5-8, 9-16, 17-32, more: cumulated, with a sum that gives the mean."""
    before = a_worker(0, "pi5", staleness=[1, 1, 0, 0, 0, 0, 0, 0], mean_staleness=0.5)
    worker = a_worker(0, "pi5", staleness=[6, 4, 1, 1, 0, 0, 0, 2], mean_staleness=19 / 14)
    _, series = in_a_row(a_status(workers=[before]), a_status(workers=[worker]))
    counts = {
        bound: value(series, "staleness_steps_bucket", rank="0", node="pi5", le=bound)
        for bound in ("0", "1", "2", "4", "8", "16", "32", "+Inf")
    }
    assert list(counts.values()) == [5, 8, 9, 10, 10, 10, 10, 12]
    assert value(series, "staleness_steps_sum", rank="0", node="pi5") == 18
    assert value(series, "staleness_steps_count", rank="0", node="pi5") == 12


def test_the_sum_of_the_staleness_never_falls() -> None:
    """Its mean times the number of pushes is 60.99999999999999 here, and 61 a push sooner."""
    statuses = [
        a_status(workers=[a_worker(0, "pi5", staleness=[n, 0, 0, 0, 0, 0, 0, 0], mean_staleness=m)])
        for n, m in ((1, 0.0), (6, 61 / 6), (7, 61 / 7))
    ]
    told = in_a_row(*statuses)
    sums = [value(series, "staleness_steps_sum", rank="0", node="pi5") for series in told]
    assert sums == [0, 61, 61]


def test_every_process_tells_of_itself(tmp_path: Path) -> None:
    who = Process(node="pi5", role="worker", rank=0)
    series = scraped(collector(who=who, runs=tmp_path))
    labels = {"role": "worker", "rank": "0", "node": "pi5"}
    assert value(series, "process_steps_total", **labels) == 100
    assert value(series, "phase_seconds_total", phase="forward", **labels) == 1.5
    assert value(series, "process_cpu_seconds_total", **labels) > 0
    assert value(series, "process_resident_memory_bytes", **labels) > 1e6
    assert {name: number for (name, _), number in series.items() if name.startswith("gpu_")} == {
        "gpu_utilization_ratio": 0.875,
        "gpu_memory_used_bytes": 12.5e9,
        "gpu_memory_size_bytes": 80e9,
        "gpu_temperature_celsius": 61.0,
        "gpu_power_watts": 240.5,
    }
    assert value(series, "gpu_power_watts", **labels) == 240.5
    free = value(series, "disk_free_bytes", **labels)
    assert 0 < free <= value(series, "disk_size_bytes", **labels)
    assert not any(name == "step" for name, _ in series), "the server tells this"


def test_what_was_not_measured_yet_is_absent_and_a_loss_is_no_number() -> None:
    status = a_status(loss=None, val_loss=None, val_accuracy=None, learning_rate=None)
    worker = a_worker(0, "pi5", process_stats={}, staleness=[])
    series = scraped(collector(status.model_copy(update={"workers": [worker]})))
    assert math.isnan(value(series, "loss"))
    absent = {"validation_loss", "validation_accuracy", "learning_rate", "codec_ratio"}
    assert absent.isdisjoint(name for name, _ in series)
    assert not any(name.startswith("staleness_steps") for name, _ in series)


def test_infinite_and_odd_values_and_names_do_no_harm() -> None:
    worker = a_worker(0, 'a"\\\nb').model_copy(update={"process_stats": {"rtt_s": math.inf}})
    meter = Meter(seconds=[math.inf] * len(PHASES))
    series = scraped(collector(a_status(workers=[worker]), meter))
    assert math.isnan(value(series, "link_round_trip_seconds", rank="0", node='a"\\\nb'))
    assert math.isnan(
        value(series, "phase_seconds_total", role="server", rank="", node="mini1", phase="wait")
    )


def test_every_series_says_of_which_run_it_is_once_that_is_known() -> None:
    named = ""
    source = RunCollector(
        SERVER, METER, Path("/"), run_id=lambda: named, status=a_status, now=lambda: NOW
    )
    assert all("run" not in dict(labels) for name, labels in scraped(source) if name != "run_info")
    named = "edp-1"
    assert {dict(labels)["run"] for _, labels in scraped(source)} == {"edp-1"}


def test_a_folder_that_is_gone_leaves_the_rest(tmp_path: Path) -> None:
    names = {name for name, _ in scraped(collector(runs=tmp_path / "gone"))}
    assert "process_steps_total" in names
    assert "disk_free_bytes" not in names


def test_the_last_step_is_when_the_step_was_first_seen_to_move() -> None:
    later = {"updated_at": NOW + timedelta(seconds=60)}
    told = in_a_row(a_status(step=7), a_status(step=7, **later), a_status(step=8, **later))
    seen = [value(series, "last_step_timestamp_seconds") for series in told]
    assert seen == [NOW.timestamp(), NOW.timestamp(), NOW.timestamp() + 60]


def get(port: int, host: str = "127.0.0.1") -> str:
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=DEADLINE_S) as reply:
        return str(reply.read().decode())


def test_it_is_served_on_that_address_and_the_port_is_free_again() -> None:
    port, warnings = free_port(), list[str]()
    for _ in range(2):
        with serve_metrics(collector(a_status()), "127.0.0.1", port, warn=warnings.append):
            assert "smolcluster_step" in get(port)
            with socket.socket() as other, pytest.raises(OSError, match="refused"):
                other.connect(("127.0.0.2", port))
        with pytest.raises(urllib.error.URLError):
            get(port)
    assert warnings == []


def test_a_busy_port_makes_it_take_the_next_free_one() -> None:
    served = []
    with ExitStack() as runs:
        other = runs.enter_context(socket.create_server(("127.0.0.1", 0)))
        first = other.getsockname()[1]
        for step in (5, 9):
            serving = serve_metrics(
                collector(a_status(step=step)), "127.0.0.1", first, warn=pytest.fail
            )
            port = runs.enter_context(serving)
            assert port is not None
            assert f"smolcluster_step {step}.0" in get(port)
            served.append(port)
        assert len({first, *served}) == 3
        assert all(first < port <= first + MAX_FURTHER_PORTS for port in served)


def test_no_free_port_is_one_sentence_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "MAX_FURTHER_PORTS", 0)
    warnings: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        with serve_metrics(collector(), "127.0.0.1", port, warn=warnings.append) as served:
            assert served is None
    [sentence] = warnings
    assert f"127.0.0.1:{port}" in sentence
    assert "metrics_port" in sentence


def test_ports_in_a_row_are_found_behind_those_that_are_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        assert free_ports("127.0.0.1", port, 1) != port
    assert free_ports("192.0.2.1", port, 1) is None
    assert free_ports("127.0.0.1", 65535, 2) is None
    monkeypatch.setattr(exporter, "is_free", lambda _, port: port != 9465)
    assert free_ports("127.0.0.1", 9464, 3) == 9467
    assert free_ports("127.0.0.1", 9464, 1) == 9464


@pytest.mark.parametrize("address", ["192.0.2.1", "no-such-host.invalid", "2001:db8::1"])
def test_an_address_that_is_not_ours_is_one_sentence(address: str) -> None:
    warnings: list[str] = []
    with serve_metrics(collector(), address, free_port(), warn=warnings.append):
        pass
    assert len(warnings) == 1


def test_strangers_cannot_take_all_connections_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exporter, "REQUEST_TIMEOUT_S", DEADLINE_S)
    port = free_port()
    with serve_metrics(collector(), "127.0.0.1", port, warn=pytest.fail), ExitStack() as idle:
        for _ in range(MAX_CLIENTS):
            idle.enter_context(socket.create_connection(("127.0.0.1", port), DEADLINE_S))
        turned_away = idle.enter_context(socket.create_connection(("127.0.0.1", port), DEADLINE_S))
        assert turned_away.recv(1) == b""
        idle.close()
        url = f"http://127.0.0.1:{port}/metrics"

        def is_answered() -> bool:
            with suppress(OSError), urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
                return b"smolcluster_" in answer.read()
            return False

        eventually(is_answered)


@pytest.mark.parametrize(
    ("host", "code"),
    [
        ("evil.example.org:9464", 403),
        ("127.0.0.1.evil.org", 403),
        ("", 403),
        ("127.0.0.1:9464", 200),
        ("localhost", 200),
        ("[::1]:9464", 200),
        ("10.0.0.7:9464", 200),
        ("host.docker.internal:9464", 200),
        ("mini2:9464", 200),
        ("MINI2.lan:9464", 200),
        ("mini2.lab.example.org:9464", 200),
        ("mini2.evil.example.org:9464", 403),
        ("mini2.local.evil.org", 403),
    ],
)
def test_a_page_whose_name_was_made_to_mean_this_machine_reads_nothing(
    host: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "mini2.lab.example.org")
    port = free_port()
    with serve_metrics(collector(a_status()), "127.0.0.1", port, warn=pytest.fail):
        url = f"http://127.0.0.1:{port}/metrics"
        answer = httpx.get(url, headers={"Host": host}, timeout=DEADLINE_S, trust_env=False)
    assert answer.status_code == code
    assert ("smolcluster_step" in answer.text) is (code == 200)


def test_who_says_a_byte_now_and_then_is_cut_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "REQUEST_TIMEOUT_S", 0.5)
    port, end = free_port(), time.monotonic() + DEADLINE_S
    with (
        serve_metrics(collector(a_status()), "127.0.0.1", port, warn=pytest.fail),
        socket.create_connection(("127.0.0.1", port), 0.05) as client,
    ):
        client.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
        with pytest.raises(ConnectionError):
            while time.monotonic() < end:
                client.sendall(b"x")
                with suppress(TimeoutError):
                    if client.recv(1) == b"":
                        raise ConnectionResetError


def test_a_machine_without_threads_turns_nobody_away_for_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port, no_thread = free_port(), Mock(side_effect=RuntimeError("can't start new thread"))
    with serve_metrics(collector(a_status()), "127.0.0.1", port, warn=pytest.fail):
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", no_thread)
            for _ in range(MAX_CLIENTS):
                with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as client:
                    assert client.recv(1) == b""
        assert "smolcluster_step" in get(port)


def test_who_hangs_up_or_says_nonsense_disturbs_nobody(capfd: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    with serve_metrics(collector(a_status()), "127.0.0.1", port, warn=pytest.fail):
        for words in (b"", b"GET", b"\x00\xff\r\n\r\n", b"POST / HTTP/1.1\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as client:
                client.sendall(words)
        assert "smolcluster_step" in get(port)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("overrides", "worker_id", "expected"),
    [
        ([], None, ("127.0.0.1", 9464)),
        ([], 2, ("127.0.0.1", 9466)),
        (["metrics_bind=10.0.0.1"], 1, ("10.0.0.1", 9465)),
        (["metrics_port=null"], None, None),
        (["metrics_port=65535"], None, ("127.0.0.1", 65535)),
        (["metrics_port=65535"], 1, None),
    ],
)
@pytest.mark.parametrize("local", [True, False])
def test_other_machines_reach_metrics_only_where_they_are_asked_to(
    overrides: list[str], worker_id: int | None, expected: tuple[str, int] | None, local: bool
) -> None:
    cluster = load_settings("edp", "digits", None, overrides, environ={}, local=local).cluster
    assert metrics_address(cluster, worker_id) == expected
