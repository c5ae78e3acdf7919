"""`curves.png`, and the curves of pages."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock
from xml.etree import ElementTree

import pytest
from PIL import Image

from made_runs import MadeRun
from smolcluster.errors import SmolclusterError
from smolcluster.observability import curves as module
from smolcluster.observability.curves import (
    HEIGHT_PX,
    MAX_MARKS,
    WIDTH_PX,
    draw_curves,
    figure_of,
    short,
    svg_of,
    thinned,
)
from smolcluster.observability.view.curves import Curves, Points
from smolcluster.observability.view.view import read_view
from smolcluster.runs.paths import RunPaths


def made(root: Path, name: str = "edp-1", num_steps: int = 100) -> RunPaths:
    run = MadeRun(root, name)
    run.started()
    run.steps(1, num_steps)
    return run.paths


def curves_of(loss: list[float], more: dict[str, list[float]]) -> Curves:
    x = [float(place) for place in range(1, len(loss) + 1)]
    series = {name: Points(x, y) for name, y in {"loss": loss, **more}.items()}
    return Curves("r", series, {}, [1.0], Points(x, loss))


def check_picture(path: Path) -> None:
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        assert picture.size == (WIDTH_PX, HEIGHT_PX)
        colors = picture.convert("RGB").getcolors(maxcolors=WIDTH_PX * HEIGHT_PX)
    assert colors is not None
    assert len(colors) > 50, "the picture is blank"


def test_a_run_of_one_step_gets_a_picture_and_nothing_else(tmp_path: Path) -> None:
    paths = made(tmp_path, num_steps=1)
    before = sorted(paths.root.iterdir())
    draw_curves(paths)
    check_picture(paths.curves)
    assert sorted(paths.root.iterdir()) == sorted([*before, paths.curves])


def test_no_step_no_file(tmp_path: Path) -> None:
    draw_curves(RunPaths(tmp_path / "gone"))
    assert list(tmp_path.iterdir()) == []
    assert svg_of([Curves("r", {}, {})]) == ""


@pytest.mark.parametrize(
    ("name", "last", "scale"),
    [
        ("val_perplexity", 90.0, "log"),
        ("val_perplexity", 150.0, "linear"),
        ("loss", 0.05, "log"),
        ("loss", 900.0, "linear"),
    ],
)
def test_an_axis_over_a_decade_is_logarithmic(name: str, last: float, scale: str) -> None:
    values = [1000.0] * 60 + [last] * 60
    figure = figure_of(curves_of(values, {name: values}))
    [panel] = [axes for axes in figure.axes if axes.get_label() == name]
    assert panel.get_yscale() == scale
    low, high = panel.get_ylim()
    assert low < last < 1000.0 < high


def test_the_best_validation_is_marked() -> None:
    figure = figure_of(curves_of([3.0, 2.0, 1.0], {"val_loss": [0.9, 0.4, 0.6]}))
    [panel] = [axes for axes in figure.axes if axes.get_label() == "loss"]
    [mark] = [line for line in panel.get_lines() if line.get_label() == "best validation, 0.4"]
    assert mark.get_xydata().tolist() == [[2.0, 0.4]]  # type: ignore[union-attr]


@pytest.mark.parametrize("num_runs", [1, 9])
def test_a_page_has_curves_in_its_own_colours(tmp_path: Path, num_runs: int) -> None:
    runs = [read_view(made(tmp_path, f"r{number} <&>$x$")).curves for number in range(num_runs)]
    svg = svg_of(runs)
    pictures = list(ElementTree.fromstring(f"<div>{svg}</div>"))  # noqa: S314 - ours
    assert len(pictures) == (2 if num_runs == 1 else 1), (
        "a narrow page puts columns below each other"
    )
    for picture in pictures:
        assert picture.attrib["viewBox"]
        assert {"width", "height"}.isdisjoint(picture.attrib)
    assert "var(--blue)" in svg
    assert "#0072b2" not in svg
    assert "samples applied" in svg
    assert svg.count("stroke-dasharray") >= (num_runs > 7)


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


def test_a_failure_to_draw_is_one_line_and_the_old_picture_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = made(tmp_path, "r")
    paths.curves.write_text("old")

    monkeypatch.setattr(module, "figure_of", Mock(side_effect=ValueError("no\nfont")))
    with pytest.raises(SmolclusterError) as caught:
        draw_curves(paths)
    assert str(caught.value).startswith("cannot draw the curves of r ")
    assert "\n" not in str(caught.value)
    assert paths.curves.read_text() == "old"


def test_runs_of_one_process_are_drawn_by_several_threads(tmp_path: Path) -> None:
    runs = [made(tmp_path, f"r{number}") for number in range(2)]
    with ThreadPoolExecutor(len(runs)) as pool:
        list(pool.map(draw_curves, runs))
    for run in runs:
        check_picture(run.curves)
    pictures = {run.curves.read_bytes() for run in runs}
    assert len(pictures) == len(runs), "each has its own title"


def test_no_display_no_home_no_pyplot_no_word(tmp_path: Path) -> None:
    """With the log of a process that has not set up any: Python then prints warnings itself."""
    paths = made(tmp_path, "r")
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


def test_of_many_marks_first_and_last_stay() -> None:
    few = thinned([float(place) for place in reversed(range(10_007))])
    assert (len(few), few[0], few[-1]) == (MAX_MARKS, 0.0, 10_006.0)
    assert few == sorted(set(few)) == thinned(few)
