"""Loki's push API from the sender's side."""

import gzip
import json
import threading
from pathlib import Path

import pytest

from loki import Fault, receiving
from smolcluster.errors import ConfigError
from smolcluster.observability.shipping.lines import LokiLine
from smolcluster.observability.shipping.loki import (
    LokiClient,
    PushReply,
    judged,
    push_body,
    push_url,
)


def test_a_body_has_the_documented_form() -> None:
    one, two = (("job", "a"), ("level", "INFO")), (("job", "b"),)
    entries = [
        LokiLine(one, 1, "first"),
        LokiLine(two, 2, "τ\x00\n<script>"),
        LokiLine(one, 3, "last"),
    ]
    assert json.loads(gzip.decompress(push_body(entries))) == {
        "streams": [
            {"stream": {"job": "a", "level": "INFO"}, "values": [["1", "first"], ["3", "last"]]},
            {"stream": {"job": "b"}, "values": [["2", "τ\x00\n<script>"]]},
        ]
    }


@pytest.mark.parametrize(
    ("status", "said", "verdict"),
    [
        (204, b"", "accepted"),
        (204, b"anything", "accepted"),
        (200, b"", "accepted"),
        (200, b"<html>", "later"),
        (301, b"", "later"),
        (400, b"entry too far behind", "refused"),
        (401, b"", "later"),
        (404, b"", "later"),
        (413, b"", "refused"),
        (408, b"", "later"),
        (429, b"", "later"),
        (500, b"", "later"),
        (503, b"", "later"),
        (999, b"", "later"),
    ],
)
def test_what_an_answer_means(status: int, said: bytes, verdict: str) -> None:
    answer = judged(status, {}, said)
    assert answer.verdict == verdict
    assert said.decode() in answer.reason or verdict == "accepted"


def test_an_answer_is_quoted_on_one_line_and_not_at_length() -> None:
    answer = judged(400, {}, b"a\x1b[2J\n\xff" + b"x" * 5000)
    assert answer.reason.startswith("it answers 400: a\\x1b[2J\\n�x")
    assert len(answer.reason) < 350


@pytest.mark.parametrize(
    ("retry_after", "seconds"),
    [
        ("7", 7.0),
        ("-3", 0.0),
        ("86400", 60.0),
        ("inf", 0.0),
        ("nan", 0.0),
        ("Sun, 22 Nov 2026 07:00:20 GMT", 0.0),
        ("soon", 0.0),
        ("", 0.0),
    ],
)
def test_a_wish_to_wait_is_heard_within_reason(retry_after: str, seconds: float) -> None:
    assert judged(429, {"Retry-After": retry_after}, b"").retry_after_s == seconds


@pytest.mark.parametrize(
    ("base", "url"),
    [
        ("http://192.168.1.10:3100", "http://192.168.1.10:3100/loki/api/v1/push"),
        ("http://[::1]:3100/", "http://[::1]:3100/loki/api/v1/push"),
        ("https://logs.example/tenant/", "https://logs.example/tenant/loki/api/v1/push"),
        ("http://a:1/loki/api/v1/push", "http://a:1/loki/api/v1/push"),
    ],
)
def test_lines_go_to_the_push_api(base: str, url: str) -> None:
    assert str(push_url(base)) == url


@pytest.mark.parametrize(
    "base", ["192.168.1.10:3100", "ftp://a", "http://", "", "http://a:x", "http://a:99999", "\x00"]
)
def test_an_address_that_is_none_is_refused(base: str) -> None:
    with pytest.raises(ConfigError, match="Loki's address"):
        push_url(base)


def test_a_password_belongs_in_netrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"belong in ~/\.netrc") as refused:
        push_url("http://me:sentinel@loki:3100")
    assert "sentinel" not in str(refused.value)
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password sentinel\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    with receiving() as receiver:
        loki = LokiClient(receiver.url)
        assert loki.push(push_body([LokiLine((("job", "a"),), 1, "x")])) == PushReply("accepted")
        loki.close()
        assert receiver.authorizations == ["Basic bWU6c2VudGluZWw="]
    netrc.write_text("machine\n")
    with pytest.raises(ConfigError, match="netrc"):
        LokiClient("http://127.0.0.1:1")


def test_a_receiver_that_does_not_answer_in_time_gets_it_later() -> None:
    over = threading.Event()
    with receiving() as receiver:
        receiver.faults.append(Fault(204, before=over.wait))
        loki = LokiClient(receiver.url, timeout_s=0.1)
        reply = loki.push(push_body([]))
        over.set()
        loki.close()
    assert reply.verdict == "later"
    assert "timed out" in reply.reason
