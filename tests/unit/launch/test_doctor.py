"""The doctor's round: who is asked, when, and what is told; machines that answer from memory."""

import io
import json
import sys
import threading
from pathlib import Path

import pytest
from rich.console import Console

from doctoring import HEALTHY, FakeHost, cluster, healthy_nodes, large_cluster, machine_at
from smolcluster.errors import ConfigError, LaunchError
from smolcluster.launch import places
from smolcluster.launch.doctor.check_report import as_json_text, exit_code, show
from smolcluster.launch.doctor.checks_links import LISTEN_S, link_limit_s
from smolcluster.launch.doctor.examine import (
    doctor,
    examine,
    nodes_of,
)
from smolcluster.launch.doctor.findings import Finding, NodeChecks
from smolcluster.launch.doctor.table import CONTACT_S, ORDER
from smolcluster.launch.host import TookTooLong, Unreachable
from smolcluster.launch.project import read_project
from waiting import DEADLINE_S

CHECKOUT = Path(__file__).parents[3]
ONLY_SERVER, ONLY_WORKER = {"port"}, {"server", "link"}
NODES = ["mini1", "mini2", "pi5"]
Says = dict[str, str | LaunchError]
LITTLE = "MemAvailable: 412345 kB\n"


def examined(nodes: list[NodeChecks]) -> list[NodeChecks]:
    examine(nodes)
    return nodes


def found_of(node: str, **says: Says) -> dict[str, Finding]:
    """What is found of a node of three, some of which are ill."""
    nodes = examined(healthy_nodes(says=says))
    return next(each for each in nodes if each.name == node).findings


def calls(node: NodeChecks) -> list[str]:
    assert isinstance(node.host, FakeHost)
    return node.host.calls


def shown(nodes: list[NodeChecks], width: int = 100) -> str:
    output = io.StringIO()
    show(nodes, Console(file=output, width=width))
    return output.getvalue()


def key_refused(cause: str = "key", node: str = "pi5") -> Says:
    return {"system": Unreachable(node, node, cause, "it does not let this user in")}


def test_a_healthy_cluster_is_ready_and_every_node_gets_every_check_that_is_its_own() -> None:
    nodes = examined(healthy_nodes())
    states = {found.state for node in nodes for found in node.findings.values()}
    assert states == {"ok", "skipped"}
    assert exit_code(nodes) == 0
    assert "the cluster is ready" in shown(nodes)
    server, *workers = (set(node.findings) for node in nodes)
    assert server == set(ORDER) - ONLY_WORKER
    assert workers == [set(ORDER) - ONLY_SERVER] * 2


def test_all_machines_are_asked_at_once() -> None:
    """Each of some checks waits until all machines have been asked the same."""
    sizes = {"contact": 3, "facts": 3, "torch": 3, "link": 2}
    barriers = {name: threading.Barrier(size, timeout=DEADLINE_S) for name, size in sizes.items()}

    def meet(_node: str, name: str, _limit_s: float) -> None:
        if name in barriers:
            barriers[name].wait()

    assert exit_code(examined(healthy_nodes(before=meet))) == 0


def test_a_machine_tells_all_its_facts_in_the_session_that_opens_the_shared_connection() -> None:
    """Several that found none open would each open their own: an sshd may refuse that."""
    nodes = examined(healthy_nodes())
    for node in nodes:
        assert isinstance(node.host, FakeHost)
        assert node.host.alone == ["contact"]
        assert calls(node)[:2] == ["contact", "facts"]
        assert not {"Python", "disk", "memory", "clock"} & {*calls(node)}


def test_every_check_has_a_time_limit() -> None:
    limits: dict[str, float] = {}

    def note(_node: str, name: str, limit_s: float) -> None:
        limits[name] = limit_s

    examine(healthy_nodes(before=note))
    assert limits["contact"] == limits["facts"] == CONTACT_S
    assert limits["port"] == LISTEN_S
    assert limits["link"] == link_limit_s(healthy_nodes()[0])
    assert max(limits.values()) <= 60


def test_a_check_that_takes_too_long_or_makes_no_sense_fails_alone() -> None:
    late = TookTooLong("pi5 (pi5): a command did not end within 10 s")
    ill: Says = {"disk": late, "memory": "", "clock": "noon", "secret": "-rw", "server": "nonsense"}
    found = found_of("pi5", pi5=ill)
    failing = {name: each.what for name, each in found.items() if each.state == "fail"}
    assert failing.pop("disk") == "no answer within 15 s"
    assert set(failing) == set(ill) - {"disk"}
    assert all("makes no sense" in what for what in failing.values())


def test_a_machine_out_of_reach_is_asked_once() -> None:
    nodes = examined(healthy_nodes(says={"pi5": key_refused()}))
    findings = nodes[2].findings
    assert calls(nodes[2]) == ["contact"]
    assert findings["SSH"].state == "fail"
    assert findings["SSH"].fix.startswith("`ssh-copy-id pi5`")
    assert {found.what for name, found in findings.items() if name != "SSH"} == {"needs SSH"}
    assert exit_code(nodes) == 1


@pytest.mark.parametrize("cause", ["host_key", "host_key_changed"])
def test_a_host_key_that_is_not_known_is_a_check_of_its_own(cause: str) -> None:
    findings = found_of("pi5", pi5=key_refused(cause))
    assert findings["host key"].state == "fail"
    assert findings["SSH"].what == "needs its key"


def test_a_system_that_we_do_not_know_is_not_asked_on() -> None:
    nodes = examined(healthy_nodes(says={"pi5": {"system": "Windows_NT\n"}}))
    findings = nodes[2].findings
    assert findings["system"].state == "fail"
    assert findings["tmux"].what == findings["identity"].what == "unknown system"
    assert calls(nodes[2]) == ["contact"]


def test_without_the_server_there_is_nowhere_to_go() -> None:
    nodes = examined(healthy_nodes(says={"mini1": key_refused(node="mini1")}))
    assert nodes[0].findings["port"].what == "needs SSH"
    assert nodes[2].findings["link"].what == "needs the server"
    assert nodes[2].findings["disk"].state == "ok"


def test_the_listener_is_ended_also_after_a_mishap() -> None:
    ill: Says = {"server": "nonsense", "link": LaunchError("no ssh")}
    nodes = examined(healthy_nodes(says={"pi5": ill}))
    assert calls(nodes[0])[-1] == "ended"


@pytest.mark.parametrize(
    ("ids", "host_ip", "destinations", "twins"),
    [
        (["a", "b", "b"], {}, NODES, {"pi5": "pi5 and mini2 are one machine"}),
        (["a", "b", ""], {}, ["mini1", "x", "x"], {"pi5": "pi5 and mini2 are one machine"}),
        (["a", "", ""], {}, NODES, {}),
        (["a", "b", "c"], {}, NODES, {}),
        (["a", "a", "a"], dict.fromkeys(NODES, "127.0.0.1"), ["x"] * 3, {}),
    ],
    ids=["one identity", "one destination", "identities unknown", "three", "meant"],
)
def test_two_names_of_one_machine_are_seen(
    ids: list[str], host_ip: dict[str, str], destinations: list[str], twins: dict[str, str]
) -> None:
    nodes = healthy_nodes(cluster(**({"host_ip": host_ip} if host_ip else {})))
    for node, id_, destination in zip(nodes, ids, destinations, strict=True):
        said = {"identity": f"{id_}\nmini\n"}
        node.machine = machine_at(FakeHost(node.name, destination, says=said))
    examine(nodes)
    found = {node.name: node.findings["identity"] for node in nodes}
    assert {name: each.what for name, each in found.items() if each.state != "ok"} == twins
    assert all("nodes.pi5.ssh" in found[name].fix for name in twins)


def test_a_server_that_works_too_is_one_node() -> None:
    nodes = examined(healthy_nodes(cluster(workers=["mini1", "pi5"])))
    assert [node.name for node in nodes] == ["mini1", "pi5"]
    assert exit_code(nodes) == 0
    assert {"port", "server", "link"} <= set(nodes[0].findings)


def test_json_has_every_finding() -> None:
    ill: Says = {"memory": LITTLE, "secret": "-rw-rw-rw- 1 pi pi 65 Nov 22 03:00 /s\n"}
    told = json.loads(as_json_text(examined(healthy_nodes(says={"pi5": ill}))))
    assert list(told) == ["ok", "counts", "nodes"]
    assert told["ok"] is False
    assert (told["counts"]["fail"], told["counts"]["warn"]) == (1, 1)
    assert list(told["nodes"]) == NODES
    pi5 = told["nodes"]["pi5"]
    assert (pi5["ssh"], pi5["role"]) == ("pi5", "worker")
    assert pi5["checks"]["secret"]["fix"] == "there: `chmod 600 /s`"
    assert list(pi5["checks"]) == [name for name in ORDER if name != "port"]
    assert all(set(each) == {"state", "what", "fix"} for each in pi5["checks"].values())


def test_what_is_the_same_on_many_nodes_is_said_once_with_its_fix() -> None:
    says: dict[str, Says] = {node: {"memory": LITTLE} for node in NODES}
    lines = shown(examined(healthy_nodes(says=says))).splitlines()
    [place] = [number for number, line in enumerate(lines) if "only 422.2 MB" in line]
    assert lines[place].startswith("warning mini1, mini2, pi5: memory: ")
    assert lines[place + 1].startswith("  -> end other programs there")


def test_long_remedies_are_wrapped_but_commands_are_whole() -> None:
    cut_off = 'outside {{"error": null}}\ninside {{"error": "EHOSTUNREACH"}}\n'
    mac: Says = {"system": "Darwin arm64\n", "apple_silicon": "1\n", "packages": "brew\n"}
    ill: Says = {**mac, "server": cut_off, "sleep": " sleep 0\n"}
    nodes = examined(healthy_nodes(says={"pi5": ill}))
    for width in range(80, 101):
        text = shown(nodes, width)
        assert max(map(len, text.splitlines())) <= width
        assert "`tmux new-session 'nc -vz 192.168.50.1 65432'`" in text


@pytest.mark.parametrize(("num_nodes", "num_tables"), [(4, 1), (16, 4)])
def test_nodes_stand_side_by_side_in_tables_of_the_consoles_width(
    num_nodes: int, num_tables: int
) -> None:
    nodes = examined(healthy_nodes(large_cluster(num_nodes)))
    text = shown(nodes)
    assert all(node.name in text for node in nodes)
    assert text.count("host key") == num_tables
    assert max(map(len, text.splitlines())) <= 100


def test_what_a_machine_says_cannot_move_the_cursor() -> None:
    ill: Says = {"Python": "Python 3.9.\x1b[2J\n", "tmux": "tmux 3.4\n"}
    assert "\x1b" not in shown(examined(healthy_nodes(says={"pi5": ill})))


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

    monkeypatch.setattr(places, "Host", FakeHost)
    assert doctor(str(file), [], as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    assert doctor(str(file), [], as_json=False) == 0
    assert "the cluster is ready" in capsys.readouterr().out
    with pytest.raises(ConfigError):
        doctor(str(file), ["prot=1"], as_json=False)


def test_what_is_known_of_a_node_beforehand() -> None:
    stated = cluster({"mini1": {"ssh": "local"}, "pi5": {"project_dir": "/srv/it"}})
    mini1, mini2, pi5 = nodes_of(stated, {"pi5": {"secret_file": "~/s"}})
    assert mini1.machine.is_here
    assert mini1.machine.interpreter == sys.executable
    assert mini2.machine.project_dir == read_project(CHECKOUT).folder("auto")
    assert [node.machine.is_own for node in (mini1, mini2, pi5)] == [False, False, True]
    assert (pi5.host.destination, pi5.machine.project_dir) == ("pi5", "/srv/it")
    assert pi5.machine.interpreter == "/srv/it/.venv/bin/python"
    assert pi5.machine.secret_file == "~/s"
    assert mini1.token == pi5.token != ""


def test_the_healthy_machine_knows_every_check() -> None:
    assert set(ORDER) - set(HEALTHY) == {"SSH", "host key", "sleep"}
