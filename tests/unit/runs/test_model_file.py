"""What a run keeps as JSON files of one value, and what is said of a file that holds none."""

from pathlib import Path
from typing import Any

import pytest

from smolcluster.errors import DataError
from smolcluster.runs.launched import CHILDREN, LAUNCHED, Launched, LaunchedProcess
from smolcluster.runs.model_file import ModelFile
from smolcluster.runs.status import STATUS
from smolcluster.runs.summary import SUMMARY

SERVER = LaunchedProcess(node="mini1", role="server", rank=None)
GOOD = Launched(run_id="edp-1", algorithm="edp", port=6000, processes=(SERVER,))
TEXT = LAUNCHED.text(GOOD).decode()
FILES: dict[str, ModelFile[Any]] = {
    "launch.json": LAUNCHED,
    "processes.json": CHILDREN,
    "status.json": STATUS,
    "summary.json": SUMMARY,
}


def test_what_was_written_is_read_and_nothing_else_is_left(tmp_path: Path) -> None:
    file = tmp_path / "launch.json"
    for value in (GOOD, GOOD.resumed()):
        LAUNCHED.write(file, value)
        assert LAUNCHED.read(file) == LAUNCHED.parse(file.read_bytes()) == value
        assert file.read_bytes() == LAUNCHED.text(value)
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("text", [None, "", "3", '{"run_id": 3}', '[{"node": "a"}]', "\udcff"])
def test_a_file_that_is_missing_or_damaged_is_named(
    tmp_path: Path, name: str, text: str | None
) -> None:
    if text is not None:
        (tmp_path / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(DataError) as caught:
        FILES[name].read(tmp_path / name)
    said = str(caught.value)
    assert str(tmp_path / name) in said
    assert "\n" not in said
    assert ("No such file" in said) == (text is None)
    assert (FILES[name].unless in said) == (text is None or not FILES[name].unless)
    assert text is None or FILES[name].parse(text.encode("utf-8", "surrogateescape")) is None


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (TEXT[:-20], "Invalid JSON"),
        (TEXT.replace('"session"', '"sessions"'), "processes.0.sessions: "),
        (TEXT.replace("6000", '"many"'), "port: "),
        ('{"run_id": "a", "algorithm": "edp", "processes": []}', "processes: "),
    ],
)
def test_the_first_wrong_key_is_named(tmp_path: Path, text: str, key: str) -> None:
    file = tmp_path / "launch.json"
    file.write_text(text)
    with pytest.raises(DataError, match=f"is damaged: {key}"):
        LAUNCHED.read(file)


@pytest.mark.parametrize("pid", ["-1", '"7"', "1.5"])
def test_a_value_of_another_kind_is_not_taken(pid: str) -> None:
    assert CHILDREN.parse(f'[{{"node": "a", "role": "server", "pid": {pid}}}]') is None
