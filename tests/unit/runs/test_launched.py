"""`launch.json`: written, read again, and refused when it is damaged."""

from pathlib import Path

import pytest

from smolcluster.errors import DataError
from smolcluster.runs.launched import Launched, LaunchedProcess, read_launched, write_launched

SERVER = LaunchedProcess(
    node="mini1",
    role="server",
    rank=None,
    ssh="me@mini1",
    run_dir="~/runs/edp-1",
    session="edp-1-server",
    argv=("python", "server.py", "it's ünï😀\n"),
    device="mps",
)
WORKER = LaunchedProcess(
    node="pi5", role="worker", rank=0, ssh=None, run_dir="/runs/edp-1", session="edp-1-worker1"
)
LAUNCHED = Launched(
    run_id="edp-1",
    algorithm="edp",
    port=6000,
    overrides=("num_epochs=5",),
    processes=(SERVER, WORKER),
)
GOOD = LAUNCHED.model_dump_json()


def test_what_was_written_is_read(tmp_path: Path) -> None:
    file = tmp_path / "launch.json"
    write_launched(file, LAUNCHED)
    assert read_launched(file) == LAUNCHED
    write_launched(file, LAUNCHED.resumed())
    assert read_launched(file) == LAUNCHED.resumed()
    assert list(tmp_path.iterdir()) == [file]


def test_the_server_comes_first() -> None:
    assert LAUNCHED.server == SERVER
    assert LAUNCHED.workers == (WORKER,)
    assert [each.title for each in LAUNCHED.processes] == ["server mini1", "worker 1 (pi5)"]
    assert [each.stem for each in LAUNCHED.processes] == ["server-mini1", "worker-rank0-pi5"]


def test_a_run_is_local_if_all_of_it_is_here() -> None:
    assert not LAUNCHED.is_local
    here = SERVER.model_copy(update={"ssh": None})
    assert LAUNCHED.model_copy(update={"processes": (here, WORKER)}).is_local


def test_arguments_are_added_to_a_copy() -> None:
    assert WORKER.with_arguments("--a", "b").argv == ("--a", "b")
    assert WORKER.argv == ()


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*launch\.json: No such file"):
        read_launched(tmp_path / "launch.json")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (GOOD[:-20], "Invalid JSON"),
        ("", "Invalid JSON"),
        ("\udcff", "Invalid JSON"),
        (GOOD.replace('"session"', '"sessions"'), r"processes\.0\.session: Field req"),
        (GOOD.replace("6000", '"many"'), "port: Input should be a valid integer"),
        ('{"run_id": "a", "algorithm": "edp", "processes": []}', "processes: Tuple s"),
    ],
    ids=["cut", "empty", "no UTF-8", "key", "type", "no processes"],
)
def test_a_damaged_file_is_named(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "launch.json"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(DataError, match=rf"launch\.json is damaged: {says}") as caught:
        read_launched(file)
    assert "\n" not in str(caught.value)
