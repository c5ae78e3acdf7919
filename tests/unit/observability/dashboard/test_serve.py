"""Where the page is served, and how a browser is opened."""

import socket
import stat
from pathlib import Path

import pytest

from harness import free_port
from smolcluster.errors import ConfigError, PortBusy
from smolcluster.observability.dashboard import serve
from smolcluster.observability.dashboard.serve import bound, opened


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


def test_the_browsers_command_line_has_no_token_and_a_confined_browser_may_read_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of snap and Flatpak: no folder but the home, and nothing hidden in it."""
    home, elsewhere, opened_files = tmp_path / "home", tmp_path / "tmp", list[str]()
    for folder in (elsewhere, home / ".cache/runs", home / "runs/r1"):
        folder.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr("webbrowser.open", opened_files.append)
    for run, used in (
        (home / "runs/r1", home / "runs/r1"),
        (elsewhere, home),
        (home / ".cache/runs", home),
    ):
        with opened("http://127.0.0.1:8265/#token=secret", (run, home)):
            [file] = used.glob("dashboard-*.html")
            assert opened_files.pop() == file.as_uri()
            assert "secret" not in file.as_uri()
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            assert "0;url=http://127.0.0.1:8265/#token=secret" in file.read_text()
        assert not file.exists()


def test_where_no_file_can_be_no_browser_is_opened(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--open"), opened("http://x", [tmp_path / "none"]):
        pass
