"""What ships the logs of a launched run: planned, and run by shells of this machine."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from harness import local_settings
from loki import receiving
from reading import fake_ssh
from reading import server as bare_server
from reading import worker as bare_worker
from smolcluster.errors import LaunchError
from smolcluster.launch import shipping
from smolcluster.launch.run_of_children import RunOfChildren
from smolcluster.launch.shipping import LokiAddress, loki_of, ship_script, url_for, with_shippers
from smolcluster.observability.shipping.spool import STATE
from smolcluster.runs.launched import Launched, LaunchedProcess
from smolcluster.runs.paths import create_run
from waiting import eventually

TIMEOUT_S = 90.0
OURS = LokiAddress("http://127.0.0.1:3100", is_ours=True)
FOLLOWER = """#!/bin/sh
trap 'sleep 0.5; echo flushed; exit' TERM
echo "$(basename "$0") $LOKI_URL $SMOLCLUSTER_RUNS_DIR $*"
touch ~/ready; n=0; while [ $n -lt 300 ]; do sleep 0.1; n=$((n+1)); done
"""
"""Follows nothing; told to end it takes a moment."""
Shell = Callable[[LaunchedProcess], "subprocess.Popen[bytes]"]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A machine with a checkout that has the configurations of Promtail and Alloy, and a run."""
    (tmp_path / "runs" / "r1").mkdir(parents=True)
    logging = tmp_path / "smolcluster" / "logging"
    logging.mkdir(parents=True)
    for name in ("promtail-server-remote.yaml", "promtail-worker-remote.yaml", "config.alloy"):
        (logging / name).touch()
    return tmp_path


def server(ssh: str | None) -> LaunchedProcess:
    return bare_server(ssh).with_arguments(".venv/bin/python", "server.py")


def worker(rank: int, node: str, ssh: str, run_dir: str = "~/runs/r1") -> LaunchedProcess:
    return bare_worker(rank, node, ssh, run_dir).with_arguments(".local/bin/python", "worker.py")


def install(home: Path, name: str) -> None:
    program = home / ".local" / "bin" / name
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(FOLLOWER)
    program.chmod(0o755)


@pytest.fixture(params=["sh", "bash"])
def shell(
    home: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[..., "subprocess.Popen[bytes]"]]:
    """Start a shipper of these processes as a session does."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*processes: LaunchedProcess) -> "subprocess.Popen[bytes]":
        script = ship_script(processes, "http://10.0.0.1:3100/")
        process = subprocess.Popen(
            [request.param, "-c", script],
            cwd=home,
            env={"HOME": str(home), "PATH": "/usr/bin:/bin"},
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def said(home: Path) -> list[str]:
    return sorted((home / "runs" / "r1" / "promtail.log").read_text().splitlines())


def test_promtail_follows_and_is_ended_with_the_processes_of_its_machine(
    home: Path, shell: Shell
) -> None:
    install(home, "promtail")
    install(home, "alloy")
    shipper = shell(worker(0, "pi5", "pi5"))  # which has gone
    assert shipper.wait(TIMEOUT_S) == 0
    config = "-config.expand-env=true -config.file=logging/promtail-worker-remote.yaml"
    assert said(home) == ["flushed", f"promtail http://10.0.0.1:3100 {home}/runs {config}"]
    assert shipper.stderr is not None
    assert shipper.stderr.read() == b""
    file = home / "runs" / "r1" / "promtail.log"
    assert file.stat().st_mode & 0o077 == 0, "nobody else reads it, or can put a link in its place"


def test_of_a_server_and_a_worker_on_one_machine_both_logs_are_followed(
    home: Path, shell: Callable[..., "subprocess.Popen[bytes]"]
) -> None:
    install(home, "promtail")
    assert shell(server("pi5"), worker(0, "mini1", "pi5")).wait(TIMEOUT_S) == 0
    files = [line.rpartition("=")[2] for line in said(home) if line.startswith("promtail")]
    assert files == [f"logging/promtail-{role}-remote.yaml" for role in ("server", "worker")]
    assert said(home).count("flushed") == 2


@pytest.mark.parametrize("role", ["server", "store", "stage", "ranks"])
def test_alloy_follows_where_promtail_does_not_know_each_role(
    home: Path, shell: Callable[..., "subprocess.Popen[bytes]"], role: str
) -> None:
    install(home, "alloy")
    if role != "server":
        install(home, "promtail")
    other = server("pi5").model_copy(update={"role": role})
    assert shell(server("pi5"), other).wait(TIMEOUT_S) == 0
    assert said(home)[0].startswith(f"alloy http://10.0.0.1:3100 {home}/runs run ")
    assert said(home)[0].endswith(" logging/config.alloy")


def test_a_follower_that_is_told_to_end_is_waited_for(
    home: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipping, "look_script", lambda _process: "echo running")
    install(home, "promtail")
    shipper = shell(server("pi5"))
    eventually((home / "ready").exists)
    os.killpg(shipper.pid, signal.SIGTERM)
    assert shipper.wait(TIMEOUT_S) == 0
    assert "flushed" in said(home)


def test_our_own_shipper_gets_the_logs_of_its_machine_only(home: Path, shell: Shell) -> None:
    odd = home / "it's $(touch pwned)"
    (odd / "r1").mkdir(parents=True)
    install(home, "python")
    process = worker(3, "pi5", "pi5", run_dir="~/it's $(touch pwned)/r1")
    shipper = shell(process)
    shipper.wait(TIMEOUT_S)
    assert (home / "ready").exists()
    assert not (home / "pwned").exists()
    script = ship_script([process], "http://10.0.0.1:3100")
    command = "-m smolcluster.cli ship \"$HOME\"/'it'\"'\"'s $(touch pwned)/r1' --loki"
    assert f'{command} http://10.0.0.1:3100 --only worker-rank3-pi5 >> "$out"' in script
    assert (odd / "r1" / "promtail.log").exists()
    ranks = process.model_copy(update={"role": "ranks", "rank": None})
    assert "--only" not in ship_script([ranks], "http://10.0.0.1:3100"), "its ranks have the logs"


def test_a_node_is_told_of_no_loki_that_does_not_let_it_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_ssh(tmp_path, monkeypatch)
    monkeypatch.setenv("SSH_CONNECTION", "192.168.50.100 5022 192.168.50.101 22")
    monkeypatch.setattr(shipping, "is_loki", lambda _: False)
    for bound in ("", "127.0.0.1"):
        monkeypatch.setenv("LOKI_BIND", bound)
        assert url_for(server(None), OURS) == OURS.url
        with pytest.raises(LaunchError, match=r"LOKI_BIND=192\.168\.50\.100"):
            url_for(server("pi5"), OURS)
    monkeypatch.setattr(shipping, "is_loki", "http://192.168.50.100:3100".__eq__)
    assert url_for(server("pi5"), OURS) == "http://192.168.50.100:3100", "another Loki, which does"


def test_a_node_finds_loki_where_it_sees_the_launching_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_ssh(tmp_path, monkeypatch)
    monkeypatch.setenv("LOKI_BIND", "0.0.0.0")  # noqa: S104
    stated = LokiAddress("http://127.0.0.1:9", is_ours=False)
    for process in (server("pi5"), server(None)):
        assert url_for(process, stated) == "http://127.0.0.1:9"
    assert url_for(server(None), OURS) == OURS.url
    elsewhere = LokiAddress("http://192.168.7.7:3100", is_ours=True)  # it listens on one address
    assert url_for(server("pi5"), elsewhere) == elsewhere.url
    for connection, url in (
        ("192.168.50.100 5022 192.168.50.101 22", "http://192.168.50.100:3100"),
        ("::ffff:10.0.0.9 5022 ::1 22", "http://10.0.0.9:3100"),
        ("fd00::9 5022 fd00::1 22", "http://[fd00::9]:3100"),
    ):
        monkeypatch.setenv("SSH_CONNECTION", connection)
        assert url_for(server("pi5"), OURS) == url
    for connection, why in (("", "how it sees"), ("fe80::1%eth0 1 2 3", "which no URL can say")):
        monkeypatch.setenv("SSH_CONNECTION", connection)
        with pytest.raises(LaunchError, match=f"{why}.*set loki_url"):
            url_for(server("pi5"), OURS)


def test_each_machine_gets_one_shipper_and_who_cannot_say_how_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_ssh(tmp_path, monkeypatch)
    monkeypatch.setenv("SSH_CONNECTION", "10.0.0.9 1 10.0.0.1 22")
    monkeypatch.setenv("LOKI_BIND", "0.0.0.0")  # noqa: S104
    processes = (server("pi@mini1"), worker(0, "mini1", "pi@mini1"), worker(1, "pi5", "cut"))
    launched = Launched(run_id="r1", algorithm="edp", processes=processes)
    told: list[str] = []
    [shipper] = with_shippers(launched, OURS, told.append).shippers
    assert (shipper.stem, shipper.session) == ("shipper-mini1", "r1-shipper-mini1")
    assert "--only server-mini1 --only worker-rank0-mini1" in shipper.argv[-1]
    assert [line.split(":")[0] for line in told] == ["the logs of pi5 are not shipped"]
    assert with_shippers(launched, None, told.append) is launched


def test_where_logs_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stated = local_settings("loki_url=http://mini1:3100").cluster
    assert loki_of(stated, tmp_path) == LokiAddress("http://mini1:3100", is_ours=False)
    with receiving() as receiver, monkeypatch.context() as patch:
        patch.setattr(shipping, "own_loki", lambda: receiver.url)
        assert loki_of(local_settings().cluster, None) == LokiAddress(receiver.url, is_ours=True)
    monkeypatch.setattr(shipping, "is_loki", lambda _: False)
    assert loki_of(local_settings().cluster, None) is None
    monkeypatch.setattr(shipping, "answers", lambda _: False)
    assert loki_of(local_settings().cluster, tmp_path) == OURS, "it is on its way"
    monkeypatch.setattr(shipping, "answers", lambda _: True)
    assert loki_of(local_settings().cluster, tmp_path) is None, "all are up but Loki"


def test_a_run_of_child_processes_ships_its_last_lines_and_leaves_nothing(
    fake_plan: Callable[..., Launched], tmp_path: Path, console: Console
) -> None:
    paths = create_run(tmp_path, "edp-1")
    log, state = paths.log_file("server", "mini1"), paths.logs / STATE
    program = f"""
with open({str(log)!r}, "w") as log:
    print("the first", file=log, flush=True)
    wait_until(lambda: os.path.exists({str(state)!r}))
    print("the last", file=log)
"""
    with receiving() as receiver:
        run = RunOfChildren(fake_plan(program, ""), paths, console)
        run.start(LokiAddress(receiver.url, is_ours=True))
        assert run.follow() == 0
        assert receiver.received.texts(host="server-mini1") == ["the first", "the last"]
    assert (paths.root / "exits/shipper-mini1").read_text() == "0\n"


def test_a_run_of_child_processes_does_not_need_loki(
    fake_plan: Callable[..., Launched], tmp_path: Path, console: Console
) -> None:
    paths = create_run(tmp_path, "edp-1")
    run = RunOfChildren(fake_plan("", ""), paths, console)
    run.start(LokiAddress("nonsense", is_ours=False))
    assert run.follow() == 0
