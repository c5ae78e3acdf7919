import json
from pathlib import Path

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
