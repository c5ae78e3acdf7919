"""How a run stands, from what is there of its files."""

import os
import time
from pathlib import Path
from typing import Any

from made_runs import BEGAN, MadeRun, killed_run, worker_status
from reading import launched_run, server, worker
from smolcluster.observability.view.listing import listed, run_of
from smolcluster.observability.view.run import RunView, files_here
from smolcluster.runs.lock import RunLock
from smolcluster.runs.processes import ProcessEntry, write_processes
from smolcluster.runs.status import STOPPED
from smolcluster.utils import locks


def state_of(run: MadeRun, now: float = BEGAN + 20) -> dict[str, Any]:
    return RunView(files_here(run.paths), now=lambda: now).state()


def test_a_run_that_is_over(tmp_path: Path) -> None:
    state = state_of(killed_run(tmp_path))
    assert (state["state"], state["is_over"], state["is_old"]) == ("ended", True, False)
    assert (state["step"], state["total_steps"], state["wall_s"]) == (120, 400, 60.0)
    assert state["eta_s"] is None
    assert [worker["node"] for worker in state["workers"]] == ["pi5", "win", "macbook"]
    assert state["model"] == "SimpleNN"


def test_a_run_that_was_stopped_is_over(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    run.started()
    run.status("ended", STOPPED, worker_status(0))
    state = state_of(run)
    assert (state["state"], state["is_over"]) == ("stopped", True)
    assert [each["state"] for each in listed(tmp_path)] == ["stopped"]


def test_a_run_without_a_status_is_told_by_its_summary(tmp_path: Path) -> None:
    run = killed_run(tmp_path)
    run.paths.status.unlink()
    state = state_of(run)
    assert (state["state"], state["step"], state["loss"]) == ("ended", 100, 0.0213)
    assert [worker["share"] for worker in state["workers"]] == [0.5, 0.1, 0.4]


def test_a_run_that_goes_on_says_what_is_left_and_how_old_its_news_is(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    run.started()
    run.status("training", None, worker_status(0))
    descriptor = locks.take(run.paths.lock, lambda _: None)
    try:
        state = state_of(run, BEGAN + 2)
        assert (state["state"], state["eta_s"], state["age_s"]) == ("training", 4.375, 2.0)
        assert not state["is_old"]
        assert state_of(run, BEGAN + 60)["is_old"]
    finally:
        locks.release(descriptor)


def test_a_run_that_nobody_holds_any_more_has_broken_off(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    run.status("training")
    run.paths.lock.touch()
    state = state_of(run)
    assert (state["state"], state["is_over"], state["eta_s"]) == ("broken off", True, None)


def test_runs_are_listed_as_they_stand(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    run.status("training")
    with RunLock(run.paths.lock):
        assert listed(tmp_path) == [{"run_id": "edp-1", "state": "training", "algorithm": "edp"}]
    assert [each["state"] for each in listed(tmp_path)] == ["broken off"]
    run.paths.status.unlink()
    run.summary()
    assert [each["state"] for each in listed(tmp_path)] == ["ended"]


def test_a_file_that_is_damaged_is_a_problem_and_one_that_is_missing_is_none(
    tmp_path: Path,
) -> None:
    run = MadeRun(tmp_path)
    assert state_of(run)["problems"] == []
    run.paths.status.write_text("{")
    run.paths.summary.write_text("{}")
    first, second = state_of(run)["problems"]
    assert str(run.paths.status) in first
    assert str(run.paths.summary) in second


def test_workers_that_a_resume_has_added_are_rows(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    ticks = iter(range(100))
    view = RunView(files_here(run.paths), clock=lambda: next(ticks))
    assert view.state()["workers"] == []
    launched = launched_run(tmp_path, server(), worker(0, "pi5", "pi@pi5"))
    launched.launched.rename(run.paths.launched)
    assert [each["node"] for each in view.state()["workers"]] == ["pi5"]


def test_age_is_by_this_machines_clock_once_the_server_was_seen_to_write(tmp_path: Path) -> None:
    """The clock of the server's machine may be an hour off."""
    run = MadeRun(tmp_path)
    run.status("training")
    ticks = [100.0]
    view = RunView(files_here(run.paths), now=lambda: BEGAN - 3600, clock=lambda: ticks[0])
    assert view.state()["age_s"] == 0.0
    run.now = 1.0
    run.status("training")
    ticks[0] = 101.0
    assert view.state()["age_s"] == 0.0
    ticks[0] = 105.0
    assert view.state()["age_s"] == 4.0


def test_workers_that_have_not_come_yet_are_rows_too(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    run.status("waiting", None, worker_status(0))
    entries = [
        ProcessEntry(node="mini1", role="server", pid=os.getpid()),
        *(
            ProcessEntry(node=node, role="worker", rank=rank, pid=1)
            for rank, node in enumerate("ab")
        ),
    ]
    write_processes(run.paths.processes, entries)
    workers = state_of(run)["workers"]
    assert [(worker["rank"], worker["state"]) for worker in workers] == [
        *((0, "joined"), (1, "starting"))
    ]


def test_what_a_worker_that_has_gone_reported_is_not_shown_as_if_it_were_news(
    tmp_path: Path,
) -> None:
    run = MadeRun(tmp_path)
    process_stats = {"cpu": 1.5}
    lost = worker_status(1, state="lost", process_stats=process_stats)
    run.status("training", None, worker_status(0, process_stats=process_stats), lost)
    assert [worker["process_stats"] for worker in state_of(run)["workers"]] == [process_stats, {}]


def test_staleness_is_what_was_counted_else_what_was_sampled(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    run.steps(1, 6)
    run.status("training", None, worker_status(0))
    sampled = state_of(run)["staleness"]
    assert sampled == {"counts": [2, 2, 2, 0, 0, 0, 0, 0], "is_sampled": True}
    counted = [5, 0, 0, 1, 0, 0, 0, 0]
    run.status(
        *("training", None),
        *(worker_status(rank, staleness=counted) for rank in (0, 1)),
    )
    assert state_of(run)["staleness"] == {
        "counts": [10, 0, 0, 2, 0, 0, 0, 0],
        "is_sampled": False,
    }


def test_of_a_run_of_other_machines_no_state_is_made_up(tmp_path: Path) -> None:
    paths = launched_run(tmp_path, server("mini@mini1"), worker(0, "pi5", "pi@pi5"))

    def states() -> list[str | None]:
        return [each["state"] for each in listed(paths.root.parent)]

    assert states() == [None]
    paths.standing.write_text('{"state": "stopped", "is_alive": false}')
    assert states() == ["stopped"]
    paths.standing.write_text('{"state": "training", "is_alive": true}')
    assert states() == [None]


def test_an_empty_folder_is_a_run_of_which_nothing_is_known(tmp_path: Path) -> None:
    state = state_of(MadeRun(tmp_path))
    assert (state["state"], state["workers"], state["algorithm"]) == ("starting", [], None)


def test_runs_are_listed_the_newest_first_and_found_by_name(tmp_path: Path) -> None:
    for age, name in enumerate(("edp-new", "edp-old")):
        run = MadeRun(tmp_path, name)
        run.config()
        run.status("training")
        moment = time.time() - age
        os.utime(run.paths.config, (moment, moment))
    (tmp_path / "latest").symlink_to("edp-old")
    (tmp_path / ".hidden").mkdir()
    assert [run["run_id"] for run in listed(tmp_path)] == ["edp-new", "edp-old"]
    latest, named = run_of(tmp_path, "latest"), run_of(tmp_path, "edp-new")
    assert latest is not None
    assert named is not None
    assert (latest.run_id, named.run_id) == ("edp-old", "edp-new")
    assert run_of(tmp_path, "edp-none") is None
