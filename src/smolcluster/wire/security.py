"""The cluster's secret: where it lies, who may read it, and how it is proved without being shown.

A proof is an HMAC-SHA256 with the secret as its key over

    "smolcluster/2" | role | SHA-256(frames) | binding

where `|` joins bytes; role is "client" or "server" (six bytes each); frames are the prefix, header and header
sum of every frame of the handshake so far, in both directions, exactly as they were sent; binding is the
SHA-256 of the server's certificate, or "plain" without TLS. A proof of another connection (replay) fails
because of the nonces of both sides, one's own proof sent back (reflection) because of the role.
"""

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from smolcluster.errors import AuthError

Role = Literal["client", "server"]

NONCE_NBYTES = 32
MIN_SECRET_CHARS = 32
PLAIN = b"plain"

_CONTEXT = b"smolcluster/2"
_SECRET_NBYTES = 32
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True, slots=True)
class Secret:
    """The cluster's secret and the file that it came from; never printed."""

    path: Path
    key: bytes = field(repr=False)


def default_secret_path() -> Path:
    """`$XDG_CONFIG_HOME/smolcluster/secret`, by default `~/.config/smolcluster/secret`."""
    configured = os.environ.get("XDG_CONFIG_HOME")
    base = Path(configured) if configured else Path.home() / ".config"
    return base / "smolcluster" / "secret"


def load_secret(path: Path) -> Secret:
    """Read the cluster's secret.

    Raises:
        AuthError: the file is missing, cannot be read, can be read by others, or is empty or too
            short; the message says how to mend it.
    """
    try:
        # One descriptor, so that what is judged is what is read.
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            text = file.read(4096).strip()
    except FileNotFoundError:
        raise AuthError(
            f"the cluster's secret {path} is missing: start the server once, which makes it, "
            f"and copy the file from there (chmod 600)"
        ) from None
    except OSError as error:
        raise AuthError(f"the cluster's secret {path} cannot be read: {error.strerror}") from None
    mode = stat.S_IMODE(status.st_mode)
    if mode & _OTHERS:
        raise AuthError(
            f"the cluster's secret {path} is open to others (mode {mode:04o}): chmod 600 {path}"
        )
    if len(text) < MIN_SECRET_CHARS:
        raise AuthError(
            f"the cluster's secret {path} has {len(text)} characters, fewer than "
            f"{MIN_SECRET_CHARS}: remove it and start the server, which makes a new one"
        )
    return Secret(path, text)


GROUP_SECRET = "MESH_SECRET"  # noqa: S105 - its name
"""The variable by which ranks are told what they prove to each other; else it is the cluster's secret."""


def ensure_secret(path: Path) -> Secret:
    """Read the cluster's secret, or make one (256 random bits, mode 0600) where there is none.

    Two processes may call this at once: one makes it, both read the same.

    Raises:
        AuthError: as `load_secret`, or the file cannot be made.
    """
    if not path.exists():
        _create(path, new_secret().encode())
    return load_secret(path)


def cluster_secret(file: Path | None, *, makes: bool) -> Secret:
    """The cluster's secret of this machine: in `file`, or None: in the default one.

    With `makes` it is made where there is none: by the server, and who shares its machine.

    Raises:
        AuthError: as `load_secret` or `ensure_secret`.
    """
    return (ensure_secret if makes else load_secret)(file or default_secret_path())


def keep_secret(path: Path, key: bytes) -> Secret:
    """Keep a secret that was handed over (mode 0600); beside `path` where that has another one.

    Raises:
        AuthError: as `load_secret`, or the file cannot be made.
    """
    if path.exists() and load_secret(path).key != key:
        path = path.with_name(f"{path.name}-{hashlib.sha256(key).hexdigest()[:8]}")
    if not path.exists():
        _create(path, key)
    return load_secret(path)


def _create(path: Path, key: bytes) -> None:
    """Write beside the place and link into it: nobody ever sees half a secret."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(key + b"\n")
        try:
            os.link(draft, path)
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    except OSError as error:
        raise AuthError(f"the cluster's secret {path} cannot be made: {error.strerror}") from None


def new_secret() -> str:
    """256 random bits as a text, for processes that one process starts."""
    return secrets.token_hex(_SECRET_NBYTES)


def secret_of_text(text: str) -> Secret:
    """The secret that a process was told by the one that started it.

    Raises:
        AuthError: it is too short.
    """
    if len(text) < MIN_SECRET_CHARS:
        raise AuthError(
            f"the secret that this process was told has fewer than {MIN_SECRET_CHARS} characters"
        )
    return Secret(Path("what started the ranks"), text.encode())


def new_nonce() -> str:
    """32 random bytes, as 64 hexadecimal digits."""
    return secrets.token_hex(NONCE_NBYTES)


def proof(key: bytes, role: Role, frames: Sequence[bytes], *, binding: bytes = PLAIN) -> bytes:
    """The 32 bytes by which `role` proves that it knows the secret `key`.

    Args:
        key: the secret.
        role: whose proof it is.
        frames: prefix, header and header sum of each frame said so far, as on the wire.
        binding: what names the channel: the certificate's SHA-256 (32 bytes), or "plain".
    """
    transcript = hashlib.sha256(b"".join(frames)).digest()
    return hmac.digest(key, _CONTEXT + role.encode() + transcript + binding, "sha256")
