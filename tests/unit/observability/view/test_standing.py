"""How a run stands, from what is there of its files."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from made_runs import BEGAN, MadeRun, killed_run, rank_status, worker_status
from reading import children_of, launched_run, server, worker
from smolcluster.launch.watch.probe import look
from smolcluster.observability.view.listing import line_of, listed, run_of
from smolcluster.observability.view.snapshot import read_snapshot
from smolcluster.observability.view.view import Folder, View
from smolcluster.runs.lock import run_lock
from smolcluster.runs.paths import process_title
from smolcluster.runs.status import STOPPED


@pytest.fixture
def run(tmp_path: Path) -> MadeRun:
    return MadeRun(tmp_path)


def state_of(run: MadeRun, now: float = BEGAN + 20) -> dict[str, Any]:
    return View(Folder(run.paths), now=lambda: now).state()


def states(root: Path) -> list[str | None]:
    return [each["state"] for each in listed(root)]


def summary_alone(run: MadeRun) -> None:
    killed_run(run.paths.root.parent)
    run.paths.status.unlink()


def stopped(run: MadeRun) -> None:
    run.started()
    run.status("ended", STOPPED, worker_status(0))


def broken_off(run: MadeRun) -> None:
    run.status("training")
    run.paths.lock.touch()


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            lambda run: killed_run(run.paths.root.parent),
            {
                "state": "ended",
                "is_over": True,
                "is_old": False,
                "model": "SimpleNN",
                "step": 120,
                "total_steps": 400,
                "wall_s": 60.0,
                "eta_s": None,
            },
        ),
        (summary_alone, {"state": "ended", "step": 100, "loss": 0.0213, "is_over": True}),
        (stopped, {"state": "stopped", "is_over": True}),
        (broken_off, {"state": "broken off", "is_over": True, "step": 120}),
        (lambda _: None, {"state": "starting", "workers": [], "algorithm": None, "problems": []}),
    ],
    ids=["complete", "of before", "stopped", "broken off", "nothing"],
)
def test_a_run_is_told_by_what_is_there(
    run: MadeRun, make: Callable[[MadeRun], object], expected: dict[str, object]
) -> None:
    make(run)
    state = state_of(run)
    assert {name: state[name] for name in expected} == expected
    is_cut = expected["state"] in ("starting", "broken off")
    assert is_cut == ("samples_per_s" not in state)
    assert states(run.paths.root.parent) == [expected["state"]]


def test_a_run_that_goes_on_says_what_is_left_and_how_old_its_news_is(run: MadeRun) -> None:
    run.started()
    run.status("training", None, worker_status(0))
    with run_lock(run.paths.lock):
        state = state_of(run, BEGAN + 2)
        assert (state["state"], state["eta_s"], state["age_s"]) == ("training", 4.375, 2.0)
        assert not state["is_old"]
        assert state_of(run, BEGAN + 60)["is_old"]
        [line] = listed(run.paths.root.parent)
        assert line == {"run_id": "edp-1", "state": "training", "algorithm": "edp"}


def test_the_configuration_is_seen_however_late_it_is_written(run: MadeRun) -> None:
    view = View(Folder(run.paths))
    assert (view.settings, view.problems) == (None, [])
    run.config("num_epochs=7")
    assert view.settings is not None
    assert view.settings.train.num_epochs == 7
    run.config("num_epochs=9")
    os.utime(run.paths.config, ns=(1, 1))
    assert view.settings.train.num_epochs == 9, "as a resume changes it"


def test_a_file_that_is_damaged_is_a_problem(run: MadeRun) -> None:
    run.paths.status.write_text("{")
    run.paths.summary.write_text("{}")
    first, second = state_of(run)["problems"]
    assert str(run.paths.status) in first
    assert str(run.paths.summary) in second


def test_age_is_by_this_machines_clock_once_the_server_was_seen_to_write(run: MadeRun) -> None:
    """The clock of the server's machine may be an hour off."""
    run.status("training")
    ticks = [100.0]
    view = View(Folder(run.paths), now=lambda: BEGAN - 3600, clock=lambda: ticks[0])
    assert view.state()["age_s"] == 0.0
    run.now = 1.0
    run.status("training")
    ticks[0] = 101.0
    assert view.state()["age_s"] == 0.0
    ticks[0] = 105.0
    assert view.state()["age_s"] == 4.0


def test_workers_of_a_summary_have_their_shares(run: MadeRun) -> None:
    summary_alone(run)
    shares = [(worker["node"], worker["share"]) for worker in state_of(run)["workers"]]
    assert shares == [("pi5", 0.5), ("win", 0.1), ("macbook", 0.4)]


def test_workers_that_have_not_come_yet_and_those_that_a_resume_has_added_are_rows(
    run: MadeRun,
) -> None:
    ticks = iter(range(100))
    view = View(Folder(run.paths), clock=lambda: next(ticks))

    def workers() -> list[tuple[int, str, str]]:
        return [(each["rank"], each["node"], each["state"]) for each in view.state()["workers"]]

    with run_lock(run.paths.lock):
        assert workers() == []
        run.status("waiting", None, worker_status(0))
        children_of(run.paths, os.getpid(), 1, 1)
        assert workers() == [(0, "pi5", "joined"), (1, "pi2", "starting")]
        launched = launched_run(run.paths.root.parent, server(), worker(7, "nas", "nas"))
        launched.launched.rename(run.paths.launched)
        assert workers() == [(0, "pi5", "joined"), (7, "nas", "starting")]


def test_what_a_worker_that_has_gone_reported_is_not_shown_as_if_it_were_news(
    run: MadeRun,
) -> None:
    process_stats = {"cpu": 1.5}
    lost = worker_status(1, state="lost", process_stats=process_stats)
    run.status("training", None, worker_status(0, process_stats=process_stats), lost)
    with run_lock(run.paths.lock):
        told = [worker["process_stats"] for worker in state_of(run)["workers"]]
    assert told == [process_stats, {}]


def test_staleness_is_what_was_counted_else_what_was_sampled(run: MadeRun) -> None:
    run.steps(1, 6)
    run.status("training", None, worker_status(0))
    sampled = {"counts": [2, 2, 2, 0, 0, 0, 0, 0], "is_sampled": True}
    assert state_of(run)["staleness"] == sampled
    counted = [5, 0, 0, 1, 0, 0, 0, 0]
    run.status("training", None, *(worker_status(rank, staleness=counted) for rank in (0, 1)))
    twice = {"counts": [10, 0, 0, 2, 0, 0, 0, 0], "is_sampled": False}
    assert state_of(run)["staleness"] == twice


def test_of_a_run_of_other_machines_no_state_is_made_up(tmp_path: Path) -> None:
    paths = launched_run(tmp_path, server("mini@mini1"), worker(0, "pi5", "pi@pi5"))
    assert states(tmp_path) == [None]
    for state, is_alive, expected in (("stopped", False, "stopped"), ("training", True, None)):
        heard = line_of(read_snapshot(paths), state, is_alive=is_alive)
        paths.standing.write_text(heard.model_dump_json())
        assert states(tmp_path) == [expected]


def test_runs_are_listed_the_newest_first_and_found_by_name(tmp_path: Path) -> None:
    for age, name in enumerate(("edp-new", "edp-old")):
        run = MadeRun(tmp_path, name)
        run.config()
        moment = time.time() - age
        os.utime(run.paths.config, (moment, moment))
    (tmp_path / ".hidden").mkdir()
    assert [each["run_id"] for each in listed(tmp_path)] == ["edp-new", "edp-old"]

    def found(name: str) -> str | None:
        paths = run_of(tmp_path, name)
        return None if paths is None else paths.run_id

    assert (found("edp-old"), found("edp-none"), found("latest")) == ("edp-old", None, "edp-new")
    (tmp_path / "latest").symlink_to("edp-old")
    assert found("latest") == "edp-old"


def test_a_mesh_is_told_by_its_ranks_and_grid(run: MadeRun) -> None:
    """Rank 0 owns the run, and is one of the ranks."""
    run.started(algorithm="single", mesh="dp 2 x fsdp 1 x tp 1 x pp 1", num_ranks=2, node="a")
    run.now = 10.0
    ranks = [rank_status(0, samples_per_s=70.0), rank_status(1, "b", samples_per_s=60.0)]
    run.status("training", None, ranks=ranks)
    with run_lock(run.paths.lock):
        state = state_of(run, BEGAN + 12)
    assert (state["algorithm"], state["num_ranks"], state["has_pushes"]) == ("mesh", 2, False)
    assert state["grid"] == "dp 2 x fsdp 1 x tp 1 x pp 1"
    named = [
        (process_title(each["role"], each["node"], each["rank"]), each["samples_per_s"])
        for each in state["workers"]
    ]
    assert named == [("rank 0 (a)", 70.0), ("rank 1 (b)", 60.0)]
    assert [each["silent_s"] for each in state["workers"]] == [3.0, 3.0]
    assert [each["algorithm"] for each in listed(run.paths.root.parent)] == ["mesh"]


def test_the_owner_of_a_mesh_is_called_rank_0_by_its_log_and_its_reports(run: MadeRun) -> None:
    run.started(algorithm="single", mesh="dp 2 x fsdp 1 x tp 1 x pp 1", num_ranks=2, node="a")
    run.status("ended")
    run.paths.log_file("rank", "a", None).touch()
    [probed] = look(run.paths).seen
    assert probed.title == process_title("rank", "a", None) == "rank 0 (a)"
