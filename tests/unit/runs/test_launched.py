import shutil
from pathlib import Path

import pytest

from smolcluster.runs.launched import Launched, LaunchedProcess, launched_of, write_launched
from smolcluster.runs.paths import create_run


@pytest.mark.parametrize("session", ["", "edp-1-server"])
def test_only_a_run_in_sessions_is_looked_for_where_it_was_launched(
    tmp_path: Path, session: str
) -> None:
    """A copy of another run is that run, whose original `clean` must leave alone."""
    paths = create_run(tmp_path / "runs", "edp-1")
    server = LaunchedProcess(
        node="mini1", role="server", run_dir=str(paths.root), session=session, pid=1
    )
    write_launched(paths.launched, Launched(run_id="edp-1", algorithm="edp", processes=(server,)))
    shutil.copytree(tmp_path / "runs", tmp_path / "copies")
    copied = type(paths)(tmp_path / "copies" / "edp-1")
    launched = launched_of(copied)
    assert launched is not None
    assert launched.server.run_dir == str(paths.root if session else copied.root)
