"""What is thought of the server's port, of the way to it, and of the link."""

import json
from typing import Any

import pytest

from doctoring import LINUX, MAC, answer, cluster, context
from smolcluster.launch.doctor.checks_links import (
    judge_link,
    judge_port,
    judge_reach,
    link_limit_s,
    listen_seconds,
    listening_addresses,
    read_listener,
)
from smolcluster.launch.doctor.findings import Answer, Context, Facts, Finding, Listener

FREE = {"state": "listening", "port": 65432}
FOREIGN = {"state": "foreign", "port": 0, "why": "Cannot assign requested address"}
BUSY = {"state": "busy", "port": 40123, "why": ""}


def listened(places: dict[str, Any], holder: str = "", free: int = 0) -> Answer:
    own = ["10.10.0.1", "192.168.50.1"]
    told = {"places": places, "own": own, "holder": holder, "free": free, "pid": 4711}
    return answer(json.dumps(told) + "\n")


def listener(**states: str) -> Listener:
    return Listener(
        states or {"192.168.50.1": "listening"}, {"192.168.50.1": 65432}, ("10.10.0.1",), 1
    )


def reached(
    outside: str | None, inside: str | None = "absent", facts: Facts = LINUX, node: str = "pi5"
) -> Finding:
    said = f"outside {json.dumps({'error': outside})}\n"
    if inside != "absent":
        said += f"inside {json.dumps({'error': inside})}\n"
    return judge_reach(answer(said), context(node, facts, listener=listener()))


def server() -> Context:
    return context("mini1")


def test_a_free_port() -> None:
    found = judge_port(listened({"10.10.0.1": FREE, "192.168.50.1": FREE}), server())
    assert (found.state, found.what) == ("ok", "65432 free")


def test_a_busy_port_names_its_holder_and_the_next_free_one() -> None:
    found = judge_port(listened({"10.10.0.1": BUSY}, "python3 (process 812)", 65434), server())
    assert (found.state, found.what) == ("fail", "port 65432 is in use by python3 (process 812)")
    assert found.fix.endswith("--override port=65434")


def test_a_port_of_the_systems() -> None:
    refused = {"state": "refused", "port": 40000, "why": "Permission denied"}
    found = judge_port(listened({"10.10.0.1": refused}), server())
    assert found.state == "fail"
    assert found.fix == "take a port above 1023"


def test_no_address_is_the_servers() -> None:
    found = judge_port(listened({"10.9.9.9": FOREIGN}), server())
    assert found.state == "fail"
    assert found.fix == "set host_ip to an address of mini1: 10.10.0.1, 192.168.50.1"


def test_a_server_without_python() -> None:
    found = judge_port(answer("", 127, "sh: 1: uv: not found"), server())
    assert found.state == "fail"
    assert "uv: not found" in found.what
    assert "`uv python install`" in found.fix


def test_what_the_listener_says_is_read() -> None:
    read = read_listener(listened({"10.10.0.1": BUSY, "10.9.9.9": FOREIGN}))
    assert read is not None
    assert read.ports == {"10.10.0.1": 40123}
    assert read.states == {"10.10.0.1": "busy", "10.9.9.9": "foreign"}


@pytest.mark.parametrize("said", ["", "[]", '{"places": 3}', "null"])
def test_a_listener_that_says_something_else_is_none(said: str) -> None:
    assert read_listener(answer(said)) is None


def test_reached_from_tmux_too() -> None:
    assert reached(None, None).what == "from tmux too"


def test_a_mac_keeps_tmux_from_the_local_network() -> None:
    found = reached(None, "EHOSTUNREACH", MAC)
    assert found.state == "fail"
    assert "not from inside tmux (EHOSTUNREACH)" in found.what
    assert "Privacy & Security > Local Network" in found.fix
    assert "nc -vz 192.168.50.1 65432" in found.fix


def test_on_linux_that_is_something_else() -> None:
    found = reached(None, "EHOSTUNREACH", LINUX)
    assert found.state == "fail"
    assert "Local Network" not in found.fix


def test_a_tmux_that_does_not_start() -> None:
    found = reached(None, "tmux does not start")
    assert (found.state, found.fix) == ("fail", "there: `tmux kill-server`, then try again")


def test_without_tmux_only_the_plain_way_is_known() -> None:
    assert reached(None).state == "skipped"


def test_a_firewall() -> None:
    found = reached("ETIMEDOUT")
    assert (found.state, found.what) == ("fail", "192.168.50.1:65432 does not answer (ETIMEDOUT)")
    assert "`sudo ufw allow 65432/tcp`" in found.fix


def test_no_route() -> None:
    found = reached("ENETUNREACH")
    assert "there is no way to 192.168.50.1:65432" in found.what
    assert "host_ip.pi5" in found.fix


def test_somebody_else_at_the_servers_address() -> None:
    found = reached("stranger")
    assert "somebody else than mini1 answers" in found.what
    assert "host_ip.pi5" in found.fix


def test_an_address_that_is_a_name_nobody_knows() -> None:
    assert "host_ip.pi5" in reached("name").fix


def test_an_address_that_is_not_the_servers() -> None:
    wrong = listener(**{"192.168.50.1": "foreign"})
    found = judge_reach(answer("outside {}"), context(listener=wrong))
    assert found.what == "192.168.50.1 is no address of mini1, which has 10.10.0.1"
    assert found.fix == "set host_ip.pi5 to an address of mini1: 10.10.0.1"


def test_a_slow_link_and_one_with_delays() -> None:
    slow = judge_link(answer('{"error": null, "ms": 3.0, "mb_per_s": 0.4}'), context())
    late = judge_link(answer('{"error": null, "ms": 48.0, "mb_per_s": 12.0}'), context())
    assert [slow.state, late.state] == ["warn", "warn"]
    assert "0.4 MB/s" in slow.what
    assert "use_quantization=true" in slow.fix
    assert "48 ms" in late.what
    fast = judge_link(answer('{"error": null, "ms": 0.31, "mb_per_s": 941.2}'), context())
    assert (fast.state, fast.what) == ("ok", "941 MB/s 0.31 ms")


def test_the_listener_outlives_everybody_who_may_come() -> None:
    many = cluster(
        host_ip=dict.fromkeys((f"pi{number}" for number in range(16)), "10.10.0.1"),
        workers=[f"pi{number}" for number in range(1, 16)],
        num_workers=15,
        server="pi0",
    )
    assert link_limit_s(many) > link_limit_s(cluster())
    assert listen_seconds(many) > link_limit_s(many)


def test_the_listener_is_where_the_server_would_be() -> None:
    assert listening_addresses(cluster()) == ["10.10.0.1", "192.168.50.1"]
    assert listening_addresses(cluster(bind=["0.0.0.0"])) == ["0.0.0.0"]  # noqa: S104
