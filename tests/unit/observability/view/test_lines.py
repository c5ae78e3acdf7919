"""Log lines: searched from the newest, followed, whatever is in them."""

from pathlib import Path

from made_runs import MadeRun
from smolcluster.observability.view import lines
from smolcluster.observability.view.lines import (
    Found,
    NewLines,
    Wanted,
    file_of,
    line_at,
    log_files,
    search,
)

ALL = Wanted()


def files(run: MadeRun) -> dict[str, Path]:
    return log_files([run.paths.logs])


def messages(run: MadeRun, wanted: Wanted = ALL, at_most: int = 100) -> list[str]:
    return [entry["message"] for entry in search(files(run), wanted, at_most).entries]


def talkative(folder: Path) -> MadeRun:
    run = MadeRun(folder)
    run.says("server", "mini1", None, ("INFO", "listening"))
    run.now = 1.0
    run.says("worker", "pi5", 0, ("WARNING", "the link is slow"))
    run.now = 2.0
    run.says("worker", "win", 1, ("ERROR", "cannot go on"), exception=OSError("no route"))
    run.now = 3.0
    run.says("server", "mini1", None, ("INFO", "worker 2 (win) has left"))
    return run


def test_lines_of_all_processes_in_the_order_of_time(tmp_path: Path) -> None:
    run = talkative(tmp_path)
    found = search(files(run), ALL, 100)
    assert [entry["message"] for entry in found.entries] == [
        *("listening", "the link is slow", "cannot go on", "worker 2 (win) has left")
    ]
    assert found.is_all
    error = found.entries[2]
    assert (error["node"], error["rank"], error["component"]) == ("win", 1, "worker")
    assert "OSError: no route" in error["detail"]


def test_the_newest_are_found_when_there_are_too_many(tmp_path: Path) -> None:
    run = talkative(tmp_path)
    found = search(files(run), ALL, 2)
    assert [entry["message"] for entry in found.entries] == [
        "cannot go on",
        "worker 2 (win) has left",
    ]
    assert not found.is_all


def test_lines_are_chosen_by_node_rank_level_and_text(tmp_path: Path) -> None:
    run = talkative(tmp_path)
    assert messages(run, Wanted(node="pi5")) == ["the link is slow"]
    assert messages(run, Wanted(rank=1)) == ["cannot go on"]
    assert messages(run, Wanted(level=30)) == ["the link is slow", "cannot go on"]
    assert messages(run, Wanted(text="HAS LEFT")) == ["worker 2 (win) has left"]
    assert messages(run, Wanted(text="no route")) == ["cannot go on"]


def test_the_owner_of_a_mesh_is_found_as_its_rank_0(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    run.says("rank", "a", None, ("INFO", "of rank 0"))
    run.says("rank", "a", 1, ("INFO", "of rank 1"))
    assert messages(run, Wanted(rank=0)) == ["of rank 0"]
    assert messages(run, Wanted(rank=1)) == ["of rank 1"]


def test_old_files_of_a_rotated_log_are_searched_too(tmp_path: Path) -> None:
    run = talkative(tmp_path)
    log = run.paths.log_file("server", "mini1")
    log.rename(log.with_name(f"{log.name}.1"))
    run.says("server", "mini1", None, ("INFO", "new file"))
    assert set(messages(run, Wanted(node="mini1"))) == {
        *("listening", "worker 2 (win) has left", "new file")
    }
    entry = search(files(run), Wanted(text="listening"), 1).entries[0]
    path = file_of(files(run), entry["file"])
    assert path is not None
    whole = line_at(path, entry["offset"])
    assert whole is not None
    assert whole["message"] == "listening"


def test_a_long_message_is_cut_until_it_is_asked_for(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    run.says("server", "mini1", None, ("INFO", "x" * 1_000_000), ("INFO", "after it"))
    huge, after = search(files(run), ALL, 10).entries
    assert after["message"] == "after it"
    assert len(huge["message"]) == lines.MAX_SHOWN
    path = file_of(files(run), huge["file"])
    assert path is not None
    whole = line_at(path, huge["offset"])
    assert whole is not None
    assert len(whole["message"]) == len(huge["message"]) + huge["more"]


def test_what_is_no_json_is_shown_as_it_is(tmp_path: Path) -> None:
    run = talkative(tmp_path)
    with run.paths.log_file("server", "mini1").open("ab") as file:
        file.write(b"\xff\x00 core dumped <b>\n\n   \n[1, 2]\n")
    found = search(files(run), Wanted(node="mini1"), 100).entries
    assert [entry["message"] for entry in found][-2:] == ["\ufffd\x00 core dumped <b>", "[1, 2]"]


def test_places_are_right_over_the_borders_of_blocks(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    path = run.paths.logs / "server-mini1.log"
    path.write_text("".join(f"line {number:06} {'y' * 100}\n" for number in range(25_000)))
    found = search(files(run), Wanted(text="line 000"), 2000).entries
    for entry in (found[0], found[-1]):
        whole = line_at(path, entry["offset"])
        assert whole is not None
        assert whole["message"] == entry["message"]
    assert len(found) == 1000


def test_a_place_that_is_no_beginning_of_a_line_has_none(tmp_path: Path) -> None:
    run = talkative(tmp_path)
    path = run.paths.log_file("server", "mini1")
    assert line_at(path, 5) is None
    assert line_at(path, 10**9) is None
    assert line_at(tmp_path / "no.log", 0) is None
    assert file_of(files(run), "../status.json") is None


def test_new_lines_are_those_that_come_later(tmp_path: Path) -> None:
    run = talkative(tmp_path)
    new = NewLines(files(run))
    assert new.poll(files(run)) == Found([], True)
    run.says("worker", "pi5", 0, ("INFO", "again"))
    run.says("worker", "macbook", 2, ("INFO", "joined late"))
    come = new.poll(files(run))
    assert {entry["message"] for entry in come.entries} == {"again", "joined late"}
    assert come.is_all
    assert new.poll(files(run)) == Found([], True)


def test_a_copy_that_grows_is_followed_in_place_of_what_was_fetched_before(tmp_path: Path) -> None:
    run, there = talkative(tmp_path / "here"), talkative(tmp_path / "copies")
    new = NewLines(files(run))
    there.says("worker", "pi5", 0, ("INFO", "again"))
    come = new.poll(log_files([there.paths.logs, run.paths.logs])).entries
    assert "again" in {entry["message"] for entry in come}


def test_of_a_burst_the_newest_are_handed_out_and_it_is_said_that_there_are_others(
    tmp_path: Path,
) -> None:
    run = talkative(tmp_path)
    new = NewLines(files(run))
    numbers = range(lines.MAX_NEW + 1)
    run.says("worker", "pi5", 0, *(("INFO", f"line {number}") for number in numbers))
    come = new.poll(files(run))
    assert not come.is_all
    assert come.entries[0]["message"] == "line 1"
    assert new.poll(files(run)) == Found([], True)


def test_a_search_that_nobody_waits_for_ends_within_a_block(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    path = run.paths.logs / "server-mini1.log"
    path.write_text(f"{'y' * 99}\n" * 50_000)
    answers = iter([True, False])
    found = search(files(run), Wanted(text="y"), 10**6, lambda: next(answers, False))
    assert not found.is_all
    assert 0 < len(found.entries) * 100 <= lines.BLOCK_NBYTES
