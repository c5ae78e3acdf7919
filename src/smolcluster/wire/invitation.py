"""An invitation: a short code, typed on another machine, by which the cluster's secret is handed over there.

    joins                     invites
    Asking (share) ->
                           <- Inviting (run, share)
    Proof ->
                           <- Handed (box), Proof; or Reject

The shares are those of SPAKE2 (Abdalla and Pointcheval, 2005; package `spake2`, group of Ed25519) with the
code as the password: both sides get the same key only if both have the same code, and whoever listens, or
pretends to be one side, can try one code an exchange. The proofs are the handshake's (`security.py`), with
that key: they cover every frame that was said, so the run's name and the version of the wire, and the role
of who proves. The side that joins proves first. Why this is enough: `docs/wire_format/joining_by_code.md`.
"""

import hmac
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from pydantic import Field, StringConstraints, ValidationError
from spake2 import SPAKE2_A, SPAKE2_B, SPAKEError
from spake2.ed25519_basic import NotOnCurve

from smolcluster.errors import AuthError, ConfigError, ProtocolError, WrongCode, WrongPeer
from smolcluster.utils.retry import Deadline
from smolcluster.wire.connection import Connection
from smolcluster.wire.handshake import AUTH, Talk, reject
from smolcluster.wire.messages import HeaderModel, Host, Identifier, Message, Reject
from smolcluster.wire.security import MIN_SECRET_CHARS, Secret

VALID_S = 600.0
MOST_WRONG = 3
EXCHANGE_S = 10.0
"""How long one exchange may take, in seconds."""
OVER = "over"
"""A Reject's code: the invitation has ended."""
MAX_SECRET_NBYTES = 256
SYMBOLS = "0123456789abcdefghjkmnpqrstvwxyz"
"""Crockford's base32: a code has 5 bits a symbol, and none that looks like another."""
NUM_SYMBOLS = 8
_MEANT = str.maketrans("ilo", "110", " -")
_NONCE = bytes(12)
"""A key is used for one box alone."""

Share = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{66}$")]
SecretKey = Annotated[
    str,
    StringConstraints(pattern=rf"^([0-9a-f]{{2}}){{{MIN_SECRET_CHARS},{MAX_SECRET_NBYTES}}}$"),
]


class Asking(Message, kind=65):
    """Who joins: its share of the key."""

    share: Share


class Inviting(Message, kind=66):
    """Who invites: into which run, and its share of the key."""

    run_id: Identifier
    share: Share


class Handed(Message, kind=67):
    """Who invites: a `Handover` as JSON, encrypted by ChaCha20-Poly1305; hexadecimal digits."""

    box: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32,2048}$")]


class Handover(HeaderModel):
    """What is handed over: the cluster's secret as hexadecimal digits, and where the run's server listens.

    `host` is null where the server is reached at the address at which the invitation was.
    """

    secret: SecretKey = Field(repr=False)
    host: Host | None
    port: Annotated[int, Field(ge=1, le=65535)]


def new_code() -> str:
    """40 random bits such as `k7mp-3fxq`."""
    code = "".join(secrets.choice(SYMBOLS) for _ in range(NUM_SYMBOLS))
    return f"{code[:4]}-{code[4:]}"


def read_code(typed: str) -> bytes:
    """The code that somebody has typed, in one spelling.

    Raises:
        ConfigError: it cannot be one.
    """
    code = typed.strip().lower().translate(_MEANT)
    if len(code) != NUM_SYMBOLS or not set(code) <= set(SYMBOLS):
        raise ConfigError(f"a code has {NUM_SYMBOLS} letters and digits, such as k7mp-3fxq")
    return code.encode()


def handover(secret: Secret, host: str | None, port: int) -> Handover:
    """What an invitation hands over.

    Raises:
        ConfigError: the secret is too long for it.
    """
    if len(secret.key) > MAX_SECRET_NBYTES:
        raise ConfigError(
            f"the cluster's secret {secret.path} has {len(secret.key)} bytes, and an invitation hands over "
            f"at most {MAX_SECRET_NBYTES}"
        )
    return Handover(secret=secret.key.hex(), host=host, port=port)


class Invitation:
    """One code for one run, and how many wrong ones were tried. Any number of threads may answer by it."""

    def __init__(
        self,
        run_id: str,
        code: bytes,
        gives: Handover,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run_id = run_id
        self._code, self._gives = code, gives
        self._until = Deadline(VALID_S, clock)
        self._num_wrong = 0
        self._lock = threading.Lock()

    @property
    def over(self) -> str | None:
        """Why it has ended; None: it has not."""
        if self._num_wrong >= MOST_WRONG:
            return f"{MOST_WRONG} wrong codes were tried"
        return f"{VALID_S / 60:g} minutes are over" if self._until.expired else None

    def answer(self, connection: Connection, deadline: Deadline) -> None:
        """Hand the secret to who has the code.

        Raises:
            AuthError: the code is wrong, or the invitation has ended.
            ProtocolError, PeerLost: the peer does not speak the protocol, was lost, or too slow.
        """
        talk = Talk(connection, _no_secret(), deadline)
        asking = talk.hear(Asking)
        side = SPAKE2_B(self._code)
        talk.say(Inviting(run_id=self.run_id, share=side.start().hex()))
        talk.secret, box = _keys(side, asking.share)
        refusal = self._judge(is_right=talk.is_proved("client"))
        if refusal is not None:
            reject(connection, AUTH if self.over is None else OVER, refusal)
            raise AuthError(f"{connection.peer}: {refusal}")
        content = self._gives.model_dump_json().encode()
        talk.say(Handed(box=box.encrypt(_NONCE, content, None).hex()))
        talk.prove("server")
        connection.finish()

    def _judge(self, *, is_right: bool) -> str | None:
        """Count one proof; returns why nothing is handed over, or None.

        Of exchanges that go on at the same time none is right any more once enough were wrong.
        """
        with self._lock:
            if self.over is not None:
                return f"the invitation has ended: {self.over}"
            if is_right:
                return None
            self._num_wrong += 1
            if left := MOST_WRONG - self._num_wrong:
                return f"the code is wrong; {left} more may be tried"
            return f"the code is wrong, and the invitation has ended: {self.over}"


def ask(
    connection: Connection,
    code: bytes,
    run_id: str | None,
    deadline: Deadline,
) -> tuple[str, Handover]:
    """Ask for the secret of a run; `run_id` None: of whichever run it is. Returns its name, and what it gave.

    Raises:
        WrongCode: the invitation has another code, and takes another try.
        AuthError: the invitation has ended, or the other side does not know the code.
        WrongPeer: the invitation is into another run.
        ProtocolError, PeerLost: the peer does not speak the protocol, was lost, or too slow.
    """
    talk = Talk(connection, _no_secret(), deadline)
    side = SPAKE2_A(code)
    talk.say(Asking(share=side.start().hex()))
    inviting = talk.hear(Inviting)
    if run_id not in (None, inviting.run_id):
        raise WrongPeer(f"{connection.peer} invites into run {inviting.run_id}, not into {run_id}")
    talk.secret, box = _keys(side, inviting.share)
    talk.prove("client")
    answer = talk.hear_answer(Handed)
    if isinstance(answer, Reject):
        kind = WrongCode if answer.code == AUTH else AuthError
        raise kind(f"{connection.peer}: {answer.sentence}")
    if not talk.is_proved("server"):
        raise AuthError(f"{connection.peer} does not know the code either")
    try:
        content = box.decrypt(_NONCE, bytes.fromhex(answer.box), None)
        return inviting.run_id, Handover.model_validate_json(content)
    except (InvalidTag, ValueError, ValidationError):
        raise ProtocolError(f"{connection.peer}: what it handed over cannot be read") from None


def _no_secret() -> Secret:
    """Before there is a key nothing can be proved."""
    return Secret(Path(), secrets.token_bytes(32))


def _keys(side: SPAKE2_A | SPAKE2_B, share: str) -> tuple[Secret, ChaCha20Poly1305]:
    """The key that proofs are made with, and that of the box.

    Raises:
        ProtocolError: the other side's share is none, or our own come back.
    """
    try:
        shared: bytes = side.finish(bytes.fromhex(share))
    except (SPAKEError, NotOnCurve, ValueError) as error:
        raise ProtocolError(
            f"the other side's share of the key is none: {error or type(error).__name__}"
        ) from None
    proofs, box = (
        hmac.digest(shared, b"smolcluster/2 invitation: " + each, "sha256")
        for each in (b"proofs", b"box")
    )
    return Secret(Path(), proofs), ChaCha20Poly1305(box)
