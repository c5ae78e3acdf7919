"""What the dashboard's chat page writes with."""

import gc
import shutil
import weakref
from pathlib import Path

import pytest

from made_runs import MadeRun
from smolcluster.errors import CheckpointError
from smolcluster.launch import language_model
from smolcluster.launch.language_model import Author, GenerateOptions, LanguageModel
from smolcluster.launch.saved import store_of
from smolcluster.launch.watch.page import Writer
from smolcluster.observability.view.view import Folder, View
from smolcluster.runs.events import CheckpointSaved
from smolcluster.runs.paths import RunPaths
from smolcluster.runs.status import read_status, write_status
from texts import tiny_settings, train_alone, write_text

PROMPT = "the cat\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs, with one of a language model whose newest checkpoint is not its best."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        text = write_text(folder / "text.txt")
        every = ("checkpoint_steps=5", "training.eval_steps=5")
        train_alone(tiny_settings(text, folder / "runs", *every, algorithm="single"), "mine")
    store = store_of(RunPaths(folder / "runs" / "mine"))
    newest = store.newest_good()
    assert newest is not None
    store.tell(newest.state.model_copy(update={"val_loss": 99.0}))
    return folder / "runs"


@pytest.fixture
def runs(trained: Path, tmp_path: Path) -> Path:
    """A copy of that folder."""
    return shutil.copytree(trained, tmp_path / "runs", symlinks=True)


def view_of(runs: Path, name: str = "mine") -> View:
    return View(Folder(RunPaths(runs / name)))


def written(writer: Writer, view: View) -> tuple[int, str]:
    step, pieces = writer.write(view, PROMPT, 20, 0.0)
    return step, "".join(pieces)


def make_training(paths: RunPaths) -> None:
    write_status(paths.status, read_status(paths.status).model_copy(update={"state": "training"}))


def test_it_writes_as_the_terminal_does_with_the_best_weights_of_a_run_that_is_over(
    runs: Path,
) -> None:
    model = LanguageModel(str(runs / "mine"))
    author = Author(model, GenerateOptions(20, 0.0, None, 0))
    author.read(PROMPT)
    expected = "".join(author.write(stops_at_end=True))
    assert written(Writer(), view_of(runs)) == (model.step, expected)


def test_of_a_run_that_trains_the_newest_weights_write(runs: Path) -> None:
    paths = RunPaths(runs / "mine")
    best, newest = store_of(paths).best(), store_of(paths).newest_good()
    assert best is not None
    assert newest is not None
    assert best.state.step < newest.state.step
    writer = Writer()
    assert written(writer, view_of(runs))[0] == best.state.step
    make_training(paths)
    assert written(writer, view_of(runs))[0] == newest.state.step


def test_a_model_is_read_once_a_checkpoint_and_freed_before_the_next_one(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[weakref.ref[LanguageModel]] = []

    class Counted(LanguageModel):
        def __init__(self, run: str, *, best: bool | None = None) -> None:
            gc.collect()
            assert not any(model() for model in read), "two models are in memory"
            super().__init__(run, best=best)
            read.append(weakref.ref(self))

    monkeypatch.setattr(language_model, "LanguageModel", Counted)
    writer, view = Writer(), view_of(runs)
    assert written(writer, view) == written(writer, view)
    assert len(read) == 1
    MadeRun(runs, "mine").event(CheckpointSaved(step=99))
    written(writer, view_of(runs))
    assert len(read) == 2


def test_a_run_that_cannot_write_is_told_and_the_next_can(runs: Path) -> None:
    writer = Writer()
    MadeRun(runs, "made").config()
    with pytest.raises(CheckpointError, match="run made has no good checkpoint"):
        writer.write(view_of(runs, "made"), PROMPT, 20, 0.0)
    assert written(writer, view_of(runs))
