"""Who can be invited, what is announced, which invitation is meant, and where the secret is kept."""

import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from io import StringIO
from pathlib import Path

import pytest
from zeroconf import ServiceInfo

from harness import local_settings
from reading import Terminal, status_of
from smolcluster.algorithms.entry import server_parser
from smolcluster.algorithms.process import server_settings
from smolcluster.cli import main
from smolcluster.configs.resolve import save_resolved
from smolcluster.configs.schema import ClusterConfig
from smolcluster.configs.spec import get_algorithm
from smolcluster.errors import AuthError, ConfigError, LaunchError, PeerLost
from smolcluster.launch import find as finding
from smolcluster.launch.invite import coming, inviting
from smolcluster.launch.invite.coming import chosen, handed_over
from smolcluster.launch.invite.inviting import Inviter, serving
from smolcluster.launch.invite.mdns import (
    MOST_ADDRESSES,
    SERVICE,
    Announced,
    announcing,
    find_invitations,
    invitations,
)
from smolcluster.launch.invite.start import check_invitable
from smolcluster.launch.plan import Request
from smolcluster.runs.paths import RunPaths, create_run
from smolcluster.runs.status import write_status
from smolcluster.server import listening
from smolcluster.server.listening import opened
from smolcluster.utils.retry import Deadline
from smolcluster.wire.connection import connect
from smolcluster.wire.invitation import Invitation, handover, read_code
from smolcluster.wire.security import Secret, keep_secret
from waiting import eventually

LOOPBACK = "127.0.0.1"
OWN = f"edp-{os.getpid()}"
"""No other run of this test has this name."""
CODE, OTHER = read_code("k7mp-3fxq"), read_code("0000-0000")
KEY = b"0123456789abcdef" * 4


def invitation(run_id: str = OWN, code: bytes = CODE) -> Invitation:
    return Invitation(run_id, code, handover(Secret(Path("s"), KEY), None, 65432))


# --- who can be invited


def cluster(**changes: object) -> ClusterConfig:
    return ClusterConfig.model_validate(
        {
            "host_ip": {"mini1": "10.0.0.1", "pi5": "10.0.0.1"},
            "num_workers": 1,
            "workers": ["pi5"],
            "server": "mini1",
            **changes,
        }
    )


@pytest.mark.parametrize("name", ["edp", "syncps", "diloco", "pipeline"])
def test_runs_whose_workers_may_come_late_can_be_joined(name: str) -> None:
    check_invitable(Request(get_algorithm(name)), cluster(), local=False)


@pytest.mark.parametrize(
    ("name", "changes", "local", "why"),
    [
        ("mesh", {}, False, "begin together"),
        ("edp", {"elastic": False}, False, "elastic is false"),
        ("edp", {"encryption": "off"}, False, "encryption is off"),
        ("edp", {"encryption": "off"}, True, "encryption is off"),
        ("pipeline", {}, True, "--local its stages"),
        ("edp", {"servers": ["mini1", "pi5"]}, True, "--local its stores"),
        ("edp", {"host_ip": {"mini1": "127.0.0.1", "pi5": "127.0.0.1"}}, False, "host_ip.mini1"),
    ],
)
def test_runs_that_nobody_could_join_invite_nobody(
    name: str,
    changes: dict[str, object],
    local: bool,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("smolcluster.launch.invite.start.own_addresses", lambda: ("10.0.0.1",))
    with pytest.raises(ConfigError, match=why):
        check_invitable(Request(get_algorithm(name)), cluster(**changes), local=local)


def test_a_script_and_a_machine_without_a_network_invite_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match="script"):
        request = Request(get_algorithm("edp"), script="train.py")
        check_invitable(request, cluster(), local=False)
    monkeypatch.setattr("smolcluster.launch.invite.start.own_addresses", lambda: ())
    with pytest.raises(ConfigError, match="no address"):
        check_invitable(Request(get_algorithm("edp")), cluster(), local=True)


def test_a_launch_that_could_invite_nobody_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SMOLCLUSTER_RUNS_DIR", str(tmp_path))
    words = ["--invite", "--no-tmux", "--override", "elastic=false"]
    assert main(["launch", "syncps", "--local", *words]) == 2
    assert "elastic is false" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_server_alone_is_told_to_be_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SMOLCLUSTER_RUNS_DIR", str(tmp_path))
    monkeypatch.setattr("smolcluster.launch.invite.start.own_addresses", lambda: ("10.0.0.1",))
    assert main(["launch", "diloco", "--local", "--workers", "2", "--invite", "--dry-run"]) == 0
    server, *workers = capsys.readouterr().out.split("\nworker")
    assert " --open " in server
    assert len(workers) == 2
    assert not any("--open" in each for each in workers)


def test_a_server_that_is_told_so_listens_at_all_addresses_of_its_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listening, "own_addresses", lambda: ("10.0.0.1", "10.0.1.1"))
    parse = server_parser(get_algorithm("edp")).parse_args
    for words, bind in (
        (["--local", "--open"], (LOOPBACK, "10.0.0.1", "10.0.1.1")),
        (["--local"], (LOOPBACK,)),
    ):
        assert server_settings("edp", parse(words)).cluster.bind == bind


def run_of(tmp_path: Path, *overrides: str, is_open: bool = False) -> RunPaths:
    """A run of this machine, whose server this process seems to be."""
    paths = create_run(tmp_path, "edp-1")
    settings = local_settings("port=5000", *overrides)
    save_resolved(opened(settings) if is_open else settings, paths.config)
    write_status(paths.status, status_of())
    return paths


def test_a_run_that_listens_to_its_machine_alone_invites_nobody_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "own_addresses", lambda: ("10.0.0.1",))
    monkeypatch.setattr("smolcluster.launch.invite.start.own_addresses", lambda: ("10.0.0.1",))
    monkeypatch.setenv("SMOLCLUSTER_SECRET_FILE", str(keep_secret(tmp_path / "s", KEY).path))
    with pytest.raises(ConfigError, match="alone: launch or resume it with --invite"):
        inviting._gives(run_of(tmp_path / "1"), None, is_checked=False)
    with pytest.raises(ConfigError, match="elastic is false"):
        closed = run_of(tmp_path / "2", "elastic=false", is_open=True)
        inviting._gives(closed, None, is_checked=False)
    gives = inviting._gives(run_of(tmp_path / "3", is_open=True), None, is_checked=False)
    assert gives == handover(Secret(Path("s"), KEY), None, 5000)


def test_a_run_that_is_over_invites_nobody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], as_a_process: None
) -> None:
    assert main(["invite", str(run_of(tmp_path).root)]) == 1
    assert "is over, or has not begun" in capsys.readouterr().err


# --- what is announced


def heard() -> list[Announced]:
    """What is announced of this test's run.

    In less than the usual time it is asked for once, and the answer to that may go to another listener.
    """
    return [each for each in find_invitations(interfaces=[LOOPBACK]) if each.run_id == OWN]


def test_an_invitation_is_heard_of_until_it_is_withdrawn() -> None:
    with announcing(OWN, [LOOPBACK], 4321, [LOOPBACK]):
        eventually(lambda: heard() == [Announced(OWN, (LOOPBACK,), 4321)])
    eventually(lambda: heard() == [])


def test_two_that_announce_the_same_name_are_both_heard() -> None:
    with (
        announcing(OWN, [LOOPBACK], 4321, [LOOPBACK]),
        announcing(OWN, [LOOPBACK], 4322, [LOOPBACK]),
    ):
        eventually(lambda: [each.port for each in heard()] == [4321, 4322])


def service(run_id: object, *addresses: str, port: int = 1) -> ServiceInfo:
    properties = {} if run_id is None else {"run": run_id}
    return ServiceInfo(
        SERVICE, f"x.{SERVICE}", port=port, properties=properties, parsed_addresses=list(addresses)
    )


def test_what_is_no_invitation_is_left_out() -> None:
    infos = [
        service("../../etc", "10.0.0.1"),
        service("\x1b[2J", "10.0.0.1"),
        service("latest", "10.0.0.1"),
        service(b"\xff\xfe", "10.0.0.1"),
        service(None, "10.0.0.1"),
        service("edp-1", "fe80::1"),
        service("edp-1"),
        service("edp-1", "10.0.0.1", port=0),
        service("edp-2", "10.0.0.9", "10.0.0.1"),
    ]
    assert invitations(infos) == [Announced("edp-2", ("10.0.0.1", "10.0.0.9"), 1)]


def test_one_that_announces_hundreds_of_addresses_takes_nobodys_time() -> None:
    many = [f"10.0.{number}.1" for number in range(200)]
    [found] = invitations([service("edp-1", *many)])
    assert len(found.addresses) == MOST_ADDRESSES


# --- which is meant


def at(run_id: str, port: int) -> Announced:
    return Announced(run_id, (LOOPBACK,), port)


FOUND = [at("edp-1", 1), at("edp-1", 2), at("syncps-1", 3)]


def test_all_that_say_they_are_the_run_are_asked() -> None:
    assert chosen(FOUND, "edp-1") == FOUND[:2]
    assert chosen(FOUND[:2], None) == FOUND[:2]


def test_of_several_runs_one_is_named_or_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"2 runs .* --run: edp-1, syncps-1"):
        chosen(FOUND, None)
    monkeypatch.setattr(coming, "asked", lambda names, _unclear: names[1])
    assert chosen(FOUND, None) == FOUND[2:]


def test_without_an_invitation_it_is_said_how_to_get_one() -> None:
    with pytest.raises(LaunchError, match="smolcluster invite"):
        chosen([], None)
    with pytest.raises(LaunchError, match="into run edp-9"):
        chosen(FOUND, "edp-9")


def test_many_that_say_they_are_the_run_are_not_each_given_a_guess() -> None:
    with pytest.raises(ConfigError, match=r"4 machines say .*--invitation"):
        chosen([at("edp-1", port) for port in range(4)], None)


def test_a_choice_is_a_number_or_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    for answer, meant in (("2\n", "b"), ("a\n", "a")):
        monkeypatch.setattr("sys.stdin", Terminal(answer))
        assert finding.asked(["a", "b"], "unclear") == meant
    monkeypatch.setattr("sys.stdin", Terminal("3\n"))
    with pytest.raises(ConfigError, match="'3' is none"):
        finding.asked(["a", "b"], "unclear")


@pytest.mark.parametrize("place", ["10.0.0.1", "edp-1", "10.0.0.1:", "a/b:1"])
def test_an_invitations_address_has_a_port(place: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        coming._at(place, None)
    assert coming._at("10.0.0.1:4321", None) == Announced(None, ("10.0.0.1",), 4321)


# --- asking for it


@contextmanager
def inviters(*some: Invitation) -> Iterator[tuple[list[Announced], list[str]]]:
    """These invitations, and what they say."""
    said: list[str] = []
    with ExitStack() as stack:
        ports = [stack.enter_context(serving(each, LOOPBACK, said.append)) for each in some]
        yield [at(each.run_id, port) for each, port in zip(some, ports, strict=True)], said


def test_a_liar_learns_nothing_and_the_code_finds_the_run() -> None:
    said: list[str] = []
    with inviters(invitation(code=OTHER), invitation()) as (alike, _):
        handed = handed_over([at(OWN, 1), *alike], CODE, said.append)
    assert (handed.run_id, bytes.fromhex(handed.gives.secret), handed.host) == (OWN, KEY, LOOPBACK)
    assert [line.partition(": ")[0] for line in said] == [
        f"not the one at {LOOPBACK}:1",
        f"not the one at {alike[0]}",
    ]


def test_a_wrong_code_is_said_though_another_one_does_not_answer() -> None:
    with inviters(invitation()) as (alike, said), pytest.raises(AuthError, match="2 more may"):
        handed_over([*alike, at(OWN, 1)], OTHER, said.append)
    with pytest.raises(LaunchError, match="does not answer"):
        handed_over([at(OWN, 1)], OTHER, said.append)


def test_a_wrong_code_is_asked_for_again_on_a_terminal_until_the_invitation_has_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(coming, "join", lambda _server, _wanted: 0)
    secret = tmp_path / "secret"

    def come(person: StringIO) -> int:
        monkeypatch.setattr("sys.stdin", person)
        with inviters(invitation()) as ([own], _):
            named = ["--run", OWN, "--invitation", f"{LOOPBACK}:{own.port}"]
            return main(["join", *named, "--secret-file", str(secret)])

    wrong, right = "0000-0000\n", "k7mp-3fxq\n"
    assert come(Terminal(f"{wrong}k7mp\n{wrong}{right}")) == 0
    assert secret.read_text().strip() == KEY.decode()
    secret.unlink()
    said = capsys.readouterr()
    assert said.err.count("its code: ") == 4
    for line in ("is wrong; 2 more", "8 letters and digits", "is wrong; 1 more"):
        assert line in said.out
    for person, why in (
        (Terminal(3 * wrong + right), "is wrong, and the invitation has ended: 3 wrong"),
        (Terminal(wrong), "8 letters"),
        (StringIO(wrong + right), "is wrong; 2 more"),
    ):
        assert come(person) != 0
        assert why in capsys.readouterr().err
        assert not secret.exists()


def test_those_who_come_and_say_nothing_are_in_nobodys_way() -> None:
    with inviters(invitation()) as (alike, _), ExitStack() as stack:
        for _ in range(2 * Inviter.max_strangers):
            silent = connect(LOOPBACK, alike[0].port, 10.0)
            stack.callback(silent.close)
        assert handed_over(alike, CODE, print).run_id == OWN


def test_an_invitation_says_who_came() -> None:
    with inviters(invitation()) as (alike, said):
        handed_over(alike, CODE, print)
        with pytest.raises(AuthError):
            handed_over(alike, OTHER, print)
    assert any(line.startswith(f"{LOOPBACK} has the code") for line in said)


def test_a_flood_of_strangers_does_not_flood_the_terminal() -> None:
    with inviters(invitation()) as (alike, said):
        for _ in range(20):
            stranger = connect(LOOPBACK, alike[0].port, 10.0)
            stranger.end_sending()
            with closing(stranger), pytest.raises(PeerLost):
                stranger.receive(frozenset(), Deadline(10.0))
        with pytest.raises(AuthError):
            handed_over(alike, OTHER, print)
        eventually(lambda: "the code is wrong" in said[-1])
    assert len(said) == 6  # the 1st, 2nd, 4th, 8th and 16th stranger, and the wrong code


# --- what is kept


def test_the_secret_is_kept_for_its_user_alone(tmp_path: Path) -> None:
    file = tmp_path / "smolcluster" / "secret"
    assert keep_secret(file, KEY) == Secret(file, KEY)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert keep_secret(file, KEY).path == file


def test_a_machines_own_secret_is_not_replaced(tmp_path: Path) -> None:
    own = keep_secret(tmp_path / "secret", b"own" * 20)
    other = keep_secret(own.path, KEY)
    assert other.path.parent == tmp_path
    assert other.path.name.startswith("secret-")
    assert keep_secret(own.path, KEY) == other
    assert keep_secret(own.path, b"own" * 20) == own
    assert stat.S_IMODE(other.path.stat().st_mode) == 0o600


def test_small_packets_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smolcluster.launch.invite.coming.ETHERNET_MTU", 10**6)
    assert "packets hold" in (coming._small_packets(LOOPBACK) or "")
    assert coming._small_packets("203.0.113.1") is None


@pytest.mark.parametrize("option", ["--run=r", "--invitation=10.0.0.1:4000"])
def test_what_names_an_invitation_goes_with_no_run(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["join", "latest", option]) == ConfigError.exit_code
    assert "leave out the run" in capsys.readouterr().err
