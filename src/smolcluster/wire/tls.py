"""TLS 1.3 (RFC 8446) over one connected socket, for one thread that sends while another receives.

The certificate is made at the start and proves nothing by itself: its SHA-256 is part of the proofs of the
handshake (`security.py`), so whoever answers with another certificate cannot have a proof passed on.

`ssl.SSLSocket` must not be used by two threads at once (cpython#151508) and knows no `sendmsg`. Here the
TLS engine works in memory: each call of it is under one lock, and the socket is used outside of it.
"""

import hashlib
import os
import socket
import ssl
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from smolcluster.wire.frames import Buffer

FIRST_BYTE = b"\x16"
"""A TLS connection begins with a record of type handshake; a frame begins with S."""
AES_128 = "TLS_AES_128_GCM_SHA256"
_VALID = timedelta(days=3650)
_RECORDS_NBYTES = 256 * 1024
_UNPROVED_NBYTES = 8 * 1024


@dataclass(frozen=True)
class ServerIdentity:
    """What a server answers TLS connections with: a key of its own, and its certificate's SHA-256."""

    context: ssl.SSLContext
    fingerprint: bytes


def new_identity() -> ServerIdentity:
    """Make a P-256 key and a certificate for it, which are in no file when this returns."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "smolcluster")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _VALID)  # a Pi without a clock that is right must be served as well
        .not_valid_after(now + _VALID)
        .sign(key, hashes.SHA256())
    )
    context = _context(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0
    _load(context, _pem(key, certificate))
    der = certificate.public_bytes(serialization.Encoding.DER)
    return ServerIdentity(context, hashlib.sha256(der).digest())


def client_context() -> ssl.SSLContext:
    """What a client connects with; whose certificate it gets is judged by the handshake's proofs."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


class TlsSocket:
    """Sends and receives over a socket as one does, encrypted.

    `handshake_step` comes first, until it is over. An operation that times out (`BlockingIOError`) may be
    repeated; after any other error the connection is lost. Damaged records raise `ssl.SSLError`, which is an
    OSError.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, server_side: bool) -> None:
        self._socket = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._lock = threading.Lock()
        self._records = memoryview(bytearray(_UNPROVED_NBYTES))
        self._unsent = memoryview(b"")
        self._unsent_plain = 0
        """Plain bytes that `_unsent` are the encryption of."""

    def handshake_step(self) -> bool:
        """Go on with the handshake as far as the next bytes of the peer; returns whether it is over."""
        try:
            self._tls.do_handshake()
            done = True
        except ssl.SSLWantReadError:
            done = False
        if flight := self._outgoing.read():
            self._socket.sendall(flight)
        if not done and not self._receive_records():
            raise ConnectionResetError("closed the connection")
        return done

    def peer_fingerprint(self) -> bytes:
        return hashlib.sha256(self._tls.getpeercert(binary_form=True) or b"").digest()

    def widen(self) -> None:
        """Receive more at once: the peer has proved itself."""
        self._records = memoryview(bytearray(_RECORDS_NBYTES))

    def sendmsg(self, buffers: Sequence[Buffer]) -> int:
        """Encrypt and send; returns how many plain bytes are done with, which may be 0 after progress.

        After a timeout the next call must begin with the same bytes: they are encrypted already.
        """
        if not self._unsent:
            self._encrypt(buffers)
        self._unsent = self._unsent[self._socket.send(self._unsent) :]
        return 0 if self._unsent else self._unsent_plain

    def recv_into(self, place: memoryview, _nbytes: int = 0, _flags: int = 0) -> int:
        """Wait for plain bytes; returns how many, at least 1, or 0 when the peer has ended its side.

        Raises:
            InterruptedError: bytes have come, but no whole record: look at the deadline, and call again.
        """
        filled, has_received = 0, False
        while filled < place.nbytes:
            try:
                with self._lock:
                    received: Any = self._tls.read(place.nbytes - filled, place[filled:])
                filled += received
            except ssl.SSLWantReadError:
                if filled:
                    break
                if has_received:
                    raise InterruptedError("half a record") from None
                has_received = self._receive_records()
                if not has_received:
                    break
            except ssl.SSLZeroReturnError:
                break
        return filled

    def _encrypt(self, buffers: Sequence[Buffer]) -> None:
        plain = 0
        with self._lock:
            for buffer in buffers:
                piece = memoryview(buffer)[: _RECORDS_NBYTES - plain]
                plain += self._tls.write(piece) if piece.nbytes else 0
            self._unsent = memoryview(self._outgoing.read())
        self._unsent_plain = plain

    def _receive_records(self) -> bool:
        """Wait for encrypted bytes; returns False when the peer has ended its side."""
        received = self._socket.recv_into(self._records)
        with self._lock:
            self._incoming.write(self._records[:received])
        return received > 0


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if choose := getattr(context, "set_ciphersuites", None):  # Python 3.15
        choose(AES_128)
    return context


def _pem(key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> bytes:
    encoding = serialization.Encoding.PEM
    private = key.private_bytes(
        encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private + certificate.public_bytes(encoding)


def _load(context: ssl.SSLContext, pem: bytes) -> None:
    """Have the context read a key, which it can only from a file; the file is this user's alone."""
    descriptor, path = tempfile.mkstemp(prefix="smolcluster-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(pem)
        context.load_cert_chain(path)
    finally:
        Path(path).unlink()
