import math
import os
from html.parser import HTMLParser
from pathlib import Path

import pytest

from made_runs import NODES, MadeRun, killed_run, worker_status
from reading import launched_run, server, worker
from smolcluster.errors import SmolclusterError
from smolcluster.observability.metrics import MetricRecord
from smolcluster.observability.report.page import write_report
from smolcluster.observability.report.render import MAX_ROWS, cut
from smolcluster.observability.view.stages import numbers_of
from smolcluster.observability.view.view import Folder, View
from smolcluster.runs.advice import ADVICE, LinkSpeed, Prediction
from smolcluster.runs.events import (
    PushDropped,
    WorkerJoined,
)
from smolcluster.runs.lock import run_lock
from smolcluster.runs.paths import RunPaths
from smolcluster.runs.summary import read_summary

VOID = {"meta", "br", "line", "path"}


class Reader(HTMLParser):
    """A page's texts and rows by section, its elements and attributes; all it opens it must close."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.text: dict[str, str] = {}
        self.rows: dict[str, list[list[str]]] = {}
        self._section = "head"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag == "section":
            self._section = str(dict(attrs)["id"])
        if tag == "tr":
            self.rows.setdefault(self._section, []).append([])
        if tag in ("td", "th"):
            self.rows[self._section][-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        assert self.open.pop() == tag
        if tag == "section":
            self._section = "foot"

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text[self._section] = self.text.get(self._section, "") + data
            if {"td", "th"} & set(self.open):
                self.rows[self._section][-1][-1] += data

    def words(self, section: str) -> str:
        return " ".join(self.text.get(section, "").split())

    def row(self, section: str, first: str) -> dict[str, str]:
        head, *rows = self.rows[section]
        [found] = [row for row in rows if row[0] == first]
        return dict(zip(head, found, strict=True))


def read(page: Path) -> Reader:
    reader = Reader()
    reader.feed(page.read_text(encoding="utf-8"))
    reader.close()
    assert reader.open == []
    return reader


def report_of(run: MadeRun | RunPaths, ended_by: BaseException | None = None) -> Reader:
    paths = run.paths if isinstance(run, MadeRun) else run
    assert write_report(paths, ended_by) == paths.report
    return read(paths.report)


def process_stats(rank: int, node: str, **values: float) -> MetricRecord:
    usual = {"share/forward": 0.25, "share/backward": 0.5, "share/send": 0.125, "memory_bytes": 1e9}
    return MetricRecord("worker", 1, 0, usual | values, rank=rank, node=node)


def test_the_page_says_what_the_summary_says(tmp_path: Path) -> None:
    page = report_of(killed_run(tmp_path))
    head = page.words("head")
    assert "edp-1" in head
    assert "ended · every sample has been applied" in head
    for said in (
        "0.0213",
        "0.0345",
        "97.5%",
        "3,200",
        "10 s",
        "320 samples/s on average",
        "5.7 MB",
        "7 stale",
    ):
        assert said in head
    assert page.row("workers", "worker 1 (pi5)")["samples"] == "1,600"
    assert page.row("workers", "worker 3 (macbook)")["share"] == "40.0%"
    assert page.row("workers", "worker 2 (win)")["mean staleness"] == "1.25"


def test_a_worker_that_was_killed_is_in_its_row_the_events_and_the_trouble(tmp_path: Path) -> None:
    run = killed_run(tmp_path)
    run.status("ended", "done", worker_status(0), worker_status(1, state="lost"), worker_status(2))
    page = report_of(run)
    row = page.row("workers", "worker 2 (win)")
    assert (row["at the end"], row["lost"]) == ("lost", "1×")
    assert page.row("workers", "worker 1 (pi5)")["lost"] == "–"
    assert ["+5 s", "worker 2 (win) is lost: it was cut"] in page.rows["events"]
    trouble = page.words("trouble")
    assert "14:13:25 · worker 2 (win) is lost: it was cut" in trouble
    assert "worker 2 (win) is lost: it was cut" in trouble
    assert ("class", "warning it") in page.attributes


def test_a_worker_that_a_resumed_run_is_without_is_not_there_at_its_end(tmp_path: Path) -> None:
    run = killed_run(tmp_path)
    run.started()
    run.joined(0)
    run.status("ended", "done", worker_status(0))
    states = [row[1] for row in report_of(run).rows["workers"][1:]]
    assert states == ["joined", "lost", "–"]


@pytest.mark.usefixtures("with_curves")
def test_the_page_needs_no_network_and_runs_no_script(tmp_path: Path) -> None:
    page = report_of(killed_run(tmp_path))
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    named = {name for name, _ in page.attributes}
    assert not {"src", "href", "srcset"} & named
    links = [value or "" for name, value in page.attributes if name == "xlink:href"]
    assert all(link.startswith("#") for link in links)
    assert not any(name.startswith("on") for name in named)
    text = (tmp_path / "edp-1" / "report.html").read_text()
    assert "@import" not in text
    assert text.count("url(") == text.count("url(#")
    assert "default-src 'none'" in text


@pytest.mark.parametrize(
    "content", [None, b'\xff\xfe{]\n[1, 2]\n{"ts": null}\n\n'], ids=["gone", "damaged"]
)
@pytest.mark.parametrize("name", ["config", "status", "events", "metrics", "summary", "processes"])
def test_whatever_file_is_missing_or_damaged_there_is_a_page(
    tmp_path: Path, name: str, content: bytes | None
) -> None:
    run = killed_run(tmp_path)
    path: Path = getattr(run.paths, name)
    path.unlink(missing_ok=True)
    if content is not None:
        path.write_bytes(content)
    assert "edp-1" in report_of(run).words("head")


def test_an_empty_folder_is_a_page_that_knows_nothing(tmp_path: Path) -> None:
    assert "starting" in report_of(RunPaths(tmp_path)).words("head")
    for path in (tmp_path / "report.html", tmp_path):
        os.utime(path, (1, 1))
    page = report_of(RunPaths(tmp_path))
    assert "broken off · its owner has written nothing here" in page.words("head")
    assert "curves" not in page.text


def test_a_run_that_is_failing_says_what_its_log_will_say(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    run.config()
    run.started()
    run.joined(0)
    run.steps(1, 3)
    run.says("server", "mini1", None, ("INFO", "listening"))
    run.status("failed", "the run failed: step 4: loss is nan", worker_status(0))
    run.ended("the run failed: step 4: loss is nan", ok=False)
    page = report_of(run, SmolclusterError("step 4: loss is nan"))
    assert "failed · the run failed: step 4: loss is nan" in page.words("head")
    trouble = page.words("trouble")
    assert "server mini1: step 4: loss is nan" in trouble
    assert "smolcluster.errors.SmolclusterError: step 4: loss is nan" in trouble
    assert "loss is nan" in report_of(run).words("trouble")  # and later without being told


def test_a_run_that_was_stopped_has_no_trouble(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    run.started()
    run.says("server", "mini1", None, ("INFO", "stopped by SIGINT"))
    run.status("ended", "it was stopped")
    run.ended("it was stopped", ok=False)
    page = report_of(run, KeyboardInterrupt())
    assert "stopped" in page.words("head")
    assert "no worker was lost" in page.words("trouble")


def test_a_run_without_a_status_is_over_when_its_events_say_so_however_new_its_folder_is(
    tmp_path: Path,
) -> None:
    """As of a run of before that was copied a moment ago."""
    run = MadeRun(tmp_path)
    run.config()
    run.started()
    run.ended("every sample has been applied")
    assert "ended · every sample has been applied" in report_of(run).words("head")


def test_a_run_that_broke_off_and_one_that_goes_on_say_so(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    run.config()
    run.started()
    run.steps(1, 5)
    run.status("training", None, worker_status(0))
    assert "broken off" in report_of(run).words("head")
    with run_lock(run.paths.lock):
        page = report_of(run)
    assert "training · it goes on" in page.words("head")


def test_what_was_predicted_stands_beside_what_was_measured(tmp_path: Path) -> None:
    run = killed_run(tmp_path)
    assert "Predicted" not in report_of(run).words("head")
    summary = read_summary(run.paths.summary)
    measured = summary.samples_applied / summary.wall_s
    prediction = Prediction(
        algorithm="edp",
        settings={"codec": "int8"},
        samples_per_s=2 * measured,
        lost=0.1,
        received_bytes_s=1.0,
        sent_bytes_s=1.0,
        alone="mini1",
        alone_samples_per_s=1.0,
        links={"pi5": LinkSpeed(up_bytes_s=12e6, down_bytes_s=90e6)},
    )
    for rank in range(2):
        rates = {"memory_bytes": 1e9, "sent_bytes_per_s": 2e6, "received_bytes_per_s": 1e6}
        run.metric(MetricRecord("worker", 100, 1, rates, rank=rank, node=NODES[rank]))
    assert "link carries" not in report_of(run).words("links")
    ADVICE.write(run.paths.advice, prediction)
    page = report_of(run)
    head = page.rows["links"][0]
    assert head[1:5] == ["sent", "sent MB/s", "most", "link carries"]
    assert [row[:5] for row in page.rows["links"][1:3]] == [
        ["worker 1 (pi5)", "–", "2", "2", "12"],
        ["worker 2 (win)", "–", "2", "2", "–"],
    ]
    assert page.rows["links"][1][6:9] == ["1", "1", "90"]
    assert "50% less; 1 samples/s on mini1 alone" in report_of(run).words("head")
    run.paths.advice.write_text("{}")
    assert "Predicted" not in report_of(run).words("head")


HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>&amp;{{ 7*7 }}\x1b[2J\u202e\x00"


def test_hostile_text_is_shown_as_text(tmp_path: Path) -> None:
    run = killed_run(tmp_path)
    run.lost(2, HOSTILE)
    run.event(WorkerJoined(rank=7, node=HOSTILE, device=HOSTILE, samples_per_s=1.0))
    run.metric(process_stats(7, HOSTILE, sent_bytes_per_s=1.0))
    run.says("worker", "pi5", 0, ("ERROR", HOSTILE), exception=ValueError(HOSTILE))
    run.says("worker", "pi5", 0, ("DEBUG", "here"), machine={"system": HOSTILE, "cores": HOSTILE})
    run.status("failed", HOSTILE, worker_status(0, address=HOSTILE, device=HOSTILE))
    (run.paths.logs / "worker-rank9-<b>.log").write_text(HOSTILE + "\n")
    page = report_of(run)
    assert not {"script", "img", "b"} & set(page.tags)
    assert not any(name.startswith("on") for name, _ in page.attributes)
    text = run.paths.report.read_text()
    assert not {"\x1b", "\x00", "\u202e"} & set(text)
    for section in ("head", "trouble", "workers", "time", "links", "events", "machines"):
        assert "<script>alert(1)</script>" in page.words(section)
        assert "{{ 7*7 }}" in page.words(section)


def test_lone_surrogates_and_bytes_that_are_no_text_do_no_harm(tmp_path: Path) -> None:
    run = killed_run(tmp_path)
    log = run.paths.log_file("server", "mini1")
    with log.open("ab") as file:
        file.write(b'{"ts": "2026-09-21T14:13:21Z", "level": "ERROR", "message": "a\\ud800b"}\n')
        file.write(b"\xff\xfe no JSON \x80\n")
    page = report_of(run)
    assert r"a\ud800b" in page.words("trouble")
    assert "no JSON" in page.words("trouble")


@pytest.mark.usefixtures("with_curves")
@pytest.mark.parametrize("loss", [0.0, 1e300, 1e-320, math.nan])
def test_curves_of_any_size_are_drawn(tmp_path: Path, loss: float) -> None:
    run = MadeRun(tmp_path)
    run.started()
    more = {"samples_applied": math.nan} if math.isnan(loss) else {}
    run.steps(1, 3, loss=loss, **more)
    run.steps(4, 6, loss=2 * loss, **more)
    page = report_of(run)
    assert "edp-1" in page.words("head")
    assert "nan" not in page.words("curves")


def test_time_and_links_come_from_what_workers_report(tmp_path: Path) -> None:
    run = killed_run(tmp_path)
    rates = {"sent_bytes_per_s": 2e6, "received_bytes_per_s": 5e5, "steps_per_s": 4.0}
    more = {"rtt_s": 0.004, "queue": 2.0, "codec_ratio": 3.9}
    run.metric(process_stats(0, "pi5", **rates, **more))
    run.now += 1
    run.metric(process_stats(0, "pi5", **(rates | {"sent_bytes_per_s": 4e6}), **more))
    run.metric(MetricRecord("server", 1, 0, {"share/apply": 0.5}, node="mini1"))
    run.status("ended", "", worker_status(0, sent_bytes=10**9, received_bytes=10**6))
    page = report_of(run)
    assert "server mini1 50%" in page.words("time")
    assert "worker 1 (pi5) 25%50%12%" in page.words("time")
    link = page.rows["links"][1]
    assert link == [
        *("worker 1 (pi5)", "1.0 GB", "3", "4", "1.0 MB", "0.5", "0.5"),
        *("4 ms", "2.0 (most 2)", "3.90×"),
    ]
    assert page.row("workers", "worker 1 (pi5)")["mean step"] == "250 ms"


def test_lines_are_moved_by_the_clock_of_the_machine_that_wrote_them(tmp_path: Path) -> None:
    """Rank 0 moved from the Pi to a machine whose clock is 10 s ahead: 14:13:23, and 14:13:25 there."""
    run = MadeRun(tmp_path)
    run.metric(
        process_stats(0, "pi5", clock_offset_s=0.0), process_stats(0, "nas", clock_offset_s=10.0)
    )
    run.now = 3
    run.says("worker", "pi5", 0, ("ERROR", "the first"))
    run.now = 5
    run.says("worker", "nas", 0, ("ERROR", "the second"), off_s=10)
    trouble = report_of(run).words("trouble")
    assert "14:13:23 · worker 1 (pi5): the first" in trouble
    assert "14:13:25.000" in trouble


def test_staleness_is_told_by_worker_where_something_was_stale(tmp_path: Path) -> None:
    run = killed_run(tmp_path)
    run.status("ended", "", worker_status(0, staleness=[900, 0, 97, 3, 0, 0, 0, 0]))
    rows = report_of(run).rows["workers"]
    taus = ["0", "1", "2", "3–4", "5–8", "9–16", "17–32", "more"]
    assert ["worker", *taus] in rows
    assert ["worker 1 (pi5)", "90%", "–", "10%", "<1%", *["–"] * 4] in rows
    run.status("ended", "", worker_status(0, staleness=[900, 0, 0, 0, 0, 0, 0, 0]))
    assert "Staleness" not in report_of(run).words("workers")


def test_stages_of_a_pipeline_are_told_by_worker(tmp_path: Path) -> None:
    run = killed_run(tmp_path)
    assert "Stages" not in report_of(run).words("workers")
    stage = numbers_of({0: (0, 4)}, {"forward": 0.3, "backward": 0.6}, 0.25, {1: 2e6})
    run.status("ended", "", worker_status(0, process_stats=stage))
    rows = report_of(run).rows["workers"]
    assert ["worker", "layers", "forward", "backward", "waits", "sends"] in rows
    assert ["worker 1 (pi5)", "0-3", "300 ms", "600 ms", "25%", "2 MB/s to 2"] in rows


@pytest.mark.parametrize(("algorithm", "is_told"), [("edp", True), ("pipeline", False)])
def test_pushes_are_told_of_algorithms_whose_workers_push(
    tmp_path: Path, algorithm: str, *, is_told: bool
) -> None:
    run = MadeRun(tmp_path)
    run.started(algorithm=algorithm)
    run.summary(algorithm=algorithm)
    assert ("Pushes" in report_of(run).words("head")) == is_told


def test_the_settings_that_are_not_defaults_come_first(tmp_path: Path) -> None:
    page = report_of(killed_run(tmp_path))
    row = page.row("configuration", "learning_rate")
    assert (row["value"], row["default"]) == ("0.003", "0.001")
    assert "weight_decay" not in [row[0] for row in page.rows["configuration"]]
    assert "weight_decay: 0.0" in page.words("configuration")


def test_machines_and_versions_are_told_by_their_logs(tmp_path: Path) -> None:
    run = killed_run(tmp_path)
    machine = {"python": "3.11.2", "torch": "2.11.0", "cores": 4, "memory_bytes": 8 * 10**9}
    run.says("worker", "pi5", 0, ("DEBUG", "here"), machine=machine)
    row = report_of(run).row("machines", "worker 1 (pi5)")
    assert (row["Python"], row["PyTorch"], row["cores"]) == ("3.11.2", "2.11.0", "4")
    assert row["memory"] == "8.0 GB"


def test_long_lists_are_cut_and_say_so(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    run.started()
    for number in range(400):
        run.joined(number, "pi5")
    page = report_of(run)
    assert len(page.rows["events"]) == MAX_ROWS + 1
    assert ["…", "201 more"] in page.rows["events"]
    assert len(page.rows["workers"]) == MAX_ROWS + 2  # and the head
    assert cut([["a", "b"]] * 5, 4)[2] == ["…", "1 more"]


def test_who_joined_late_and_without_ssh_is_counted_and_its_log_is_not_to_be_fetched(
    tmp_path: Path,
) -> None:
    run = MadeRun(tmp_path)
    run.started(num_workers=2)
    for rank, node in enumerate(("pi5", "win", "laptop")):
        run.joined(rank, node)
    launched_run(
        tmp_path, server(), worker(0, "pi5", "pi5"), worker(1, "win", "win"), run_id="edp-1"
    )
    page = report_of(run)
    assert "3 workers" in page.words("head")
    said = page.words("trouble")
    assert "not here: server mini1, worker 1 (pi5), worker 2 (win). `" in said
    assert "by themselves: worker 3 (laptop). `" in said


def test_page_curves_and_dashboard_count_the_same_workers(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    run.started(num_workers=3)
    view = View(Folder(run.paths))
    assert view.state()["num_workers"] == 3, "those that are planned, before any has joined"
    run.joined(0, "pi5")
    assert view.state()["num_workers"] == 3, "and while they are joining"
    for rank, node in enumerate(("pi5", "win", "laptop")):
        run.joined(rank, node)
    run.joined(2, "the laptop's successor")
    view = View(Folder(run.paths))
    assert view.state()["num_workers"] == 4
    assert view.curves.title.endswith("4 workers")
    assert "4 workers" in report_of(run).words("head")


def test_pushes_that_are_dropped_one_after_another_are_one_row(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    run.started()
    dropped = PushDropped(
        **{"rank": 0, "node": "pi5", "outcome": "stale", "epoch": 0, "start": 0, "stop": 1},  # type: ignore[arg-type]
        reason="too old",
    )
    for _ in range(1000):
        run.now += 0.01
        run.event(dropped)
    page = report_of(run)
    assert page.rows["events"][1][1].endswith("too old (1,000 times within 10 s)")


def test_a_single_process_has_neither_workers_nor_links(tmp_path: Path) -> None:
    run = MadeRun(tmp_path, "single-1")
    run.started(algorithm="single", node="laptop", num_workers=1)
    run.says("trainer", "laptop", None, ("INFO", "training"))
    run.steps(1, 10)
    run.summary(algorithm="single", workers=[])
    page = report_of(run)
    assert not {"workers", "links"} & page.text.keys()
    assert "no log that is here has an error or a warning" in page.words("trouble")
    assert "not here" not in page.words("trouble")


def test_a_mesh_has_a_table_of_ranks(tmp_path: Path) -> None:
    run = MadeRun(tmp_path, "mesh-1")
    grid = "dp 1 x fsdp 1 x tp 1 x pp 2"
    run.started(algorithm="single", num_workers=1, mesh=grid, num_ranks=2, node="a", codec="none")
    run.says("rank", "a", None, ("INFO", "training"))
    run.says("rank", "a", 1, ("INFO", "training"))
    run.steps(1, 10)
    stats = {"steps_per_s": 4.0, "cpu": 0.5, "memory_bytes": 1.5e9, "share/forward": 0.5}
    for rank in range(2):
        run.metric(*(MetricRecord("rank", step, 0, stats, rank=rank, node="a") for step in (9, 10)))
    run.summary(algorithm="single", workers=[])
    page = report_of(run)
    assert page.words("workers").startswith("Ranks")
    assert page.row("workers", "rank 1 (a)") == {
        "rank": "rank 1 (a)",
        "mean step": "250 ms",
        "CPU cores": "0.50",
        "most memory": "1.5 GB",
    }
    assert f"mesh · SimpleNN (9,610 parameters) · on digits · 2 ranks: {grid}" in page.words("head")
    assert "codec" not in page.words("head")
    assert "worker" not in " ".join(page.text.values()).replace("no worker was lost", "")


@pytest.mark.parametrize(("reason", "is_lost"), [("it was stopped", False), ("it broke", True)])
def test_the_end_of_a_run_that_was_stopped_is_no_loss(
    tmp_path: Path, reason: str, is_lost: bool
) -> None:
    run = MadeRun(tmp_path)
    run.started()
    run.ended(reason, ok=False)
    assert (("class", "lost") in report_of(run).attributes) == is_lost
