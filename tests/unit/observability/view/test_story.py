from collections.abc import Sequence
from pathlib import Path

from made_runs import MadeRun
from smolcluster.observability.view.story import Story, read_story, story_of, told
from smolcluster.runs.events import Evaluated, Event, EventRecord, PushDropped, WorkerLost
from smolcluster.runs.files import utc_timestamp

LOST = WorkerLost(rank=1, node="win", reason="silent")
EVALUATED = Evaluated(epoch=0, step=1, val_loss=0.5)


def dropped(rank: int) -> PushDropped:
    place = {"epoch": 0, "start": 0, "stop": 32, "reason": "too old"}
    return PushDropped.model_validate(place | {"rank": rank, "node": "pi5", "outcome": "stale"})


def told_of(events: Sequence[Event]) -> Story:
    """One event a second."""
    return story_of(EventRecord(utc_timestamp(i), "a1", event) for i, event in enumerate(events))


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
    assert story.routine == {Evaluated: 10}


def test_a_mesh_is_said_to_start_with_its_ranks(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    run.started(algorithm="single", num_workers=1, mesh="dp 2 x pp 2", num_ranks=4, node="a")
    [start] = read_story(run.paths.events).happenings
    assert told(start.first.event) == "mesh started on a with 4 ranks, dp 2 x pp 2"
