"""A code brings the secret, and nothing else does: wrong ones, what was said before, what comes back."""

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from spake2 import SPAKE2_A, SPAKE2_B

from connection_pairs import DEADLINE_S, connection_pair, raw_and_connection
from smolcluster.errors import (
    AuthError,
    ConfigError,
    PeerLost,
    ProtocolError,
    SmolclusterError,
    WrongCode,
    WrongPeer,
)
from smolcluster.utils.retry import Deadline
from smolcluster.wire.connection import Connection
from smolcluster.wire.frames import build_frame
from smolcluster.wire.handshake import Talk
from smolcluster.wire.invitation import (
    MAX_SECRET_NBYTES,
    MOST_WRONG,
    SYMBOLS,
    VALID_S,
    Asking,
    Handed,
    Handover,
    Invitation,
    Inviting,
    ask,
    handover,
    new_code,
    read_code,
)
from smolcluster.wire.messages import Challenge, Message, Proof, frame_of
from smolcluster.wire.security import Secret
from waiting import Clock

pytestmark = [pytest.mark.timeout(180)]

KEY = b"0123456789abcdef" * 4
GIVES = handover(Secret(Path("/home/me/secret"), KEY), None, 65432)
RUN = "diloco-1"
RIGHT, WRONG = b"k7mp3fxq", b"k7mp3fxr"
IN_TIME = DEADLINE_S


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def invitation(clock: Clock) -> Invitation:
    return Invitation(RUN, RIGHT, GIVES, clock=clock)


def answered(invitation: Invitation, connection: Connection) -> None:
    try:
        invitation.answer(connection, Deadline(IN_TIME))
    finally:
        connection.close()


Attempt = Callable[..., tuple[str, Handover]]


@pytest.fixture
def attempt(invitation: Invitation, pool: ThreadPoolExecutor) -> Attempt:
    """Join by a code; returns what was handed over, or raises what the joining side does."""

    def join(code: bytes = RIGHT, run_id: str | None = RUN) -> tuple[str, Handover]:
        with connection_pair(proved=False) as (ours, theirs):
            inviting = pool.submit(answered, invitation, theirs)
            try:
                return ask(ours, code, run_id, Deadline(IN_TIME))
            finally:
                ours.close()
                inviting.exception(DEADLINE_S)

    return join


def test_the_right_code_brings_the_secret(attempt: Attempt) -> None:
    for run_id in (RUN, None):
        found, gives = attempt(run_id=run_id)
        assert (found, bytes.fromhex(gives.secret)) == (RUN, KEY)
        assert (gives.host, gives.port) == (None, 65432)


def test_a_wrong_code_brings_nothing_and_three_end_the_invitation(
    attempt: Attempt, invitation: Invitation
) -> None:
    for left in range(MOST_WRONG - 1, -1, -1):
        assert invitation.over is None
        said = f"{left} more may" if left else "is wrong, and the invitation has ended: 3 wrong"
        with pytest.raises(AuthError, match=said) as refused:
            attempt(WRONG)
        assert isinstance(refused.value, WrongCode) == (left > 0)
    assert invitation.over == "3 wrong codes were tried"
    with pytest.raises(AuthError, match="ended: 3 wrong codes"):
        attempt(RIGHT)


def test_the_right_code_forgives_no_wrong_one(attempt: Attempt, invitation: Invitation) -> None:
    for code in (WRONG, WRONG, RIGHT):
        with pytest.raises(AuthError) if code == WRONG else ExitStack():
            attempt(code)
    with pytest.raises(AuthError):
        attempt(WRONG)
    assert invitation.over is not None


def test_it_ends_after_ten_minutes(attempt: Attempt, invitation: Invitation, clock: Clock) -> None:
    clock.now = VALID_S - 1
    attempt()
    clock.now = VALID_S
    assert invitation.over == "10 minutes are over"
    with pytest.raises(AuthError, match="ended: 10 minutes"):
        attempt()


def test_another_run_is_not_joined(attempt: Attempt, invitation: Invitation) -> None:
    with pytest.raises(WrongPeer, match="into run diloco-1, not into edp-2"):
        attempt(run_id="edp-2")
    attempt()


def test_exchanges_at_the_same_time_are_three_guesses_together(
    invitation: Invitation, pool: ThreadPoolExecutor
) -> None:
    """All have got their share before the first proof; the last one even has the right code."""
    with ExitStack() as stack:
        waiting: list[tuple[Talk, Future[None]]] = []
        for code in (WRONG, WRONG, WRONG, RIGHT):
            ours, theirs = stack.enter_context(connection_pair(proved=False))
            inviting = pool.submit(answered, invitation, theirs)
            waiting.append((shared(ours, code), inviting))
        for talk, inviting in waiting:
            talk.prove("client")
            error = inviting.exception(DEADLINE_S)
            assert isinstance(error, AuthError)


def shared(connection: Connection, code: bytes) -> Talk:
    """The joining side, when it has a key and has not proved it."""
    from smolcluster.wire.invitation import _keys

    talk = Talk(connection, Secret(Path(), b""), Deadline(IN_TIME))
    side = SPAKE2_A(code)
    talk.say(Asking(share=side.start().hex()))
    talk.secret, _ = _keys(side, talk.hear(Inviting).share)
    return talk


# --- whoever sits in between, or pretends


def frames_of(raw: socket.socket) -> Iterator[bytes]:
    """What comes over a socket, frame by frame, as it came."""
    while head := raw.recv(20, socket.MSG_WAITALL):
        nbytes = int.from_bytes(head[8:12], "big") + 4 + 8
        yield head + raw.recv(nbytes, socket.MSG_WAITALL)


def test_what_was_said_before_brings_nothing_again(
    invitation: Invitation, pool: ThreadPoolExecutor
) -> None:
    """A listener says to the invitation what the right machine said."""
    said: list[bytes] = []
    with (
        connection_pair(proved=False) as (ours, near),
        connection_pair(proved=False) as (far, theirs),
    ):
        joining = pool.submit(ask, ours, RIGHT, RUN, Deadline(IN_TIME))
        pool.submit(answered, invitation, theirs)
        there, back = frames_of(near._socket), frames_of(far._socket)
        for _ in range(2):
            said.append(next(there))
            far._socket.sendall(said[-1])
            near._socket.sendall(next(back))
        near._socket.sendall(next(back))
        assert joining.result(DEADLINE_S)[0] == RUN
    with raw_and_connection(proved=False) as (raw, again):
        inviting = pool.submit(answered, invitation, again)
        raw.sendall(said[0])
        next(frames_of(raw))
        raw.sendall(said[1])
        assert isinstance(inviting.exception(DEADLINE_S), AuthError)


@pytest.mark.parametrize("is_own", [True, False], ids=["ours", "of our side"])
def test_our_own_share_is_none_of_the_other_side(pool: ThreadPoolExecutor, is_own: bool) -> None:
    with raw_and_connection(proved=False) as (raw, connection):
        joining = pool.submit(ask, connection, RIGHT, RUN, Deadline(IN_TIME))
        sent = next(frames_of(raw))
        share = sent[sent.index(b'"share":"') + 9 :][:66].decode()
        if not is_own:  # the side is said in the first byte: that of the other one
            share = f"42{share[2:]}"
        raw.sendall(bytes_of(Inviting(run_id=RUN, share=share)))
        error = joining.exception(DEADLINE_S)
        assert isinstance(error, ProtocolError)
        assert "share of the key is none" in str(error)


@pytest.mark.parametrize("share", ["42" + "00" * 32, "42" + "ff" * 32, "42" + "01" + "00" * 31])
def test_a_share_that_is_no_point_of_the_group_is_refused(
    share: str, pool: ThreadPoolExecutor
) -> None:
    with raw_and_connection(proved=False) as (raw, connection):
        joining = pool.submit(ask, connection, RIGHT, RUN, Deadline(IN_TIME))
        next(frames_of(raw))
        raw.sendall(bytes_of(Inviting(run_id=RUN, share=share)))
        assert isinstance(joining.exception(DEADLINE_S), ProtocolError)


def test_a_liar_who_answers_everything_gets_no_secret_and_is_not_believed(
    pool: ThreadPoolExecutor,
) -> None:
    """It has another code, and says the proof back, or makes one up."""
    for proof in (None, "ab" * 32):
        with raw_and_connection(proved=False) as (raw, connection):
            joining = pool.submit(ask, connection, RIGHT, RUN, Deadline(IN_TIME))
            heard = frames_of(raw)
            next(heard)
            raw.sendall(bytes_of(Inviting(run_id=RUN, share=SPAKE2_B(WRONG).start().hex())))
            echo = next(heard)
            raw.sendall(bytes_of(Handed(box="00" * 64)))
            raw.sendall(echo if proof is None else bytes_of(Proof(mac=proof)))
            assert isinstance(joining.exception(DEADLINE_S), AuthError)


def test_a_changed_name_of_the_run_is_found(
    invitation: Invitation, pool: ThreadPoolExecutor
) -> None:
    """Somebody between lets the invitation into one run look like one into another."""
    with (
        connection_pair(proved=False) as (ours, near),
        connection_pair(proved=False) as (far, theirs),
    ):
        joining = pool.submit(ask, ours, RIGHT, "edp-2", Deadline(IN_TIME))
        inviting = pool.submit(answered, invitation, theirs)
        there, back = frames_of(near._socket), frames_of(far._socket)
        far._socket.sendall(next(there))
        sent = next(back)
        share = sent[sent.index(b'"share":"') + 9 :][:66].decode()
        near._socket.sendall(bytes_of(Inviting(run_id="edp-2", share=share)))
        far._socket.sendall(next(there))
        assert isinstance(inviting.exception(DEADLINE_S), AuthError)
        near.close()
        assert isinstance(joining.exception(DEADLINE_S), SmolclusterError)


def bytes_of(message: Message) -> bytes:
    return b"".join(frame_of(message).buffers)


# --- bytes that are none of the protocol


SHARE = SPAKE2_A(RIGHT).start().hex()


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n" * 4,
        bytes_of(Challenge(nonce="ab" * 32)),
        b"".join(build_frame(65, b'{"share":"41"}').buffers),
        b"".join(build_frame(65, b"{" * 5000).buffers),
        b"".join(build_frame(65, f'{{"share":"{SHARE}","more":1}}'.encode()).buffers),
        build_frame(65, b"x" * 60000).head,
        bytes_of(Asking(share=SHARE))[:50],
        b"",
    ],
    ids=["http", "kind", "short", "deep", "field", "long", "cut", "nothing"],
)
def test_what_is_not_of_the_protocol_ends_the_connection_and_costs_no_try(
    said: bytes, invitation: Invitation, pool: ThreadPoolExecutor, attempt: Attempt
) -> None:
    for _ in range(MOST_WRONG + 1):
        with raw_and_connection(proved=False) as (raw, connection):
            inviting = pool.submit(answered, invitation, connection)
            with suppress(OSError):  # it may be cut before all is said
                raw.sendall(said)
                raw.shutdown(socket.SHUT_WR)
            assert isinstance(inviting.exception(DEADLINE_S), ProtocolError | PeerLost)
    attempt()


# --- codes


def test_codes_differ_and_are_read_as_they_are_meant() -> None:
    codes = {new_code() for _ in range(100)}
    assert len(codes) == 100
    assert all(set(read_code(code).decode()) <= set(SYMBOLS) for code in codes)
    assert read_code("k7mp-3fxq") == read_code(" K7MP 3FXQ\n") == RIGHT
    assert read_code("oOiIlL00") == b"00111100"


@pytest.mark.parametrize("typed", ["", "k7mp", "k7mp-3fxq-1", "k7mp-3fxu", "k7mp_3fxq"])
def test_what_cannot_be_a_code_is_not_asked_with(typed: str) -> None:
    with pytest.raises(ConfigError, match="a code has 8 letters"):
        read_code(typed)


def test_a_secret_that_is_too_long_is_refused_before_anybody_comes() -> None:
    with pytest.raises(ConfigError, match="at most 256"):
        handover(Secret(Path("s"), b"x" * (MAX_SECRET_NBYTES + 1)), None, 1)
    longest = handover(Secret(Path("s"), b"x" * MAX_SECRET_NBYTES), "h" * 253, 65535)
    assert "78" not in repr(longest)
    with connection_pair(proved=False) as (ours, theirs), ThreadPoolExecutor(1) as pool:
        pool.submit(answered, Invitation("r" * 100, RIGHT, longest), theirs)
        assert ask(ours, RIGHT, None, Deadline(IN_TIME))[1] == longest
