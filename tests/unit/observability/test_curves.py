import math
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from PIL import Image

from smolcluster.errors import SmolclusterError
from smolcluster.observability import curves as module
from smolcluster.observability.curves import (
    HEIGHT_PX,
    MAX_POINTS,
    WIDTH_PX,
    Curves,
    Series,
    curves_of,
    draw_curves,
    figure_of,
    kept,
    read_lines,
    short,
    smooth,
    thin,
    window_means,
)
from smolcluster.observability.metrics import MetricRecord
from smolcluster.observability.sinks.jsonl import JsonlSink, MetricLine
from smolcluster.runs.events import (
    Event,
    EventLog,
    EventRecord,
    RunResumed,
    RunStarted,
    WorkerJoined,
    WorkerLost,
)
from smolcluster.runs.files import utc_timestamp
from smolcluster.runs.paths import RunPaths

BATCH = 32
STARTED = RunStarted(
    run_id="edp-1",
    algorithm="edp",
    node="mini1",
    num_workers=3,
    num_epochs=2,
    train_samples=3200,
    batch_size=BATCH,
    codec="fp32",
    dataset="digits",
    model="SimpleNN",
    num_params=9610,
)


def step(number: int, **more: float) -> MetricRecord:
    values = {
        "loss": 2.0 / number,
        "lr": 1e-3,
        "samples_applied": float(BATCH * number),
        "samples_per_s": 500.0,
    }
    return MetricRecord("step", number, 0, values | more)


def evaluation(number: int, **values: float) -> MetricRecord:
    return MetricRecord("eval", number, 0, {"val_loss": 1.5 / (number + 1)} | values)


def lines(incarnation: str, records: Iterable[MetricRecord]) -> list[MetricLine]:
    """As in the file, each at the second of its step's number."""
    return [MetricLine(utc_timestamp(each.step), incarnation, each) for each in records]


def event(incarnation: str, what: Event, at_s: float = 0) -> EventRecord:
    return EventRecord(utc_timestamp(at_s), incarnation, what)


def resumed(incarnation: str, at_step: int) -> EventRecord:
    return event(incarnation, RunResumed(step=at_step, samples_applied=BATCH * at_step))


def joined(rank: int) -> WorkerJoined:
    return WorkerJoined(rank=rank, node="pi", device="cpu", samples_per_s=10.0)


def no_warning(sentence: str) -> None:
    raise AssertionError(sentence)


def write_run(
    root: Path, records: Sequence[MetricRecord], events: Sequence[Event] = (STARTED,)
) -> RunPaths:
    paths = RunPaths(root)
    root.mkdir()
    sink = JsonlSink(paths.metrics, "a", warn=no_warning)
    for record in records:
        sink.log(record)
    sink.close()
    log = EventLog(paths.events, "a", warn=no_warning)
    for each in events:
        log.write(each)
    log.close()
    return paths


def edp_like(num_steps: int = 100) -> list[MetricRecord]:
    steps = [step(number, staleness=float(number % 3)) for number in range(1, num_steps + 1)]
    return [*steps, evaluation(num_steps, val_accuracy=0.9)]


def curves_from(*records: MetricRecord) -> Curves:
    return curves_of("r", lines("a", records), [])


def steps_of(some: Iterable[MetricLine], incarnation: str) -> list[int]:
    return [line.record.step for line in some if line.incarnation == incarnation]


def check_picture(path: Path) -> None:
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        assert picture.size == (WIDTH_PX, HEIGHT_PX)
        colors = picture.convert("RGB").getcolors(maxcolors=WIDTH_PX * HEIGHT_PX)
    assert colors is not None
    assert len(colors) > 50, "the picture is blank"


def test_a_run_gets_a_picture_and_nothing_else(tmp_path: Path) -> None:
    paths = write_run(tmp_path / "edp-1", edp_like())
    draw_curves(paths)
    check_picture(paths.curves)
    names = sorted(path.name for path in paths.root.iterdir())
    assert names == ["curves.png", "events.jsonl", "metrics.jsonl"]


def test_one_step_is_enough(tmp_path: Path) -> None:
    paths = write_run(
        tmp_path / "r", [step(1, staleness=0.0, lr=0.0, samples_per_s=0.0)], events=[]
    )
    draw_curves(paths)
    check_picture(paths.curves)


@pytest.mark.parametrize("records", [[], [MetricRecord("worker", 0, 0, {"loss": 1.0})]])
def test_no_step_no_file(tmp_path: Path, records: list[MetricRecord]) -> None:
    paths = write_run(tmp_path / "r", records)
    draw_curves(paths)
    assert not paths.curves.exists()


def test_no_folder_no_file(tmp_path: Path) -> None:
    draw_curves(RunPaths(tmp_path / "gone"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("records", "left", "right"),
    [
        (
            [step(1, staleness=0.0), evaluation(1, val_accuracy=0.5)],
            ["loss", "val_accuracy"],
            ["lr", "samples_per_s", "staleness"],
        ),
        (
            [step(1), evaluation(1, val_perplexity=90.0)],
            ["loss", "val_perplexity"],
            ["lr", "samples_per_s"],
        ),
        ([step(1)], ["loss"], ["lr", "samples_per_s"]),
    ],
)
def test_a_run_gets_the_panels_that_it_has_values_for(
    records: list[MetricRecord], left: list[str], right: list[str]
) -> None:
    curves = curves_from(*records)
    assert curves.panels == (left, right)
    assert [axes.get_label() for axes in figure_of(curves).axes] == [*left, *right]


def test_the_title_says_what_was_trained() -> None:
    title = curves_of("edp-1", lines("a", [step(1)]), [event("a", STARTED)]).title
    assert title == "edp-1  ·  edp  ·  SimpleNN on digits  ·  3 workers"
    assert curves_from(step(1)).title == "r"


def test_values_lie_over_the_samples_applied() -> None:
    series = curves_from(
        step(1), step(2), evaluation(2), step(3), evaluation(5), evaluation(0, val_loss=9.0)
    ).series
    assert series["loss"] == Series([32.0, 64.0, 96.0], [2.0, 1.0, 2.0 / 3])
    assert series["val_loss"] == Series([0.0, 64.0, 96.0], [9.0, 0.5, 0.25])


def test_values_that_are_not_finite_are_left_out() -> None:
    series = curves_from(step(1, lr=math.nan), step(2, loss=math.inf), step(3)).series
    assert series["loss"].x == [32.0, 96.0]
    assert series["lr"].x == [64.0, 96.0]


@pytest.mark.parametrize(("low", "scale"), [(90.0, "log"), (150.0, "linear")])
def test_perplexity_over_a_decade_is_logarithmic(low: float, scale: str) -> None:
    records = [step(1), step(2)]
    records += [evaluation(1, val_perplexity=1000.0), evaluation(2, val_perplexity=low)]
    [panel] = [
        axes
        for axes in figure_of(curves_from(*records)).axes
        if axes.get_label() == "val_perplexity"
    ]
    assert panel.get_yscale() == scale


@pytest.mark.parametrize(("last", "scale"), [(0.05, "log"), (0.9, "linear")])
def test_a_loss_over_a_decade_is_logarithmic(last: float, scale: str) -> None:
    records = [step(1, loss=2.3), evaluation(1, val_loss=2.2), evaluation(2, val_loss=last)]
    figure = figure_of(curves_from(*records))
    [panel] = [axes for axes in figure.axes if axes.get_label() == "loss"]
    assert panel.get_yscale() == scale
    low, high = panel.get_ylim()
    assert low < last < 2.3 < high


def test_what_a_resume_undid_is_left_out() -> None:
    first = lines("a", [*map(step, range(1, 101)), evaluation(80), evaluation(100)])
    second = lines("b", [*map(step, range(81, 121)), evaluation(100)])
    left = kept([*first, *second], [event("a", STARTED), event("b", STARTED), resumed("b", 80)])
    assert steps_of(left, "a") == [*range(1, 81), 80]
    assert steps_of(left, "b") == [*range(81, 121), 100]


def test_the_newest_of_several_resumes_undoes_most() -> None:
    some = [
        *lines("a", map(step, range(1, 11))),
        *lines("b", map(step, range(9, 21))),
        *lines("c", map(step, range(5, 31))),
    ]
    events = [event("a", STARTED), resumed("b", 8), resumed("c", 4)]
    left = kept(some, events)
    assert [steps_of(left, each) for each in "abc"] == [
        [1, 2, 3, 4],
        [],
        list(range(5, 31)),
    ]


def test_a_later_resume_undoes_nothing_of_an_earlier_one() -> None:
    some = [
        *lines("a", map(step, range(1, 11))),
        *lines("b", map(step, range(5, 21))),
        *lines("c", map(step, range(16, 31))),
    ]
    left = kept(some, [event("a", STARTED), resumed("b", 4), resumed("c", 15)])
    assert [line.record.step for line in left] == list(range(1, 31))
    assert len(steps_of(left, "b")) == 11


def test_a_resume_that_has_taken_no_step_yet_undoes_too() -> None:
    left = kept(lines("a", map(step, range(1, 11))), [event("a", STARTED), resumed("b", 4)])
    assert steps_of(left, "a") == [1, 2, 3, 4]


def test_a_start_from_the_beginning_undoes_all_without_an_event_that_says_so() -> None:
    some = [*lines("a", map(step, range(1, 11))), *lines("b", map(step, range(1, 4)))]
    left = kept(some, [event("a", STARTED), event("b", STARTED)])
    assert (steps_of(left, "a"), steps_of(left, "b")) == ([], [1, 2, 3])


def test_without_events_the_steps_tell() -> None:
    some = [*lines("a", map(step, range(1, 11))), *lines("b", map(step, range(6, 14)))]
    assert [line.record.step for line in kept(some, [])] == list(range(1, 14))


def test_an_undone_time_line_is_not_in_the_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = write_run(tmp_path / "r", edp_like(100))
    sink = JsonlSink(paths.metrics, "b", warn=no_warning)
    for number in range(41, 61):
        sink.log(step(number, loss=7.0))
    sink.close()
    log = EventLog(paths.events, "b", warn=no_warning)
    log.write(RunResumed(step=40, samples_applied=40 * BATCH))
    log.close()
    drawn: list[Curves] = []

    def noting(curves: Curves) -> Figure:
        drawn.append(curves)
        return figure_of(curves)

    monkeypatch.setattr(module, "figure_of", noting)
    draw_curves(paths)
    [curves] = drawn
    assert curves.series["loss"].x == [float(BATCH * number) for number in range(1, 61)]
    assert curves.series["loss"].y[40:] == [7.0] * 20
    assert curves.marks["resumed"] == [41.0 * BATCH]
    assert "val_loss" not in curves.series


def test_workers_that_come_and_go_during_the_run_are_marked() -> None:
    lost = WorkerLost(rank=1, node="pi", reason="silent")
    events = [
        event("a", joined(0), at_s=0.5),
        event("a", lost, at_s=3.5),
        event("a", joined(1), at_s=6.5),
        event("a", lost, at_s=10.5),
    ]
    curves = curves_of("r", lines("a", map(step, range(1, 11))), events)
    assert curves.marks == {"worker lost or left": [3.0 * BATCH], "worker joined": [6.0 * BATCH]}


def test_thinning_keeps_first_and_last() -> None:
    series = Series([float(i) for i in range(10_007)], [float(-i) for i in range(10_007)])
    few = thin(series, MAX_POINTS)
    assert len(few.x) == MAX_POINTS
    assert (few.x[0], few.x[-1], few.y[0], few.y[-1]) == (0.0, 10_006.0, 0.0, -10_006.0)
    assert few.x == sorted(set(few.x))
    assert thin(few, MAX_POINTS) == few


def test_no_curve_of_a_long_run_has_more_points_than_are_seen() -> None:
    curves = curves_from(*(step(number, staleness=1.0) for number in range(1, 3 * MAX_POINTS)))
    for axes in figure_of(curves).axes:
        for line in axes.lines:
            assert len(line.get_xydata()) <= MAX_POINTS  # type: ignore[arg-type]


def test_of_a_very_long_run_not_every_step_is_read(tmp_path: Path) -> None:
    paths = write_run(tmp_path / "r", [*map(step, range(1, 1001)), evaluation(999)])
    assert steps_of(read_lines(paths.metrics, max_steps=100), "a") == [*range(16, 1001, 16), 999]
    assert len(read_lines(paths.metrics)) == 1001


def test_a_broken_line_is_left_out(tmp_path: Path) -> None:
    paths = write_run(tmp_path / "r", [step(1)])
    good = paths.metrics.read_bytes()
    broken = b'{"kind": "step", "st\n[]\n{"kind": "step"}\n\xff\n'
    alien = good.replace(b"0.001", b'"fast"') + good.replace(b"0.001", b"1" + b"0" * 400)
    assert b"0.001" not in alien
    paths.metrics.write_bytes(broken + alien + good + good[:30])
    assert [line.record.values["loss"] for line in read_lines(paths.metrics)] == [2.0]


def test_smoothing_follows_and_calms() -> None:
    x = [float(i) for i in range(1000)]
    noisy = Series(x, [1.0 + (-1) ** i for i in range(1000)])
    calm = smooth(noisy)
    assert calm.x == x
    assert calm.y[0] == noisy.y[0]
    assert all(abs(value - 1.0) < 0.15 for value in calm.y[100:])
    assert smooth(Series(x, [3.0] * 1000)).y == pytest.approx([3.0] * 1000)


def test_windows_have_their_means() -> None:
    series = Series([1.0, 2.0, 3.0, 4.0, 5.0], [0.0, 2.0, 4.0, 4.0, 7.0])
    assert window_means(series, 2) == Series([1.5, 4.0], [1.0, 5.0])
    assert window_means(series, 99) == series


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (5e-4, "0.0005"),
        (5e-5, "0.00005"),
        (999.0, "999"),
        (2500.0, "2.5k"),
        (2e7, "20M"),
        (1e30, "1e+30"),
    ],
)
def test_numbers_on_an_axis_are_short(value: float, text: str) -> None:
    assert short(value) == text


def test_a_picture_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    paths = write_run(tmp_path / "r", edp_like())
    (paths.curves / "x").mkdir(parents=True)
    with pytest.raises(SmolclusterError) as caught:
        draw_curves(paths)
    assert str(caught.value).startswith(f"cannot write {paths.curves}: Is a directory; ")
    assert not list(paths.root.glob(".curves*"))


def test_metrics_that_cannot_be_read_are_one_line(tmp_path: Path) -> None:
    paths = write_run(tmp_path / "r", [])
    paths.metrics.mkdir()
    with pytest.raises(SmolclusterError, match=r"^cannot read the curves of .*: Is a directory$"):
        draw_curves(paths)


def test_a_failure_to_draw_is_one_line_and_the_old_picture_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = write_run(tmp_path / "r", edp_like())
    paths.curves.write_text("old")

    def fail(curves: Curves) -> None:
        raise ValueError("no\nfont")

    monkeypatch.setattr(module, "figure_of", fail)
    with pytest.raises(SmolclusterError) as caught:
        draw_curves(paths)
    assert str(caught.value).startswith("cannot draw the curves of r")
    assert "\n" not in str(caught.value)
    assert paths.curves.read_text() == "old"


def test_runs_of_one_process_are_drawn_by_several_threads(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"r{number}", edp_like()) for number in range(4)]
    with ThreadPoolExecutor(len(runs)) as pool:
        list(pool.map(draw_curves, runs))
    for run in runs:
        check_picture(run.curves)
    pictures = {run.curves.read_bytes() for run in runs}
    assert len(pictures) == len(runs), "each has its own title"


def test_no_display_no_home_no_pyplot_no_word(tmp_path: Path) -> None:
    """With the log of a process that has not set up any: Python then prints warnings itself."""
    paths = write_run(tmp_path / "r", edp_like())
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    program = (
        "import sys, pathlib\n"
        "from smolcluster.observability.curves import draw_curves\n"
        "from smolcluster.runs.paths import RunPaths\n"
        "assert 'matplotlib' not in sys.modules\n"
        "draw_curves(RunPaths(pathlib.Path(sys.argv[1])))\n"
        "assert 'matplotlib.figure' in sys.modules\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    unset = {"DISPLAY", "WAYLAND_DISPLAY", "MPLCONFIGDIR", "MPLBACKEND", "XDG_CONFIG_HOME"}
    environ = {name: value for name, value in os.environ.items() if name not in unset}
    environ |= {"HOME": "/dev/null", "XDG_CACHE_HOME": "/dev/null", "LANG": "C", "LC_ALL": "C"}
    done = subprocess.run(
        [sys.executable, "-c", program, str(paths.root)],
        env=environ | {"TMPDIR": str(scratch)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    check_picture(paths.curves)
    assert list(scratch.iterdir()) == []
