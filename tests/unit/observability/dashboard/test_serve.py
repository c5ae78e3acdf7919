"""Where the page is served, and how a browser is opened."""

import socket
import stat
from pathlib import Path

import pytest

from harness import free_port
from smolcluster.errors import ConfigError, PortBusy
from smolcluster.observability.dashboard import serve
from smolcluster.observability.dashboard.serve import bound, open_browser


def test_a_stated_port_is_taken_or_it_is_said_that_it_is_busy() -> None:
    port = free_port()
    with bound("127.0.0.1", port) as listener:
        assert listener.getsockname()[1] == port
        with pytest.raises(PortBusy, match=rf"^port {port} on 127.0.0.1 is taken: "):
            bound("127.0.0.1", port)


def test_without_a_stated_port_any_free_one_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        monkeypatch.setattr(serve, "PORT", other.getsockname()[1])
        with bound("127.0.0.1", None) as listener:
            assert listener.getsockname()[1] != other.getsockname()[1]


def test_an_address_that_this_machine_has_not_is_a_sentence() -> None:
    with pytest.raises(
        ConfigError, match=r"^cannot listen on 192\.0\.2\.1:8000: .*--host or --port$"
    ):
        bound("192.0.2.1", 8000)


def test_the_browsers_command_line_has_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    open_browser("http://127.0.0.1:8265/?token=secret", tmp_path)
    [address] = opened
    assert "secret" not in address
    file = tmp_path / "dashboard.html"
    assert address == file.as_uri()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "0;url=http://127.0.0.1:8265/?token=secret" in file.read_text()
