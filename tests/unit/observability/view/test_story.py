from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest

from made_runs import MadeRun, killed_run
from smolcluster.observability.view.story import MAX_OF_A_KIND, Story, told
from smolcluster.runs.events import Evaluated, Event, EventRecord, PushDropped, WorkerLost
from smolcluster.runs.files import utc_timestamp

LOST = WorkerLost(rank=1, node="win", reason="silent")
EVALUATED = Evaluated(epoch=0, step=1, val_loss=0.5)


def dropped(rank: int) -> PushDropped:
    place = {"epoch": 0, "start": 0, "stop": 32, "reason": "too old"}
    return PushDropped.model_validate(place | {"rank": rank, "node": "pi5", "outcome": "stale"})


def told_of(events: Sequence[Event]) -> Story:
    """One event a second."""
    story = Story(Path("none"))
    for second, event in enumerate(events):
        story.take(EventRecord(utc_timestamp(second), "a1", event))
    return story


def story_of(run: MadeRun, newest_nbytes: int | None = None) -> Story:
    """All that its file has."""
    story = Story(run.paths.events, newest_nbytes)
    while story.poll():
        pass
    return story


def test_pushes_that_two_workers_drop_by_turns_are_a_row_a_worker() -> None:
    first, second = told_of([dropped(0), dropped(1)] * 500).happenings
    assert (first.first.event, first.count, first.last_ts) == (dropped(0), 500, utc_timestamp(998))
    assert (second.first.event, second.count) == (dropped(1), 500)


def test_what_happened_in_between_begins_new_rows() -> None:
    events: list[Event] = [dropped(0), dropped(0), LOST, dropped(0), LOST]
    rows = [(each.first.event, each.count) for each in told_of(events).happenings]
    assert rows == [(dropped(0), 2), (LOST, 1), (dropped(0), 1), (LOST, 1)]


def test_the_routine_does_not_begin_new_rows() -> None:
    story = told_of([dropped(0), EVALUATED] * 10)
    assert [each.count for each in story.happenings] == [10]
    assert story.counts["evaluated"] == 10


@pytest.mark.parametrize("kind", get_args(Event))
def test_every_kind_of_event_has_a_sentence(kind: type[Event]) -> None:
    """Whose text holds no field by its name, and reads none of a peer's as one."""
    values = {str: "{x}", int: 2, float: 0.5, bool: True, Literal: "stale"}
    fields = {
        name: values.get(get_origin(field.annotation) or field.annotation, 0.5)
        for name, field in kind.model_fields.items()
        if field.is_required()
    }
    said = told(kind.model_validate(fields))
    assert said.replace("{x}", "").isprintable()
    assert "{" not in said.replace("{x}", "")


def test_a_mesh_is_said_to_start_with_its_ranks(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    run.started(algorithm="single", num_workers=1, mesh="dp 2 x pp 2", num_ranks=4, node="a")
    [start] = story_of(run).happenings
    assert told(start.first.event) == "mesh started on a with 4 ranks, dp 2 x pp 2"


def test_events_come_in_order_with_who_and_what(tmp_path: Path) -> None:
    shown = story_of(killed_run(tmp_path)).shown()
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
    found = story_of(run)
    kinds = [event["kind"] for event in found.shown()]
    assert found.counts["push_dropped"] == 3000
    assert MAX_OF_A_KIND / 2 <= kinds.count("push_dropped") <= 2 * MAX_OF_A_KIND
    assert kinds.count("worker_lost") == 1


def test_of_a_long_file_the_newest_events_are_read_and_another_file_is_begun_anew(
    tmp_path: Path,
) -> None:
    run = MadeRun(tmp_path)
    for number in range(200):
        run.lost(number % 2)
    story = story_of(run, newest_nbytes=2000)
    assert 5 < len(story.events) < 50
    assert story.shown()[-1]["rank"] == 1
    run.paths.events.write_bytes(b"")
    run.lost(2)
    assert story.poll()
    assert {each["rank"] for each in story.shown()} == {2}
