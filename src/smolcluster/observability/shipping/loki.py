"""Loki's HTTP API: `POST /loki/api/v1/push` with JSON, compressed by gzip, which it answers with 204."""

import gzip
import json
import netrc
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import httpx

from smolcluster.errors import ConfigError
from smolcluster.observability.shipping.lines import Labels, LokiLine
from smolcluster.utils.words import one_line

PUSH = "/loki/api/v1/push"
TIMEOUT_S = 10.0
MAX_ANSWER_NBYTES = 2048
MAX_QUOTED = 300
MAX_RETRY_AFTER_S = 60.0
GZIP_LEVEL = 4
_REFUSED = frozenset({400, 413, 422})


@dataclass(frozen=True)
class PushReply:
    """What Loki made of a batch; `reason` in words; `retry_after_s`: when it wants it again."""

    verdict: Literal["accepted", "refused", "later"]
    reason: str = ""
    retry_after_s: float = 0.0


def push_body(entries: Iterable[LokiLine]) -> bytes:
    """The body of a push: entries by stream, the order within a stream kept, compressed."""
    streams: dict[Labels, list[list[str]]] = {}
    for entry in entries:
        streams.setdefault(entry.labels, []).append([str(entry.ns), entry.text])
    content = [{"stream": dict(labels), "values": values} for labels, values in streams.items()]
    text = json.dumps({"streams": content}, ensure_ascii=False)
    return gzip.compress(text.encode("utf-8", "replace"), GZIP_LEVEL, mtime=0)


def judged(status: int, headers: Mapping[str, str], said: bytes) -> PushReply:
    """What an answer means. Whatever is not Loki's own way to answer is no reason to give lines up."""
    words = one_line(said.decode("utf-8", "replace").strip())[:MAX_QUOTED]
    reason = f"it answers {status}" + (f": {words}" if words else "")
    if 200 <= status < 300 and (status == 204 or not words):
        return PushReply("accepted")
    if status in _REFUSED:
        return PushReply("refused", reason)
    asked = headers.get("Retry-After", "")
    retry_after_s = min(float(asked), MAX_RETRY_AFTER_S) if re.fullmatch("[0-9]+", asked) else 0.0
    return PushReply("later", reason, retry_after_s)


def push_url(base: str) -> httpx.URL:
    """Where lines are pushed, from the address of Loki, such as `http://192.168.1.10:3100`.

    Raises:
        ConfigError: it is no such address, or holds a password, which everybody could read in a command.
    """
    try:
        url = httpx.URL(base)
    except (httpx.InvalidURL, ValueError) as error:
        raise ConfigError(f"Loki's address {one_line(base[:200])}: {error}") from error
    if url.userinfo or url.query:
        raise ConfigError(
            f"Loki's address with host {one_line(url.host)} holds more than a host and a port: "
            "a user and a password belong in ~/.netrc"
        )
    is_port = url.port is None or 0 < url.port < 65536
    if url.scheme not in ("http", "https") or not url.host or not is_port:
        raise ConfigError(
            f"Loki's address {one_line(base[:200])}: it is written like http://192.168.1.10:3100"
        )
    return url if url.path == PUSH else url.copy_with(path=url.path.rstrip("/") + PUSH)


class LokiClient:
    """A connection to Loki; `close` it.

    The environment's proxies and certificates (HTTPS_PROXY, NO_PROXY, SSL_CERT_FILE) count. A user and a
    password come from the file that NETRC names, else from `~/.netrc`.

    Raises:
        ConfigError: the address or that file is wrong.
    """

    def __init__(self, base: str, *, timeout_s: float = TIMEOUT_S) -> None:
        self._url = push_url(base)
        try:
            self._client = httpx.Client(auth=_auth(), timeout=timeout_s)
        except (ValueError, OSError) as error:
            raise ConfigError(f"the environment's proxies or certificates: {error}") from error

    def push(self, body: bytes) -> PushReply:
        """Push a body; whether it arrived is unknown when the answer is `LATER`."""
        headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        try:
            with self._client.stream("POST", self._url, content=body, headers=headers) as response:
                said = next(response.iter_raw(MAX_ANSWER_NBYTES), b"")
        except httpx.HTTPError as error:
            return PushReply("later", one_line(str(error)) or type(error).__name__)
        return judged(response.status_code, response.headers, said)

    def close(self) -> None:
        self._client.close()


def _auth() -> httpx.NetRCAuth | None:
    file = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    if not file.is_file():
        return None
    try:
        return httpx.NetRCAuth(str(file))
    except (netrc.NetrcParseError, OSError, ValueError) as error:
        raise ConfigError(f"{file}: {one_line(str(error))}") from error
