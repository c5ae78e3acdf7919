import json
from pathlib import Path

import pytest

from smolcluster.errors import DataError
from smolcluster.runs.processes import ProcessEntry, read_processes, write_processes


def test_processes_are_read_as_they_were_written(tmp_path: Path) -> None:
    entries = [
        ProcessEntry(node="mini1", role="server", pid=100),
        ProcessEntry(node="mini2", role="worker", rank=0, pid=101, started="b+7"),
    ]
    path = tmp_path / "processes.json"
    write_processes(path, entries)
    assert read_processes(path) == entries
    assert json.loads(path.read_text())[1] == {
        "node": "mini2",
        "role": "worker",
        "rank": 0,
        "pid": 101,
        "started": "b+7",
    }


@pytest.mark.parametrize(
    "text", ["", "{}", '[{"node": "a"}]', '[{"node":"a","role":"b","pid":-1}]']
)
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "processes.json"
    path.write_text(text)
    with pytest.raises(DataError, match=r"processes\.json is not a list of processes"):
        read_processes(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*processes\.json"):
        read_processes(tmp_path / "processes.json")
