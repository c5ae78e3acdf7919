"""A worker's way to the server: patient, quiet, bounded, and final where asking again is of no use."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from connection_pairs import RUN
from harness import SECRET, free_port
from peers import DEADLINE_S, HandledDoor, follower
from smolcluster.errors import (
    AuthError,
    ConnectTimeout,
    PeerLost,
    Rejected,
    RunFailed,
    VersionDiffers,
    WrongPeer,
)
from smolcluster.server.joining import RunOver, check_goes_on
from smolcluster.wire import node
from smolcluster.wire.connection import Connection
from smolcluster.wire.dialling import Address
from smolcluster.wire.handshake import refuse, reject
from smolcluster.wire.inbox import MessageReceived, SessionClosed
from smolcluster.wire.messages import End, Goodbye, Reject, Welcome
from smolcluster.wire.security import Secret

Joining = Callable[..., "Future[tuple[Connection, Welcome]]"]


def join(
    address: Address, timeout_s: float, lines: list[str], secret: Secret = SECRET
) -> tuple[Connection, Welcome]:
    return follower(address, lines, secret=secret).join(Welcome, timeout_s)


@pytest.fixture(autouse=True)
def what_is_in_the_way_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "SAY_AFTER_S", 0.0)


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def start_joining(door: HandledDoor, lines: list[str]) -> Iterator[Joining]:
    """Begins to join in a thread."""
    with ThreadPoolExecutor(1) as pool:

        def start(
            timeout_s: float = DEADLINE_S,
            secret: Secret = SECRET,
            server: str | None = None,
        ) -> "Future[tuple[Connection, Welcome]]":
            address = Address("127.0.0.1", door.port, server)
            return pool.submit(join, address, timeout_s, lines, secret)

        yield start


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits between attempts, which take no time."""
    waits: list[float] = []
    monkeypatch.setattr(node, "time", SimpleNamespace(sleep=waits.append))
    return waits


def test_a_name_that_stays_taken_is_a_refusal(
    delays: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> Connection:
        raise Rejected("the name pi5 is taken", "busy", 2.0, is_proved=True)

    monkeypatch.setattr(node, "connect", refuse)
    with pytest.raises(Rejected, match="taken"):
        follower(Address("h", 1), [], start_timeout_s=0.05).ask()
    assert delays


def test_a_server_that_is_there_welcomes_at_once_and_in_silence(
    door: HandledDoor, start_joining: Joining, lines: list[str]
) -> None:
    future = start_joining()
    door.admit(RUN)
    connection, welcome = future.result(DEADLINE_S)
    assert welcome.run == RUN
    assert lines == []
    connection.close()


def test_a_setting_that_this_version_does_not_know_is_named(
    door: HandledDoor, start_joining: Joining
) -> None:
    settings = RUN.model_dump(mode="json")
    settings["train"]["of_tomorrow"] = 1
    future = start_joining()
    hand = door.admit(RUN, settings=settings)
    with pytest.raises(VersionDiffers, match=r"train\.of_tomorrow.*install the server's version"):
        future.result(DEADLINE_S)
    hand.hear_the_end()


def test_another_server_than_the_one_that_is_wanted_is_doubted(
    door: HandledDoor, start_joining: Joining, lines: list[str], delays: list[float]
) -> None:
    """Somebody on the way, who does not know the secret, may have led this worker to it."""
    future = start_joining(server="mini1")
    with pytest.raises(WrongPeer, match="it wants 'mini1', which this is not"):
        door.open(node="pi5")
    door.admit(RUN)
    connection, _ = future.result(DEADLINE_S)
    assert len(lines) == 1
    assert f"127.0.0.1:{door.port}: 'pi5' answers there, not 'mini1'" in lines[0]
    assert len(delays) == 1
    connection.close()


def test_a_server_that_is_not_there_is_waited_for_with_one_line_and_a_deadline(
    lines: list[str],
) -> None:
    port = free_port()
    with pytest.raises(ConnectTimeout) as caught:
        join(Address("127.0.0.1", port), 0.5, lines)
    assert len(lines) == 1, "however many attempts"
    assert "waiting for the server" in lines[0]
    assert str(port) in lines[0]
    for part in (str(port), "refused", "--server", "start the server"):
        assert part in str(caught.value)
    assert caught.value.exit_code == 75


@pytest.mark.parametrize(("timeout_s", "is_said"), [(60.0, True), (86400.0, False)])
def test_only_a_wait_with_an_end_in_sight_says_how_long_it_is(
    delays: list[float], monkeypatch: pytest.MonkeyPatch, timeout_s: float, *, is_said: bool
) -> None:
    causes = [ConnectTimeout("nobody there"), Rejected("enough", "node")]

    def refuse(*_: object) -> Connection:
        raise causes.pop(0)

    monkeypatch.setattr(node, "connect", refuse)
    lines: list[str] = []
    with pytest.raises(Rejected, match="enough"):
        join(Address("h", 1), timeout_s, lines)
    assert ["up to" in line for line in lines] == [is_said]


def test_attempts_become_rarer_up_to_a_limit_and_are_spread(
    delays: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = 0

    def refuse(*_: object) -> Connection:
        nonlocal attempts
        attempts += 1
        if attempts == 12:
            raise Rejected("enough", "node")
        raise ConnectTimeout("nobody there")

    monkeypatch.setattr(node, "connect", refuse)
    lines: list[str] = []
    with pytest.raises(Rejected, match="enough"):
        join(Address("h", 1), 60.0, lines)
    assert len(delays) == 11
    for attempt, delay_s in enumerate(delays):
        whole = min(0.1 * 2**attempt, 0.5)
        assert whole / 2 <= delay_s <= whole
    assert len(lines) == 1


def test_another_obstacle_is_said_too(
    door: HandledDoor, start_joining: Joining, lines: list[str], delays: list[float]
) -> None:
    future = start_joining()
    for reason in ("worker id 1 is in use", "worker id 1 is in use", "something else"):
        client = door.open()
        refuse(client, "busy", reason, retry_after_s=0.01)
    door.admit(RUN)
    connection, _ = future.result(DEADLINE_S)
    assert len(lines) == 2
    assert "in use" in lines[0]
    assert "something else" in lines[1]
    connection.close()


def test_a_busy_worker_id_is_asked_for_again_when_the_server_says(
    door: HandledDoor, start_joining: Joining, delays: list[float]
) -> None:
    future = start_joining()
    client = door.open()
    refuse(client, "busy", "worker id 1 is in use", retry_after_s=7.0)
    door.admit(RUN)
    connection, _ = future.result(DEADLINE_S)
    assert delays == [7.0]
    connection.close()


def test_a_worker_id_that_stays_busy_is_given_up_with_the_reason(
    door: HandledDoor, start_joining: Joining
) -> None:
    future = start_joining(timeout_s=0.0)
    client = door.open()
    refuse(client, "busy", "worker id 1 is in use", retry_after_s=2.0)
    with pytest.raises(ConnectTimeout, match="worker id 1 is in use"):
        future.result(DEADLINE_S)


def test_another_secret_is_what_ended_the_patience(
    door: HandledDoor, start_joining: Joining, lines: list[str]
) -> None:
    future = start_joining(timeout_s=0.0, secret=Secret(Path("my-secret"), b"x" * 64))
    with pytest.raises(AuthError):
        door.open()
    with pytest.raises(AuthError, match="my-secret"):
        future.result(DEADLINE_S)
    assert lines == []


def test_a_refusal_without_another_time_is_final(door: HandledDoor, start_joining: Joining) -> None:
    future = start_joining()
    client = door.open()
    refuse(client, "node", "node 'x' is not in host_ip")
    with pytest.raises(Rejected, match="host_ip") as caught:
        future.result(DEADLINE_S)
    assert caught.value.exit_code == 78


@pytest.mark.parametrize("code", ["over", "failed", "node", "auth", "protocol"])
def test_a_refusal_that_anybody_may_have_said_is_doubted(
    door: HandledDoor, start_joining: Joining, delays: list[float], code: str
) -> None:
    future = start_joining()
    reject(door.accept(), code, "every sample has been applied")
    door.admit(RUN)
    connection, welcome = future.result(DEADLINE_S)
    assert welcome.run == RUN
    connection.close()


@pytest.mark.parametrize("code", ["over", "failed"])
def test_nobody_without_the_secret_can_say_that_the_run_is_over(
    door: HandledDoor, start_joining: Joining, code: str
) -> None:
    future = start_joining(timeout_s=0.0)
    reject(door.accept(), code, "every sample has been applied")
    with pytest.raises(Rejected) as caught:
        future.result(DEADLINE_S)
    assert not caught.value.is_proved


@pytest.mark.parametrize(("code", "error"), [("over", RunOver), ("failed", RunFailed)])
def test_a_returning_worker_hears_how_the_run_ended(
    door: HandledDoor, start_joining: Joining, code: str, error: type[Exception]
) -> None:
    future = start_joining()
    client = door.open()
    refuse(client, code, "every sample has been applied")
    with pytest.raises(error, match="every sample"):
        future.result(DEADLINE_S)


def test_only_its_server_ends_what_a_process_takes_part_in() -> None:
    said = (Goodbye(reason="stopped"), End(ok=True, sentence=""), Reject(code="over", sentence=""))
    for event in (*(MessageReceived(1, each) for each in said), SessionClosed(1, "cut")):
        check_goes_on(event, "the server")
    with pytest.raises(PeerLost, match="the server has left: stopped"):
        check_goes_on(MessageReceived(0, said[0]), "the server")


def test_a_process_that_is_let_in_too_early_comes_again() -> None:
    reject = Reject(code="busy", sentence="the store pi5 is another live process", retry_after_s=2)
    with pytest.raises(PeerLost, match="pi5 is another live process"):
        check_goes_on(MessageReceived(0, reject), "the server")
    for_good = reject.model_copy(update={"retry_after_s": None})
    with pytest.raises(Rejected):
        check_goes_on(MessageReceived(0, for_good), "the server")


def test_a_server_that_breaks_off_is_asked_again(
    door: HandledDoor, start_joining: Joining, delays: list[float]
) -> None:
    future = start_joining()
    door.open().talk.connection.close()
    door.admit(RUN)
    connection, welcome = future.result(DEADLINE_S)
    assert welcome.run == RUN
    assert len(delays) == 1, "after a pause"
    connection.close()
