"""The doctor's round: who is asked, when, and what is told; machines that answer from memory."""

import io
import json
import threading
from collections import defaultdict
from pathlib import Path

import pytest
from rich.console import Console

from doctoring import HEALTHY, FakeHost, cluster, code, patients
from smolcluster.errors import ConfigError, LaunchError
from smolcluster.launch.doctor import examine as module
from smolcluster.launch.doctor.check_report import ORDER, CheckReport, as_json_text, show
from smolcluster.launch.doctor.checks_links import link_limit_s
from smolcluster.launch.doctor.examine import (
    CONTACT_S,
    MAX_SESSIONS,
    NodeChecks,
    contexts,
    doctor,
    examine,
)
from smolcluster.launch.doctor.findings import QUICK_S
from smolcluster.launch.host import Host, TookTooLong, Unreachable

ONLY_SERVER, ONLY_WORKER = {"port"}, {"server", "link"}
NODES = ["mini1", "mini2", "pi5"]


def shown(check_report: CheckReport, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    show(check_report, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def host(node_checks: NodeChecks) -> FakeHost:
    assert isinstance(node_checks.host, FakeHost)
    return node_checks.host


def key_refused(cause: str = "key", node: str = "pi5") -> Unreachable:
    return Unreachable(node, node, cause, "it does not let this user in")


def test_a_healthy_cluster_is_ready() -> None:
    check_report = examine(patients(cluster()), cluster())
    assert [
        (node, name) for node, name, found in check_report if found.state not in ("ok", "skipped")
    ] == []
    assert check_report.exit_code == 0
    assert "the cluster is ready" in shown(check_report)


def test_every_node_gets_every_check_that_is_its_own() -> None:
    made = defaultdict(set)
    for node, name, _ in examine(patients(cluster()), cluster()):
        made[node].add(name)
    assert made["mini1"] == set(ORDER) - ONLY_WORKER
    assert made["mini2"] == made["pi5"] == set(ORDER) - ONLY_SERVER


def test_all_machines_are_asked_at_once() -> None:
    """Each first contact, and each check, waits until all three machines have been asked the same."""
    barriers: dict[str, threading.Barrier] = defaultdict(lambda: threading.Barrier(3, timeout=10))
    lock = threading.Lock()

    def meet(_node: str, name: str, _limit_s: float) -> None:
        if name in ("system", "clock", "torch"):
            with lock:
                barrier = barriers[name]
            barrier.wait()

    assert examine(patients(cluster(), before=meet), cluster()).exit_code == 0


def test_workers_measure_at_once_and_the_listener_gives_the_turns() -> None:
    barrier = threading.Barrier(2, timeout=10)

    def meet(_node: str, name: str, _limit_s: float) -> None:
        if name == "link":
            barrier.wait()

    assert examine(patients(cluster(), before=meet), cluster()).exit_code == 0


def test_some_checks_of_a_machine_at_once_but_no_more_than_ssh_allows() -> None:
    lock = threading.Lock()
    at_once, most = dict.fromkeys(NODES, 0), dict.fromkeys(NODES, 0)
    full = {node: threading.Barrier(MAX_SESSIONS, timeout=10) for node in NODES}
    first = {"clock", "Python", "uv", "tmux", "rsync", "disk"}

    def count(node: str, name: str, _limit_s: float) -> None:
        with lock:
            at_once[node] += 1
            most[node] = max(most[node], at_once[node])
        if name in first:
            full[node].wait()
        with lock:
            at_once[node] -= 1

    examine(patients(cluster(), before=count), cluster())
    assert most == dict.fromkeys(NODES, MAX_SESSIONS)


def test_every_check_has_a_time_limit() -> None:
    limits: dict[str, float] = {}

    def note(_node: str, name: str, limit_s: float) -> None:
        limits[name] = limit_s

    examine(patients(cluster(), before=note), cluster())
    assert limits["system"] == CONTACT_S
    assert limits["disk"] == QUICK_S
    assert limits["link"] == link_limit_s(cluster())
    assert max(limits.values()) <= 60


def test_a_check_that_takes_too_long_fails_alone() -> None:
    says = {"pi5": {"disk": TookTooLong("pi5 (pi5): a command did not end within 10 s")}}
    check_report = examine(patients(cluster(), says), cluster())
    failing = [
        (node, name, found.what) for node, name, found in check_report if found.state == "fail"
    ]
    assert failing == [("pi5", "disk", "no answer within 10 s")]
    assert check_report.exit_code == 1


def test_a_machine_out_of_reach_is_asked_once() -> None:
    ill = patients(cluster(), {"pi5": {"system": key_refused()}})
    _, findings = examine(ill, cluster()).nodes["pi5"]
    assert host(ill[2]).calls == ["system"]
    assert findings["SSH"].state == "fail"
    assert findings["SSH"].fix.startswith("`ssh-copy-id pi5`")
    assert {found.what for name, found in findings.items() if name != "SSH"} == {"needs SSH"}


@pytest.mark.parametrize("cause", ["host_key", "host_key_changed"])
def test_a_host_key_that_is_not_known_is_a_check_of_its_own(cause: str) -> None:
    says = {"pi5": {"system": key_refused(cause)}}
    _, findings = examine(patients(cluster(), says), cluster()).nodes["pi5"]
    assert findings["host key"].state == "fail"
    assert findings["SSH"].what == "needs its key"


def test_a_system_that_we_do_not_know_is_not_asked_on() -> None:
    ill = patients(cluster(), {"pi5": {"system": "system Windows_NT\n"}})
    _, findings = examine(ill, cluster()).nodes["pi5"]
    assert findings["system"].state == "fail"
    assert findings["tmux"].what == "unknown system"
    assert host(ill[2]).calls == ["system"]


def test_without_the_server_there_is_nowhere_to_go() -> None:
    ill = patients(cluster(), {"mini1": {"system": key_refused(node="mini1")}})
    nodes = examine(ill, cluster()).nodes
    assert nodes["mini1"][1]["port"].what == "needs SSH"
    assert nodes["pi5"][1]["link"].what == "needs the server"
    assert nodes["pi5"][1]["disk"].state == "ok"


def test_the_listener_is_ended_also_after_a_mishap() -> None:
    ill = patients(cluster(), {"pi5": {"server": "nonsense", "link": LaunchError("no ssh")}})
    examine(ill, cluster())
    assert host(ill[0]).calls[-1].startswith("kill 4711")


def test_an_answer_that_makes_no_sense_is_a_failure() -> None:
    says = {"pi5": {"disk": "nonsense\n", "memory": "", "clock": "noon"}}
    _, findings = examine(patients(cluster(), says), cluster()).nodes["pi5"]
    for name in ("disk", "memory", "clock"):
        assert findings[name].state == "fail"
        assert "makes no sense" in findings[name].what


def test_two_names_of_one_machine_are_seen() -> None:
    says = {"mini2": {"identity": "same\nmini\n"}, "pi5": {"identity": "same\nmini\n"}}
    nodes = examine(patients(cluster(), says), cluster()).nodes
    assert nodes["pi5"][1]["identity"].what == "pi5 and mini2 are one machine"
    assert nodes["mini2"][1]["identity"].state == "ok"


def test_a_server_that_works_too_is_one_node() -> None:
    both = cluster(workers=["mini1", "pi5"])
    made = examine(patients(both), both)
    assert list(made.nodes) == ["mini1", "pi5"]
    assert made.exit_code == 0
    assert {"port", "server", "link"} <= set(made.nodes["mini1"][1])


def test_json_has_every_finding() -> None:
    says = {"pi5": {"code": "state\0absent\0", "secret": "-rw-rw-rw- 1 pi pi 65 Nov 22 03:00 /s\n"}}
    told = json.loads(as_json_text(examine(patients(cluster(), says), cluster())))
    assert list(told) == ["ok", "counts", "nodes"]
    assert told["ok"] is False
    assert (told["counts"]["fail"], told["counts"]["warn"]) == (1, 1)
    assert list(told["nodes"]) == NODES
    pi5 = told["nodes"]["pi5"]
    assert (pi5["ssh"], pi5["role"]) == ("pi5", "worker")
    assert pi5["checks"]["secret"]["fix"] == "there: `chmod 600 /s`"
    assert all(set(each) == {"state", "what", "fix"} for each in pi5["checks"].values())


def test_the_fix_stands_under_its_failure() -> None:
    lines = shown(
        examine(patients(cluster(), {"pi5": {"code": code(sending="yes")}}), cluster())
    ).splitlines()
    place = lines.index("FAILS pi5: code: ~/smolcluster is half-sent")
    assert lines[place + 1] == "  -> launch again without --no-sync"


def test_long_remedies_are_wrapped_but_commands_are_whole() -> None:
    mac = "system Darwin\nmachine arm64\napple_silicon 1\npackages brew\n"
    cut_off = 'outside {{"error": null}}\ninside {{"error": "EHOSTUNREACH"}}\n'
    says = {"pi5": {"system": mac, "server": cut_off, "sleep": " sleep 0\n"}}
    check_report = examine(patients(cluster(), says), cluster())
    for width in range(80, 101):
        text = shown(check_report, width)
        assert max(map(len, text.splitlines())) <= width
        assert "`tmux new-session 'nc -vz 192.168.50.1 65432'`" in text


def test_four_nodes_fit_side_by_side() -> None:
    four = cluster(
        host_ip=dict.fromkeys(("mini1", "mini2", "pi5", "win"), "10.10.0.1"),
        workers=["mini2", "pi5", "win"],
        num_workers=3,
    )
    says = {"win": {"system": "system MINGW64_NT\n"}, "pi5": {"torch": "absent\n"}}
    assert shown(examine(patients(four, says), four)).count("host key") == 1


def test_what_is_the_same_on_many_nodes_is_said_once() -> None:
    says = {node: {"code": code({})} for node in NODES}
    text = shown(examine(patients(cluster(), says), cluster()))
    assert "warning mini1, mini2, pi5: code: ~/smolcluster is of another version\n" in text
    assert text.count("of another version") == 1


def test_many_nodes_take_tables_of_the_consoles_width() -> None:
    names = [f"machine{number}" for number in range(16)]
    many = cluster(
        host_ip=dict.fromkeys(names, "10.10.0.1"),
        workers=names[1:],
        num_workers=15,
        server=names[0],
    )
    text = shown(examine(patients(many), many))
    assert all(name in text for name in names)
    assert max(map(len, text.splitlines())) <= 100


def test_what_a_machine_says_cannot_move_the_cursor() -> None:
    says = {"pi5": {"Python": "Python 3.9.\x1b[2J\n", "tmux": "tmux 3.4\n"}}
    assert "\x1b" not in shown(examine(patients(cluster(), says), cluster()))


CLUSTER_FILE = """
host_ip: {mini1: 10.10.0.1, pi5: 192.168.50.1}
num_workers: 1
workers: [pi5]
server: mini1
nodes: {mini1: {ssh: local}, pi5: {ssh: pi@10.0.0.7, project_dir: /srv/it, secret_file: ~/s}}
"""


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(CLUSTER_FILE)

    def fake(_cluster: object, node: str) -> Host:
        return FakeHost(node, None if node == "mini1" else "pi@10.0.0.7")

    monkeypatch.setattr(module, "host_of", fake)
    assert doctor(str(file), [], as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    assert doctor(str(file), [], as_json=False) == 0
    assert "the cluster is ready (2 warnings)" in capsys.readouterr().out
    with pytest.raises(ConfigError):
        doctor(str(file), ["prot=1"], as_json=False)


def test_what_is_known_of_a_node_beforehand() -> None:
    stated = cluster({"mini1": {"ssh": "local"}, "pi5": {"project_dir": "/srv/it"}})
    known = contexts(stated, {"pi5": {"secret_file": "~/s"}})
    assert known["mini1"].is_here
    assert known["mini1"].python != "~/smolcluster/.venv/bin/python"
    assert (known["pi5"].destination, known["pi5"].folder) == ("pi5", "/srv/it")
    assert (known["pi5"].python, known["pi5"].secret_file) == ("/srv/it/.venv/bin/python", "~/s")
    assert len({each.token for each in known.values()}) == 1


def test_the_healthy_machine_knows_every_check() -> None:
    assert set(ORDER) - set(HEALTHY) == {"SSH", "host key", "sleep"}
