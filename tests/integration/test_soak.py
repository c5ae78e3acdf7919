"""The soak: what its monkey plans and what it calls flat, and a short one with real processes."""

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

from proxy import Proxy
from smolcluster.observability.metrics import MetricRecord
from smolcluster.observability.sinks.jsonl import MetricLine
from smolcluster.runs.summary import Final, Pushes, Summary, Traffic, WorkerShare

if TYPE_CHECKING:
    from soak import Sample

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _benchmarks_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def life(rss: Callable[[int], float], seconds: int = 300) -> "list[Sample]":
    """A process that is sampled every second; its memory as a function of its age."""
    from soak import Sample

    return [Sample(float(age), int(rss(age)), int(rss(age)), 7, 20) for age in range(seconds)]


def test_the_plan_is_the_same_for_the_same_seed_only() -> None:
    from soak import plan

    assert plan(1, 600, 12, 4) == plan(1, 600, 12, 4)
    assert plan(1, 600, 12, 4) != plan(2, 600, 12, 4)


def test_the_plan_has_all_kinds_in_order_and_within_the_time() -> None:
    from soak import WEIGHTS, plan

    faults = plan(1, 1200, 12, 4)
    assert len(faults) == 240
    assert {fault.kind for fault in faults} == set(WEIGHTS)
    times = [fault.at_s for fault in faults]
    assert times == sorted(times)
    assert 0 <= times[0] < times[-1] < 1200


@pytest.mark.parametrize("seed", range(5))
def test_the_plan_lets_one_worker_and_the_later_server_grow_old(seed: int) -> None:
    from soak import OLDEST_RANK, plan

    for fault in plan(seed, 1200, 12, 4):
        assert fault.kind != "kill worker" or fault.rank != OLDEST_RANK
        assert fault.kind != "kill server" or fault.at_s < 600
        assert (fault.rank is None) == (fault.kind in ("kill server", "stop server"))


def test_faults_wait_until_something_can_still_progress() -> None:
    from soak import Fault, is_possible

    both = frozenset({0, 1})
    stop, reset = Fault(0.0, "stop worker", 1), Fault(0.0, "reset", 1)
    assert is_possible(stop, both, server_ready=False)
    assert not is_possible(stop, frozenset({1}), server_ready=True)
    assert is_possible(reset, frozenset({1}), server_ready=True)
    assert not is_possible(reset, frozenset({0}), server_ready=True)
    kill = Fault(0.0, "kill server", None)
    assert is_possible(kill, both, server_ready=True)
    assert not is_possible(kill, both, server_ready=False)


def test_a_life_is_flat_when_it_grows_only_while_it_warms_up() -> None:
    from soak import trend

    found = trend("server", life(lambda age: 2e8 * min(1.0, age / 30)))
    assert found is not None
    assert found.is_flat
    assert found.rss.first == found.rss.last == 2e8


def test_a_leak_of_memory_threads_or_files_is_not_flat() -> None:
    from soak import Sample, trend

    leak = trend("server", life(lambda age: 2e8 + 2e5 * age))
    assert leak is not None
    assert not leak.is_flat
    threads = trend("server", [Sample(float(age), 10, 10, age // 10, 5) for age in range(200)])
    assert threads is not None
    assert not threads.is_flat
    files = trend("server", [Sample(float(age), 10, 10, 5, age // 10) for age in range(200)])
    assert files is not None
    assert not files.is_flat


def test_a_short_life_is_not_judged() -> None:
    from soak import trend

    assert trend("server", []) is None
    assert trend("server", life(lambda _: 2e8, seconds=60)) is None


def test_a_gap_between_steps_is_a_faults_doing_if_they_meet() -> None:
    from soak import Gap, Injected, gaps_between

    before, during, after = gaps_between([9.0, 4.0, 2.0, 9.5])
    assert during == Gap(4.0, 9.0)
    assert during.seconds() == 5.0
    fault = Injected(4.5, "stop server", "server", 3.0)
    assert [gap.meets(fault) for gap in (before, during, after)] == [False, True, False]


def summary_of(algorithm: str, applied: int, steps: int, pushes: int) -> Summary:
    """A run over two epochs of 100 samples."""
    worker = WorkerShare(rank=0, node="pi5", samples=applied, mean_staleness=0.0, share=1.0)
    return Summary(
        algorithm=algorithm,
        run_id="soak",
        wall_s=1.0,
        epochs=2,
        steps=steps,
        train_samples=100,
        samples_applied=applied,
        codec="fp32",
        pushes=Pushes(applied=pushes),
        leases_returned=0,
        final=Final(),
        bytes=Traffic(),
        workers=[worker],
    )


def test_samples_steps_and_pushes_must_fit_together() -> None:
    from soak import problems_of

    assert problems_of(summary_of("edp", 200, 8, 8), 32, 2) == []
    assert problems_of(summary_of("syncps", 200, 8, 15), 32, 2) == []
    assert len(problems_of(summary_of("edp", 199, 8, 8), 32, 2)) == 2
    assert len(problems_of(summary_of("syncps", 200, 9, 15), 32, 2)) == 1
    assert len(problems_of(summary_of("edp", 200, 8, 9), 32, 2)) == 1
    assert len(problems_of(summary_of("edp", 200, 8, 8), 32, 3)) == 3


def step_line(incarnation: str, step: int, epoch: int, start: int) -> MetricLine:
    """A step of ten samples."""
    values = {"start": float(start), "stop": start + 10.0}
    return MetricLine("", incarnation, MetricRecord("step", step, epoch, values))


def test_samples_that_are_applied_again_after_a_resume_count_once() -> None:
    from soak import Applied

    applied = Applied()
    for step in range(1, 6):
        applied.add(step_line("first", step, 0, 10 * step))
    for step in range(3, 8):
        applied.add(step_line("second", step, 0, 10 * step))
    applied.add(step_line("second", 8, 1, 10))
    assert applied.num_twice == 0
    applied.add(step_line("second", 9, 0, 15))
    assert applied.num_twice == 2


@pytest.fixture
def proxied() -> Iterator[tuple[Proxy, socket.socket, socket.socket]]:
    """A proxy, and both ends of a connection through it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        proxy = Proxy(listener.getsockname()[1])
        with closing(proxy), socket.create_connection(("127.0.0.1", proxy.port)) as near:
            far, _ = listener.accept()
            while not proxy.is_connected:
                time.sleep(0.01)
            for sock in (near, far):
                sock.settimeout(10.0)
            with far:
                yield proxy, near, far


def receive(sock: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        data += sock.recv(nbytes - len(data))
    return data


def test_the_proxy_carries_bytes_and_the_end(
    proxied: tuple[Proxy, socket.socket, socket.socket],
) -> None:
    _, near, far = proxied
    data = bytes(range(256)) * 20_000
    sender = threading.Thread(target=near.sendall, args=(data,))
    sender.start()
    assert receive(far, len(data)) == data
    sender.join()
    far.sendall(b"yes")
    assert receive(near, 3) == b"yes"
    near.close()
    assert far.recv(1) == b""


def test_the_proxy_corrupts_one_bit(proxied: tuple[Proxy, socket.socket, socket.socket]) -> None:
    proxy, near, far = proxied
    proxy.corrupt(3, upward=False)
    far.sendall(b"\0\0")
    assert receive(near, 2) == b"\0\0"
    far.sendall(b"\0\0")
    assert receive(near, 2) == b"\x10\0"
    assert proxy.corrupted == 1


def test_the_proxy_resets_or_closes(proxied: tuple[Proxy, socket.socket, socket.socket]) -> None:
    proxy, near, far = proxied
    proxy.cut("reset")
    for sock in (near, far):
        with pytest.raises(ConnectionResetError):
            sock.recv(1)
    assert not proxy.is_connected


def test_the_proxy_throttles(proxied: tuple[Proxy, socket.socket, socket.socket]) -> None:
    proxy, near, far = proxied
    proxy.throttle(100_000.0)
    began = time.monotonic()
    near.sendall(bytes(40_000))
    receive(far, 40_000)
    assert time.monotonic() - began > 0.25


@pytest.mark.bench
def test_a_soak_ends_well_and_writes_what_it_saw(tmp_path: Path) -> None:
    results, chart = tmp_path / "soak.json", tmp_path / "soak.svg"
    command = [sys.executable, str(BENCHMARKS / "soak.py"), "--algorithm", "edp"]
    options = ["--minutes=0.15", "--faults-per-minute=60", "--workers=2", "--seed=0"]
    files = [f"--json={results}", f"--chart={chart}", f"--folder={tmp_path / 'files'}"]
    done = subprocess.run(
        [*command, *options, *files], check=False, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ended well, samples exact" in done.stdout
    (soak,) = json.loads(results.read_text())["soaks"]
    assert len(soak["faults"]) >= 4
    assert soak["exit_codes"] == {"server": 0, "worker 1": 0, "worker 2": 0}
    assert soak["summary"]["samples_applied"] == 1438 * soak["num_epochs"]
    assert soak["restarts"]["server"] >= 1
    assert all(life["samples"] for life in soak["lives"] if life["name"] == "worker 1")
    drawing = ElementTree.parse(chart).getroot()  # noqa: S314 - we have just written it
    marks = [element for element in drawing.iter() if element.get("id") == "fault"]
    assert len(marks) == len(soak["faults"])
