import hashlib
import hmac
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from smolcluster.errors import AuthError
from smolcluster.wire.security import (
    default_secret_path,
    ensure_secret,
    load_secret,
    proof,
)

KEY = b"k" * 64


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def written(path: Path, text: str, permissions: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(permissions)
    return path


def test_a_new_secret_has_256_bits_and_is_its_owners(tmp_path: Path) -> None:
    path = tmp_path / "smolcluster" / "secret"
    made = ensure_secret(path)
    assert len(bytes.fromhex(made.key.decode())) == 32
    assert mode(path) == 0o600
    assert mode(path.parent) == 0o700
    assert ensure_secret(path) == load_secret(path) == made
    assert [each.name for each in path.parent.iterdir()] == ["secret"]
    assert made.key.decode() not in f"{made} {made!r}", "it is never printed"
    assert ensure_secret(tmp_path / "other").key != made.key


def test_processes_that_start_together_agree_on_one_secret(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ensure_secret, [path] * 8))
    assert len({each.key for each in found}) == 1


@pytest.mark.parametrize("permissions", [0o640, 0o604, 0o644, 0o660, 0o622, 0o601, 0o777])
def test_a_secret_open_to_others_is_refused(tmp_path: Path, permissions: int) -> None:
    path = written(tmp_path / "secret", "s" * 64, permissions)
    with pytest.raises(AuthError, match=rf"{path} is open to others \(mode 0{permissions:o}\)"):
        load_secret(path)
    with pytest.raises(AuthError, match=f"chmod 600 {path}"):
        ensure_secret(path)


@pytest.mark.parametrize("permissions", [0o600, 0o400, 0o700])
def test_a_secret_of_ones_own_is_read(tmp_path: Path, permissions: int) -> None:
    assert load_secret(written(tmp_path / "secret", "s" * 64 + "\n", permissions)).key == b"s" * 64


@pytest.mark.parametrize("text", ["", "\n", "short", " " * 100])
def test_an_empty_or_short_secret_is_refused(tmp_path: Path, text: str) -> None:
    path = written(tmp_path / "secret", text)
    with pytest.raises(AuthError, match=r"characters, fewer than 32: remove it"):
        load_secret(path)


def test_a_missing_secret_says_where_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(AuthError, match=r"secret is missing: start the server once.*copy"):
        load_secret(tmp_path / "secret")


def test_a_place_that_cannot_hold_a_secret_is_named(tmp_path: Path) -> None:
    with pytest.raises(AuthError, match="cannot be read"):
        load_secret(tmp_path)
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(AuthError, match=f"{blocked}/secret cannot be made"):
        ensure_secret(blocked / "secret")


def test_the_default_place_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert default_secret_path() == tmp_path / "smolcluster" / "secret"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_secret_path() == tmp_path / ".config" / "smolcluster" / "secret"


def test_a_proof_is_the_documented_formula() -> None:
    transcript = hashlib.sha256(b"hello" + b"challenge").digest()
    expected = hmac.new(KEY, b"smolcluster/2" + b"client" + transcript + b"plain", "sha256")
    assert proof(KEY, "client", [b"hello", b"challenge"]) == expected.digest()


def test_a_proof_depends_on_everything_it_covers() -> None:
    proofs = {
        proof(KEY, "client", [b"h", b"c"]),
        proof(b"x" * 64, "client", [b"h", b"c"]),
        proof(KEY, "server", [b"h", b"c"]),
        proof(KEY, "client", [b"H", b"c"]),
        proof(KEY, "client", [b"h"]),
        proof(KEY, "client", [b"c", b"h"]),
        proof(KEY, "client", [b"h", b"c"], binding=b"certificate"),
    }
    assert len(proofs) == 7
