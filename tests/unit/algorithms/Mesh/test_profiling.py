"""Traces of several ranks in one."""

from smolcluster.algorithms.Mesh.profiling import merged

OLD = {"ph": "M", "name": "process_name", "pid": 77, "args": {"name": "python"}}


def test_events_of_ranks_are_told_apart_and_stand_at_their_time() -> None:
    events = [
        OLD,
        {"ph": "X", "name": "aten::mm", "pid": 77, "tid": 78, "ts": 5.0, "dur": 2.0},
        {"ph": "s", "id": 9, "pid": 77, "tid": 78, "ts": 6.0},
    ]
    traces = [{"baseTimeNanoseconds": base, "traceEvents": events} for base in (7_000, 9_000)]
    whole = merged(traces, ["a", "b"])
    assert whole["baseTimeNanoseconds"] == 7_000
    found = whole["traceEvents"]
    named = [each["args"]["name"] for each in found if each.get("name") == "process_name"]
    assert named == ["rank 0 on a", "rank 1 on b"]
    timed = [(each["pid"], each["tid"], each["ts"]) for each in found if each["ph"] == "X"]
    assert timed == [(0, 78, 5.0), (1, 78, 7.0)]
    assert len({each["id"] for each in found if each["ph"] == "s"}) == 2
