"""What has happened, for a time line."""

from pathlib import Path

from made_runs import MadeRun, killed_run
from smolcluster.observability.view.happenings import MAX_OF_A_KIND, Happenings
from smolcluster.runs.events import PushDropped


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
    assert (lost["rank"], lost["node"], lost["text"]) == (
        1,
        "win",
        "worker 2 (win) is lost: it was cut",
    )


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
