"""The cluster in a terminal: what is drawn, at every size, and where it comes from."""

import fcntl
import io
import itertools
import json
import math
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from rich.text import Text

from exporting import GPU
from reading import children_of, fake_ssh, launched_run, log_line, server, status_of, worker, write
from smolcluster.launch.host import Host
from smolcluster.launch.watch.probe import Ask
from smolcluster.launch.watch.top.bars import (
    progress_bar,
    short_age,
    short_bytes,
    short_delay,
    sparkline,
    split_bar,
    spread,
)
from smolcluster.launch.watch.top.command import top
from smolcluster.launch.watch.top.frame import Canvas, frame
from smolcluster.launch.watch.top.source import EventLine, Picture, Point, Source
from smolcluster.observability.metrics import MetricRecord
from smolcluster.observability.sinks.jsonl import JsonlSink
from smolcluster.observability.terminal import SteadyConsole, displayable
from smolcluster.observability.view.report import report_of
from smolcluster.observability.view.snapshot import Liveness, ProcessReport, Snapshot
from smolcluster.observability.view.stages import numbers_of
from smolcluster.runs.events import CheckpointSaved, Evaluated, EventLog, WorkerJoined, WorkerLost
from smolcluster.runs.files import json_line
from smolcluster.runs.launched import Launched
from smolcluster.runs.paths import RunPaths, create_run
from smolcluster.runs.series import MAX_STEPS, SeriesFile
from smolcluster.runs.status import (
    STOPPED,
    RankStatus,
    RunStatus,
    WorkerStatus,
    instant,
    write_status,
)
from tiers import at_night
from waiting import DEADLINE_S

NOW = 1_790_000_000.0
PROCESS_STATS = {
    "share/data": 0.05,
    "share/forward": 0.2,
    "share/backward": 0.4,
    "share/send": 0.1,
    "share/wait": 0.2,
    "cpu": 1.53,
    "memory_bytes": 412e6,
    "sent_bytes_per_s": 3.1e6,
    "received_bytes_per_s": 4096.0,
    "rtt_s": 0.0023,
    "queue": 2.0,
}


def with_stats(status: RunStatus, process_stats: Mapping[str, float]) -> RunStatus:
    workers = [
        each.model_copy(
            update={
                "process_stats": dict(process_stats),
                "staleness": [3, 4],
                "mean_staleness": 0.57,
            }
        )
        for each in status.workers
    ]
    return status.model_copy(update={"workers": workers})


def picture_of(
    status: RunStatus | None,
    liveness: Liveness = "running",
    points: Sequence[Point] = (),
    news: Sequence[EventLine] = (),
) -> Picture:
    workers: list[WorkerStatus] = [] if status is None else status.workers
    names: list[tuple[str, str, int | None]] = [("mini1", "server", None)]
    names += [(each.node, "worker", each.rank) for each in workers]
    seen = tuple(
        ProcessReport(node=node, role=role, rank=rank, process=liveness)
        for node, role, rank in names
    )
    return picture(seen, status, points, news)


def picture(
    seen: Sequence[ProcessReport],
    status: RunStatus | None,
    points: Sequence[Point] = (),
    news: Sequence[EventLine] = (),
    algorithm: str = "edp",
) -> Picture:
    launched = Launched(run_id="r1", algorithm=algorithm, processes=(server(),))
    paths = RunPaths(Path("r1"))
    found = Snapshot(paths, launched, status, seen=tuple(seen), now=instant(NOW))
    return Picture(report_of(found), status, found.now, points, news)


def three_workers(process_stats: Mapping[str, float] = PROCESS_STATS) -> RunStatus:
    nodes = {0: ("mini2", "joined"), 1: ("pi5", "lost"), 2: ("macbook", "left")}
    return with_stats(status_of(now=NOW, workers=nodes), process_stats)  # type: ignore[arg-type]


def busy() -> Picture:
    points = [Point(step, 2.5 / (1 + step), 100.0 + step) for step in range(120)]
    news = [
        EventLine(NOW - 9, "worker_joined", "worker 1 (mini2) joined, on cpu"),
        *(
            EventLine(NOW - 8 + n, "checkpoint_saved", f"checkpoint of step {n} saved")
            for n in (1, 2)
        ),
        EventLine(NOW - 2, "worker_lost", "worker 2 (pi5) is lost: it fell silent"),
        EventLine(NOW - 1, "WARNING", "server mini1: the disk is nearly full"),
    ]
    return picture_of(three_workers(), points=points, news=news)


def canvas(
    width: int = 80, height: int = 24, *, encoding: str = "utf-8", colour: bool = True
) -> Canvas:
    console = SteadyConsole(file=io.TextIOWrapper(io.BytesIO(), encoding))
    return Canvas(
        width,
        height,
        lambda text: displayable(console, text),
        is_plain=encoding == "ascii",
        has_colour=colour,
    )


def lines(snapshot: Picture, on: Canvas | None = None) -> list[str]:
    return [line.plain for line in frame(snapshot, on or canvas())]


# --- drawing


def test_a_pane_of_80_columns_tells_how_the_cluster_does() -> None:
    shown = lines(busy())
    assert shown[0] == "r1 · edp · training · for 1 min"
    assert "30%  4.4 s left · step 120 of 400 · epoch 2 of 4" in shown[1]
    measured = "training loss 0.25 (last step) · validation loss 0.5 · acc 0.900"
    assert shown[2] == measured
    assert lines(busy(), canvas(90))[2] == f"{measured} · 512 samples/s now"
    assert shown[3].startswith("loss      █")
    assert shown[4].startswith("samples/s ▁")
    [title] = [line for line in shown if line.startswith("node")]
    assert title.split() == [
        *("node", "#", "state", "samples/s", "time", "seen", "stale", "cpu", "rtt", "MB/s"),
        *("up", "down"),
    ]
    [row] = [line for line in shown if line.startswith("mini2")]
    assert row.replace("█", "").split() == [
        *("mini2", "1", "joined", "256", "0s", "0.6", "153%", "2.3", "ms", "3.1", "0.0041")
    ]
    assert [line.split()[2] for line in shown if line.startswith(("pi5", "macbook"))] == [
        "lost",
        "left",
    ]
    news = [line[9:] for line in shown[-4:]]
    assert news == [
        "worker 1 (mini2) joined, on cpu",
        "checkpoint of step 2 saved (the last of 2 lately)",
        "worker 2 (pi5) is lost: it fell silent",
        "WARN server mini1: the disk is nearly full",
    ]


def test_gpus_have_columns_where_there_are_any() -> None:
    process_stats = PROCESS_STATS | {f"gpu/{name}": value for name, value in GPU.items()}
    shown = lines(picture_of(three_workers(process_stats)), canvas(width=160))
    [title] = [line for line in shown if line.startswith("node")]
    assert title.split()[7:14] == ["cpu", "gpu", "gpu", "mem", "temp", "power", "rtt"]
    [row] = [line for line in shown if line.startswith("mini2")]
    assert row.replace("█", "").split()[6:11] == ["153%", "88%", "12G", "61C", "240W"]


def test_stages_of_a_pipeline_have_columns() -> None:
    stage = numbers_of({0: (0, 4), 3: (10, 12)}, {"forward": 0.02, "backward": 0.05}, 0.3, {1: 2e6})
    shown = lines(picture_of(three_workers(PROCESS_STATS | stage)), canvas(width=180))
    [title] = [line for line in shown if line.startswith("node")]
    for name in ("layers", "waits", "forward", "backw.", "MB/s to"):
        assert name in title
    assert "weights" not in title
    [row] = [line for line in shown if line.startswith("mini2")]
    for told in ("0-3, 10-11", "30%", "20 ms", "50 ms", "2: 2"):
        assert told in row


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_every_size_is_kept_whatever_peers_are_called(encoding: str) -> None:
    hostile = "\x1b[2J\u202e机器机器机器\n[red]" + 50 * "x"
    written = three_workers()
    workers = [each.model_copy(update={"node": hostile}) for each in written.workers]
    news = [EventLine(NOW, "ERROR", hostile * 1000), EventLine(NOW, "\x1b[31m", hostile)]
    points = [Point(1, math.nan, math.inf), Point(2, 0.0, 0.0), Point(9**20, -1.0, 1e300)]
    evil = written.model_copy(update={"workers": workers, "reason": hostile})
    snapshot = picture_of(evil, points=points, news=news)
    sizes = itertools.product((1, 2, 10, 39, 40, 80, 81, 111, 250), (1, 2, 3, 6, 9, 12, 24, 60))
    for width, height in sizes:
        drawn = frame(snapshot, canvas(width, height, encoding=encoding, colour=False))
        assert len(drawn) <= height
        for line in drawn:
            assert line.cell_len <= width, (width, height, line.plain)
            assert not set("\x1b\u202e\n") & set(line.plain)
            line.plain.encode(encoding)


def test_a_narrow_pane_leaves_out_what_is_less_important() -> None:
    [title] = [line for line in lines(busy(), canvas(40, 12)) if line.startswith("node")]
    assert title.split() == ["node", "#", "state", "samples/s", "time"]
    assert lines(busy(), canvas(24, 12))[0] == "r1 · training"


def test_a_short_pane_says_how_many_rows_are_missing() -> None:
    nodes = {rank: (f"n{rank}", "joined") for rank in range(30)}
    snapshot = picture_of(status_of(now=NOW, workers=nodes))  # type: ignore[arg-type]
    shown = lines(snapshot, canvas(80, 10))
    assert len(shown) == 10
    assert shown[-1] == "and 26 more"


def test_what_is_not_known_takes_no_room() -> None:
    status = status_of(now=NOW, workers={0: ("mini2", "joined")})
    shown = lines(picture_of(status))
    [title] = [line for line in shown if line.startswith("node")]
    assert title.split() == ["node", "#", "state", "samples/s", "seen", "step", "samples"]
    assert not any("forward" in line for line in shown)
    waiting = lines(picture_of(None))
    assert waiting[0] == "r1 · edp · starting"
    assert len(waiting) == 4


def test_without_colours_phases_are_letters() -> None:
    shown = lines(busy(), canvas(110, colour=False))
    assert any("ff" in line and "bbb" in line for line in shown)
    assert any(line.startswith("d data  f forward  b backward") for line in shown)


def test_a_status_that_grows_old_is_said() -> None:
    status = three_workers()
    old = status.model_copy(update={"updated_at": instant(NOW - 65.2)})
    workers = [each.model_copy(update={"last_seen": instant(NOW - 65)}) for each in old.workers]
    shown = lines(picture_of(old.model_copy(update={"workers": workers})))
    assert "what the server said 1 min 05 s ago" in shown
    [row] = [line for line in shown if line.startswith("mini2")]
    assert " 1m " in row


@pytest.mark.parametrize(
    ("state", "liveness", "expected"),
    [
        ("ended", "ended", True),
        ("failed", "gone", True),
        ("training", "gone", True),
        ("ended", "running", False),
        ("training", "running", False),
        ("training", "unreachable", False),
    ],
)
def test_it_is_over_when_the_server_has_said_so_and_gone(
    state: str, liveness: Liveness, expected: bool
) -> None:
    assert picture_of(status_of(state, now=NOW), liveness).is_over is expected  # type: ignore[arg-type]


@pytest.mark.parametrize(("liveness", "is_told"), [("running", True), ("gone", False)])
def test_only_a_run_that_trains_has_a_rate_now(liveness: Liveness, is_told: bool) -> None:
    status = three_workers().model_copy(update={"learning_rate": 0.0125})
    shown = "\n".join(lines(picture_of(status, liveness), canvas(200)))
    assert ("lr 0.0125" in shown) == is_told


def test_a_run_that_was_stopped_is_called_so() -> None:
    snapshot = picture_of(status_of("ended", now=NOW, reason=STOPPED), "ended")
    assert snapshot.is_over
    title, *_, note = frame(snapshot, canvas())[:4]
    assert title.plain == "r1 · edp · stopped"
    assert (note.plain, note.style) == (STOPPED, "")
    asked = ProcessReport(node="mini1", role="server", process="ended", exit_code=143)
    for reason, word in ((STOPPED, "stopped"), ("it broke", "exit 143")):
        snapshot = picture([asked], status_of("ended", now=NOW, reason=reason))
        [row] = [each for each in frame(snapshot, canvas()) if each.plain.startswith("mini1")]
        assert word in row.plain


# --- bars


def test_a_bar_splits_a_step_as_it_was_spent() -> None:
    bar = split_bar(PROCESS_STATS, 20, letters=True)
    assert bar.plain == "dffffbbbbbbbbsswwww "
    assert split_bar({"share/data": 1.0, "share/wait": 0.5}, 4, letters=True).plain == "dddd"
    assert split_bar({"share/data": math.nan, "share/send": -1.0}, 3, letters=True).plain == "   "
    assert progress_bar(0.5, 4, plain=True).plain == "##.."
    assert progress_bar(7.0, 4, plain=False).plain == "████"


def test_a_sparkline_shows_the_course_and_its_gaps() -> None:
    assert sparkline([0.0, 1.0, math.nan, 7.0], plain=False) == "▁▂ █"
    assert sparkline([5.0, 5.0], plain=False) == "▁▁"
    assert sparkline([math.nan], plain=False) == ""
    assert spread([0, 1, 2, 3], [1.0, 3.0, 5.0, 7.0], 2) == [2.0, 6.0]
    assert spread([0, 9], [1.0, 2.0], 5) == [1.0, 1.0, 1.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (short_bytes(0), "0"),
        (short_bytes(999.6), "1.0k"),
        (short_bytes(4.1e9), "4.1G"),
        (short_bytes(3e17), "300000T"),
        (short_age(-3), "0s"),
        (short_age(59.4), "59s"),
        (short_age(3599), "59m"),
        (short_age(90_000), "1d"),
        (short_delay(12e-6), "12 us"),
        (short_delay(0.25), "0.2 s"),
    ],
)
def test_quantities_are_short(shown: str, expected: str) -> None:
    assert shown == expected


def test_ranks_of_a_mesh_have_their_own_numbers() -> None:
    stats = {"samples_per_s": 10.0, "share/forward": 0.5, "memory_bytes": 1e9}
    ranks = [
        RankStatus(rank=rank, node="a", process_stats=stats, last_seen=instant(NOW - 1))
        for rank in range(2)
    ]
    written = status_of(now=NOW).model_copy(update={"ranks": ranks})
    starter = ProcessReport(node="a", role="ranks", rank=None, process="running")
    shown = lines(picture([starter], written, algorithm="mesh"))
    place = next(place for place, line in enumerate(shown) if line.startswith("node"))
    assert shown[place].split()[:3] == ["node", "rank", "state"]
    assert [line.split()[:4] for line in shown[place + 1 : place + 3]] == [
        ["a", "0", "running", "10"],
        ["a", "1", "running", "10"],
    ]
    assert "1.0G" in shown[place + 1]


# --- looking


Look = Callable[..., Source]


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Look]:
    """What makes sources, which are closed at the end."""
    made: list[Source] = []

    def make(paths: RunPaths, ask: Ask | None = None) -> Source:
        made.append(Source(paths, tmp_path / "copies", ask))
        return made[-1]

    yield make
    for each in made:
        each.close()


def record(paths: RunPaths, num_steps: int) -> None:
    """Write what a server writes."""
    metrics = JsonlSink(paths.metrics, "abc", warn=pytest.fail)
    for step in range(1, num_steps + 1):
        values = {"loss": 1000.0 / step, "samples_per_s": 50.0, "start": 0.0, "stop": 32.0}
        metrics.log(MetricRecord("step", step, 0, values, rank=0, node="pi5"))
    metrics.close()
    SeriesFile(paths, warn=pytest.fail).close()
    events = EventLog(paths.events, "abc", warn=pytest.fail, now=lambda: NOW)
    events.write(WorkerJoined(rank=0, node="pi5", device="cpu", samples_per_s=10.0))
    events.write(Evaluated(epoch=0, step=5, val_loss=0.5))
    events.write(WorkerLost(rank=0, node="pi5", reason="it fell silent"))
    events.close()


def tell(log: Path) -> None:
    """Write what a process writes, and what does not belong there."""
    lines = (
        log_line(1, "as usual"),
        log_line(2, "the disk\u2028is nearly full", "WARNING"),
        log_line(3, "no more", "ERROR"),
    )
    written = (json_line(json.loads(line)).decode() for line in lines)
    write(log, "not json\n".join(written))


@pytest.fixture
def local(tmp_path: Path) -> RunPaths:
    """A run on this machine whose processes are gone."""
    paths = create_run(tmp_path, "r1")
    children_of(paths, 2**22 + 1)
    write(paths.config, "")
    return paths


def test_a_local_run_is_read_from_the_ends_of_its_files(local: RunPaths, source: Look) -> None:
    record(local, 20_000)
    tell(local.log_file("server", "mini1"))
    write_status(local.status, status_of().model_copy(update={"step": 20_001}))
    looking = source(local)
    snapshot = looking.look()
    assert snapshot.is_over
    steps = [step for step, *_ in snapshot.points]
    assert steps == sorted(set(steps))
    assert steps[0] < 1000
    assert steps[-1] == 20_001
    assert len(steps) <= MAX_STEPS + 1
    assert [each.text for each in snapshot.news] == [
        "worker 1 (pi5) joined, on cpu",
        "worker 1 (pi5) is lost: it fell silent",
        "server mini1: the disk\u2028is nearly full",
        "server mini1: no more",
    ]
    events = EventLog(local.events, "abc", warn=pytest.fail, now=lambda: NOW + 5)
    events.write(CheckpointSaved(step=7))
    events.close()
    write_status(local.status, status_of().model_copy(update={"step": 7}))
    again = looking.look()
    assert [each.text for each in again.news[-2:]] == [
        "server mini1: no more",
        "checkpoint of step 7 saved",
    ]
    assert max(step for step, *_ in again.points) == 7, "what was abandoned is forgotten"
    assert again.report.state == "broken off"


def test_a_run_elsewhere_is_asked_once_a_machine(
    tmp_path: Path, source: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = RunPaths(fake_ssh(tmp_path, monkeypatch) / "runs/r1")
    there.logs.mkdir(parents=True)
    paths = launched_run(tmp_path / "runs", server(), worker(0, "pi5", "pi@cut"))
    record(there, 100)
    tell(there.log_file("server", "mini1"))
    write_status(there.status, status_of(workers={0: ("pi5", "joined")}))
    asked: list[str] = []

    def ask(host: Host, script: str) -> str:
        asked.append(host.node)
        return host.run(script, timeout_s=20.0).stdout

    looking = source(paths, ask)
    first = looking.look()
    second = looking.look()
    assert sorted(asked) == ["mini1", "mini1", "pi5", "pi5"]
    assert [each.kind for each in first.news] == [
        "worker_joined",
        "worker_lost",
        "WARNING",
        "ERROR",
    ]
    assert len(first.points) > 50
    assert second.news == first.news
    assert "no answer" in " ".join(lines(second))


def test_what_was_fetched_is_shown_when_the_servers_machine_is_off(
    tmp_path: Path, source: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_ssh(tmp_path, monkeypatch)
    paths = launched_run(tmp_path / "runs", server("cut"))
    record(paths, 10)
    write_status(paths.status, status_of("ended", reason="all done"))
    snapshot = source(paths).look()
    assert snapshot.is_over
    assert snapshot.news[-1].kind == "worker_lost"


# --- the command


def test_one_frame_is_printed_where_there_is_no_terminal(
    local: RunPaths, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    record(local, 10)
    write_status(local.status, status_of("ended", reason="all done"))
    assert top(str(local.root), once=False) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "r1 · edp · ended" in shown
    assert "all done" in shown
    assert all(Text(line).cell_len <= 80 for line in shown.splitlines())


class Terminal:
    """The command in a terminal of its own."""

    def __init__(self, paths: RunPaths) -> None:
        self.shown = b""
        self._main, end = pty.openpty()
        fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(end)
        environ = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
        command = [sys.executable, "-m", "smolcluster.cli", "top", str(paths.root)]
        self.process = subprocess.Popen(
            command, stdin=end, stdout=end, stderr=end, env=environ | {"TERM": "xterm-256color"}
        )
        self.end = end

    def press(self, key: bytes) -> None:
        os.write(self._main, key)

    def wait_for(self, text: bytes) -> None:
        end = time.monotonic() + DEADLINE_S
        while text not in self.shown:
            assert time.monotonic() < end, self.shown[-2000:]
            self._read()

    def wait(self) -> int:
        end = time.monotonic() + DEADLINE_S
        while self.process.poll() is None:
            assert time.monotonic() < end, self.shown[-2000:]
            self._read()
        self._read()
        return self.process.returncode

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._main)
        os.close(self.end)

    def _read(self) -> None:
        if select.select([self._main], [], [], 0.1)[0]:
            self.shown += os.read(self._main, 65536)


Living = tuple[Terminal, "subprocess.Popen[bytes]"]


@pytest.fixture
def living(local: RunPaths) -> Iterator[Living]:
    """A run that goes on, shown in a terminal, and its server."""
    with subprocess.Popen([sys.executable, "-c", "input()", "r1"], stdin=-1) as alive:
        children_of(local, alive.pid)
        write_status(local.status, status_of(workers={0: ("pi5", "joined")}))
        terminal = Terminal(local)
        try:
            terminal.wait_for(b"training")
            yield terminal, alive
        finally:
            terminal.close()
            alive.kill()


@pytest.mark.parametrize("key", [b"q", b"\x03", *at_night(b"Q")])
def test_a_key_ends_it_and_leaves_the_terminal_as_it_was(living: Living, key: bytes) -> None:
    terminal, _ = living
    if key == b"\x03":
        terminal.process.send_signal(signal.SIGINT)
    else:
        terminal.press(key)
    assert terminal.wait() == 0
    assert b"\x1b[?1049l" in terminal.shown
    assert termios.tcgetattr(terminal.end) == terminal.before


def test_it_ends_with_the_run_whose_end_stays_on_the_screen(
    living: Living, local: RunPaths
) -> None:
    terminal, server_process = living
    write_status(local.status, status_of("ended", reason="all is applied"))
    server_process.kill()
    server_process.wait()
    assert terminal.wait() == 0
    _, _, after = terminal.shown.rpartition(b"\x1b[?1049l")
    assert b"all is applied" in after
