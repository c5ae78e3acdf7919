"""What has happened, for a time line."""

from pathlib import Path

from made_runs import MadeRun, killed_run
from smolcluster.observability.view.happenings import MAX_OF_A_KIND, Happenings
from smolcluster.runs.events import Evaluated, PushDropped, RunResumed


def happenings(run: MadeRun) -> Happenings:
    found = Happenings(run.paths.events)
    while found.poll():
        pass
    return found


def test_events_come_in_order_with_who_and_what(tmp_path: Path) -> None:
    shown = happenings(killed_run(tmp_path)).shown()
    assert [event["kind"] for event in shown] == [
        *("run_started", "worker_joined", "worker_joined", "worker_joined"),
        *("worker_lost", "lease_returned", "run_ended"),
    ]
    lost = shown[4]
    assert (lost["rank"], lost["node"], lost["text"]) == (1, "win", "reason it was cut")


def test_of_a_frequent_kind_not_all_are_kept_but_all_are_counted(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    for number in range(3000):
        run.now = float(number)
        drop = {"rank": 0, "node": "pi5", "outcome": "stale", "epoch": 0, "start": 0, "stop": 32}
        run.event(PushDropped.model_validate(drop | {"reason": "too old"}))
    run.lost(1)
    found = happenings(run)
    kinds = [event["kind"] for event in found.shown()]
    assert found.counts["push_dropped"] == 3000
    assert MAX_OF_A_KIND / 2 <= kinds.count("push_dropped") <= 2 * MAX_OF_A_KIND
    assert kinds.count("worker_lost") == 1


def test_evaluations_that_were_undone_are_no_curve(tmp_path: Path) -> None:
    before = MadeRun(tmp_path)
    before.started()
    before.event(*(Evaluated(epoch=0, step=step, val_loss=1.0) for step in (10, 20)))
    after = MadeRun(tmp_path, incarnation="b2")
    after.now = 5.0
    after.event(RunResumed(step=10, samples_applied=320))
    after.event(Evaluated(epoch=0, step=15, val_loss=0.5))
    columns = happenings(before).evaluations()
    assert (columns["step"], columns["val_loss"]) == ([10, 15], [1.0, 0.5])
    assert "val_accuracy" not in columns
