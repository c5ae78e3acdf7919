"""Addresses of a machine, what the ways to them are like, and which is best."""

import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from smolcluster.errors import LaunchError
from smolcluster.launch.host import Host
from smolcluster.launch.links import (
    Listener,
    Place,
    Way,
    addresses_of,
    best_of,
    listening,
    measure,
    parse_addresses,
    probe_script,
    read_way,
)

HERE = Host("mini1", None)
MEASURE = probe_script("", "measure", "127.0.0.1", 1, "x")
TOKEN = "t0"
UV = "run --no-project --quiet python"
NOBODY = Listener(places={"127.0.0.1": Place(state="busy", port=1)}, own=())
IPV4, IPV6 = Way("127.0.0.1", "lo"), Way("::1", "lo")

IP_ADDR = """\
1: lo    inet 127.0.0.1/8 scope host lo\\       valid_lft forever preferred_lft forever
1: lo    inet6 ::1/128 scope host noprefixroute \\       valid_lft forever preferred_lft forever
2: eth0    inet 192.168.50.2/24 brd 192.168.50.255 scope global dynamic eth0\\       valid_lft 8s
2: eth0    inet6 fd12:3456::99a/64 scope global temporary dynamic \\       valid_lft 8s
2: eth0    inet6 fd12:3456::dead/64 scope global deprecated dynamic \\       valid_lft 8s
2: eth0    inet6 fd12:3456::2/64 scope global dynamic mngtmpaddr noprefixroute \\       valid_lft 8s
2: eth0    inet6 fe80::ba27:ebff:fe00:1/64 scope link noprefixroute \\       valid_lft forever
3: wlan0    inet 192.168.1.5/24 brd 192.168.1.255 scope global dynamic wlan0\\       valid_lft 8s
4: docker0    inet 172.17.0.1/16 brd 172.17.255.255 scope global docker0\\       valid_lft forever
5: br-0123456789ab    inet 172.18.0.1/16 brd 172.18.255.255 scope global br-0123456789ab\\       valid_lft 8s
6: tailscale0    inet 100.101.102.103/32 scope global tailscale0\\       valid_lft forever
7: eth1@if12    inet 169.254.7.7/16 scope link eth1\\       valid_lft forever
8: eth2@if14    inet 10.77.5.3/24 scope global eth2\\       valid_lft forever preferred_lft forever
9: br0    inet 10.9.0.1/24 scope global br0\\       valid_lft forever preferred_lft forever
wireless: /sys/class/net/wlan0/wireless
"""
IFCONFIG_OF_MACOS = """\
lo0: flags=8049<UP,LOOPBACK,RUNNING,MULTICAST> mtu 16384
\toptions=1203<RXCSUM,TXCSUM,TXSTATUS,SW_TIMESTAMP>
\tinet 127.0.0.1 netmask 0xff000000
\tinet6 ::1 prefixlen 128
\tinet6 fe80::1%lo0 prefixlen 64 scopeid 0x1
en0: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\tether 3c:22:fb:00:00:01
\tinet6 fe80::14b1:aaaa:bbbb:cccc%en0 prefixlen 64 secured scopeid 0xc
\tinet6 fd00:1::1c2b:3d4e prefixlen 64 autoconf secured
\tinet6 fd00:1::9f9f:1 prefixlen 64 autoconf temporary
\tinet 192.168.1.20 netmask 0xffffff00 broadcast 192.168.1.255
\tmedia: autoselect
\tstatus: active
bridge0: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\tmember: en2 flags=3<LEARNING,DISCOVER>
\tinet 10.10.0.1 netmask 0xffffff00 broadcast 10.10.0.255
utun3: flags=8051<UP,POINTOPOINT,RUNNING,MULTICAST> mtu 1280
\tinet 100.64.0.9 --> 100.64.0.9 netmask 0xffffffff

Hardware Port: Ethernet
Device: en1
Ethernet Address: 3c:22:fb:00:00:02

Hardware Port: Thunderbolt Bridge
Device: bridge0
Ethernet Address: 3c:22:fb:00:00:03

Hardware Port: Wi-Fi
Device: en0
Ethernet Address: 3c:22:fb:00:00:01
"""
IFCONFIG_OF_NET_TOOLS = """\
eth0: flags=4163<UP,BROADCAST,RUNNING,MULTICAST>  mtu 1500
        inet 10.0.0.7  netmask 255.255.255.0  broadcast 10.0.0.255
        inet6 fe80::5054:ff:fe00:1  prefixlen 64  scopeid 0x20<link>
        RX packets 1  bytes 2 (2.0 B)
lo: flags=73<UP,LOOPBACK,RUNNING>  mtu 65536
        inet 127.0.0.1  netmask 255.0.0.0
"""
IFCONFIG_OF_BUSYBOX = """\
eth0      Link encap:Ethernet  HWaddr 02:42:AC:11:00:02
          inet addr:10.0.0.8  Bcast:10.0.0.255  Mask:255.255.255.0
          inet6 addr: fd00::8/64 Scope:Global
          UP BROADCAST RUNNING MULTICAST  MTU:1500  Metric:1
"""


def way(ip: str, mb_s: float = 0.0, ms: float = 1.0, failure: str = "") -> Way:
    interface = "Wi-Fi" if ip.startswith("192.168.1.") else "eth0"
    if failure:
        return Way(ip, interface, reason=failure)
    return Way(ip, interface, ms / 1e3, mb_s, mb_s)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            IP_ADDR,
            [
                "192.168.50.2 (eth0)",
                "192.168.1.5 (Wi-Fi)",
                "100.101.102.103 (tailscale0)",
                "10.77.5.3 (eth2)",
                "10.9.0.1 (br0)",
                "fd12:3456::2 (eth0)",
            ],
        ),
        (
            IFCONFIG_OF_MACOS,
            [
                "192.168.1.20 (Wi-Fi)",
                "10.10.0.1 (Thunderbolt Bridge)",
                "100.64.0.9 (utun3)",
                "fd00:1::1c2b:3d4e (Wi-Fi)",
            ],
        ),
        (IFCONFIG_OF_NET_TOOLS, ["10.0.0.7 (eth0)"]),
        (IFCONFIG_OF_BUSYBOX, ["10.0.0.8 (eth0)", "fd00::8 (eth0)"]),
        ("2: eth0    inet $(reboot)/24 scope global eth0", []),
        ("", []),
    ],
    ids=["ip", "macOS", "net-tools", "busybox", "nonsense", "nothing"],
)
def test_addresses_that_others_can_use_are_found(text: str, found: list[str]) -> None:
    assert [each.place for each in parse_addresses(text)] == found


def test_this_machine_tells_its_addresses() -> None:
    try:
        found = addresses_of(HERE)
    except LaunchError as error:
        pytest.skip(str(error))
    assert all(not each.address.startswith("127.") for each in found)
    for each in found:
        family = socket.AF_INET6 if ":" in each.address else socket.AF_INET
        with socket.socket(family) as sock:
            sock.bind((each.address, 0))  # else it were somebody else's


@pytest.mark.parametrize(
    ("ways", "ip"),
    [
        ([way("192.168.1.5", 10, 4.2), way("192.168.50.1", 117.5, 0.3)], "192.168.50.1"),
        ([way("10.0.0.1", 100, 2.0), way("10.0.1.1", 91, 0.5), way("10.0.2.1", 89)], "10.0.1.1"),
        ([way("10.0.0.1", 99, 0.32), way("fd00::1", 100, 0.29)], "10.0.0.1"),
        ([way("10.0.0.1", failure="no answer"), way("10.0.1.1", 0.5, 80)], "10.0.1.1"),
        ([way("10.0.0.1", 11), way("192.168.1.5", 60, 3)], "192.168.1.5"),
    ],
    ids=["bandwidth", "round trip", "first", "open", "Wi-Fi that carries far more"],
)
def test_the_best_way_is_taken_and_the_others_are_told(ways: list[Way], ip: str) -> None:
    best = best_of(ways)
    assert best.address == ip
    for each in ways:
        assert each.shown in best.reason


def test_of_ways_that_are_closed_it_is_told_why() -> None:
    best = best_of([way("10.0.0.1", failure="refused"), way("10.0.1.1", failure="no route")])
    assert not best.is_open
    assert best.reason == "10.0.0.1 (eth0): refused; 10.0.1.1 (eth0): no route"


TOLD = {"error": None, "ms": 0.3, "mb_per_s": 117.5, "down_mb_per_s": 7.0}


@pytest.mark.parametrize(
    ("found", "failure"),
    [
        ({"error": "ECONNREFUSED", "why": "x"}, "refused"),
        ({"error": "ETIMEDOUT"}, "no answer"),
        ({"error": "stranger"}, "somebody else answers"),
        ({"error": "E\x1b[2J\n# x"}, "broke off"),
        (TOLD | {"ms": float("nan")}, "not measured"),
        (TOLD | {"ms": []}, "not measured"),
        (TOLD | {"down_mb_per_s": "inf"}, "not measured"),
        ({}, "not measured"),
    ],
)
def test_why_there_is_no_way_is_read(found: dict[str, Any], failure: str) -> None:
    assert read_way(IPV4, found) == Way("127.0.0.1", "lo", reason=failure)


def test_what_the_probe_says_is_read() -> None:
    assert read_way(IPV4, TOLD) == Way("127.0.0.1", "lo", 0.3e-3, 117.5, 7.0)


def test_the_ways_to_this_machine_are_measured() -> None:
    """Also where the wanted port is taken at one address; an address that is none of its own has no way."""
    ways = [IPV4, *([IPV6] if has_ipv6() else []), Way("192.0.2.250", "eth0")]
    with socket.create_server((IPV4.address, 0)) as taken:
        port = taken.getsockname()[1]
        words = ("listen", port, TOKEN, 60, *(each.address for each in ways))
        with listening(HERE, probe_script("", *words), 60.0) as listener:
            *links, foreign = (measure(HERE, each, listener, TOKEN) for each in ways)
    assert listener.ports[IPV4.address] != port
    assert all(each.is_open and each.up_mb_s > 0 and each.down_mb_s > 0 for each in links)
    assert foreign.reason == "nobody may listen there"
    assert measure(HERE, IPV4, listener, TOKEN).reason == "refused", "it has ended"


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("programs", "code", "said"),
    [
        ({"uv": "echo $1 $2 $3 $4 $5 $7 $8 $9 >&2"}, 0, f"{UV} -c measure 127.0.0.1 1"),
        ({"python3": "exit 1", "uv": "echo this is uv >&2"}, 0, "this is uv"),
        ({"python3": "echo it is python3 >&2"}, 0, "it is python3"),
        ({}, 69, "there is neither python3 (3.9 or newer) nor uv"),
    ],
)
def test_the_python_of_a_machine_is_python3_that_is_not_too_old_or_uvs(
    tmp_path: Path, programs: dict[str, str], code: int, said: str
) -> None:
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ["/bin/sh", "-c", MEASURE],
        env={"PATH": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (code, f"{said}\n")


@dataclass(frozen=True)
class Scripted(Host):
    """A machine that runs a script before each other one."""

    first: str = ""

    def argv(self, script: str, **_: bool) -> list[str]:
        return ["/bin/sh", "-c", f"{self.first}\n{script}"]


ABSENT = Scripted("pi5", "pi5", "echo 'ssh: connect to host pi5: No route to host' >&2; exit 255")
BARE = Scripted("pi5", "pi@pi5", "PATH=/nowhere")
ALONE = Scripted("mini1", "m", "echo 'addresses =0'; exit 0")


@pytest.mark.parametrize(
    ("host", "why"),
    [
        (ABSENT, r"^pi5 \(pi5\): there is no route to it"),
        (BARE, r"^pi5 \(pi@pi5\): its links cannot be measured: there is neither python3"),
    ],
)
def test_why_nothing_can_be_measured_is_told(host: Host, why: str) -> None:
    with pytest.raises(LaunchError, match=why), listening(host, MEASURE, 9):
        pass
    with pytest.raises(LaunchError, match=why):
        measure(host, IPV4, NOBODY, "x")


def test_a_machine_without_addresses_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"^mini1 \(m\) has no address in any network: check its"):
        addresses_of(ALONE)


@pytest.mark.parametrize(
    ("names", "best"),
    [
        (("Wi-Fi", "Ethernet", "Thunderbolt Bridge"), "Thunderbolt Bridge"),
        (("wlan0", "eth0"), "eth0"),
        (("Wi-Fi", "en5"), "en5"),
    ],
)
def test_of_equal_ways_a_cable_comes_before_wi_fi(names: tuple[str, ...], best: str) -> None:
    ways = [
        Way(f"10.0.0.{number}", name, (number + 1.0) / 1e3, 100.0, 100.0)
        for number, name in enumerate(names)
    ]
    assert best_of(ways).interface == best
