import re
import stat
from datetime import UTC, datetime
from pathlib import Path

import pytest

from smolcluster.errors import ConfigError
from smolcluster.runs.paths import (
    RunPaths,
    create_run,
    find_run,
    log_stem,
    new_run_id,
    parse_log_stem,
    process_title,
    runs_root,
)

NOW = datetime(2026, 11, 20, 13, 50, 25, tzinfo=UTC)


def test_a_run_id_says_algorithm_and_time() -> None:
    assert new_run_id("edp", NOW, "3f9c") == "edp-20261120-135025-3f9c"
    assert re.fullmatch(r"edp-20261120-135025-[0-9a-f]{4}", new_run_id("edp", NOW))


def test_files_of_a_run_have_the_names_that_users_know(tmp_path: Path) -> None:
    run = RunPaths(tmp_path / "edp-1")
    names = [
        *(run.config, run.status, run.events, run.metrics, run.series, run.summary, run.processes),
        *(run.logs, run.checkpoints, run.lock),
    ]
    assert [str(path.relative_to(run.root)) for path in names] == [
        "config.yaml",
        "status.json",
        "events.jsonl",
        "metrics.jsonl",
        "series.json",
        "summary.json",
        "processes.json",
        "logs",
        "checkpoints",
        ".lock",
    ]
    assert run.run_id == "edp-1"
    assert run.log_file("server", "mini1") == run.logs / "server-mini1.log"
    assert run.log_file("worker", "mini2", 0) == run.logs / "worker-rank0-mini2.log"


def test_a_node_name_cannot_lead_out_of_the_logs() -> None:
    assert log_stem("worker", "../../x y", 3) == "worker-rank3-.._.._x_y"


@pytest.mark.parametrize(
    ("process", "title"),
    [
        (("server", "mini1", None), "server mini1"),
        (("server", "my-mini.local", None), "server my-mini.local"),
        (("worker", "pi5", 0), "worker 1 (pi5)"),
        (("worker", "worker1", 0), "worker 1"),
        (("worker", "worker2", 0), "worker 1 (worker2)"),
    ],
)
def test_a_log_says_by_its_name_whose_it_is(
    process: tuple[str, str, int | None], title: str
) -> None:
    assert process_title(*process) == title
    assert parse_log_stem(log_stem(*process)) == process


@pytest.mark.parametrize("stem", ["", "Weird", "server-", "-mini1", "two\nlines-x"])
def test_a_name_that_no_process_gives_its_log_says_nothing(stem: str) -> None:
    assert parse_log_stem(stem) is None


def test_creating_a_run_makes_its_folder_and_moves_latest(tmp_path: Path) -> None:
    first = create_run(tmp_path / "runs", "edp-1")
    second = create_run(tmp_path / "runs", "edp-2")
    assert first.logs.is_dir()
    assert second.logs.is_dir()
    assert (tmp_path / "runs" / "latest").readlink() == Path("edp-2")
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [
        "edp-1",
        "edp-2",
        "latest",
    ]


def test_other_users_of_the_machine_do_not_see_into_a_run(tmp_path: Path) -> None:
    paths = create_run(tmp_path / "runs", "edp-1")
    assert stat.S_IMODE(paths.root.stat().st_mode) == 0o700


def test_a_worker_joins_a_run_without_moving_latest(tmp_path: Path) -> None:
    create_run(tmp_path, "edp-1")
    create_run(tmp_path, "edp-0", newest=False)
    create_run(tmp_path, "edp-1", newest=False)
    assert find_run(tmp_path).run_id == "edp-1"


@pytest.mark.parametrize(
    "run_id", ["../up", "/etc", "", "a/b", ".hidden", "latest", "x" * 101, "a\n"]
)
def test_a_run_id_that_is_no_folder_name_is_refused(tmp_path: Path, run_id: str) -> None:
    with pytest.raises(ConfigError, match="cannot name a folder"):
        create_run(tmp_path, run_id)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot make .*file/edp-1.*set runs_dir"):
        create_run(tmp_path / "file", "edp-1")


def test_an_unknown_run_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no run that has begun .*launch --help"):
        find_run(tmp_path)
    create_run(tmp_path, "edp-1")
    with pytest.raises(ConfigError, match=r"no run 'edp-9' .*known: edp-1\)"):
        find_run(tmp_path, "edp-9")


def test_runs_lie_at_the_projects_root_whatever_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    project = Path(__file__).resolve().parents[3]
    assert runs_root() == project / "runs"


def test_a_given_folder_is_taken_from_the_working_directory_or_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert runs_root(Path("mine")) == tmp_path / "mine"
    assert runs_root(Path("~/mine")) == tmp_path / "home" / "mine"


@pytest.mark.parametrize("name", ["events.jsonl", "config.yaml", "logs/server-mini1.log", "logs"])
def test_a_run_s_folder_does_not_lead_to_other_files(tmp_path: Path, name: str) -> None:
    treasure = tmp_path / "treasure"
    treasure.touch()
    run = tmp_path / "runs" / "edp-1"
    (run / name).parent.mkdir(parents=True)
    (run / name).symlink_to(treasure)
    with pytest.raises(ConfigError, match=r"is a link to .*treasure"):
        create_run(run.parent, "edp-1")
    (run / name).unlink()
    (run / "other.jsonl").touch()
    (run / "events.jsonl").symlink_to("other.jsonl")
    (tmp_path / "disk").mkdir()
    (run / "checkpoints").symlink_to(tmp_path / "disk")
    assert create_run(run.parent, "edp-1").root == run
