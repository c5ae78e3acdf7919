"""`smolcluster dashboard`: a run on a web page, wherever its files are."""

import secrets
import tempfile
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from smolcluster.errors import DataError
from smolcluster.launch.find import find
from smolcluster.launch.watch.mirror import Mirror
from smolcluster.observability.dashboard.app import Views
from smolcluster.observability.dashboard.serve import serve
from smolcluster.observability.view.view import Folder, View
from smolcluster.runs.events import CheckpointSaved
from smolcluster.runs.paths import RunPaths
from smolcluster.utils.words import say

if TYPE_CHECKING:
    from smolcluster.launch.language_model import LanguageModel


def dashboard(run: str, *, host: str, port: int | None, opens: bool) -> int:
    """Serve the page until Ctrl-C.

    Args:
        run: the run that is shown first: its name, latest, or its folder. The others of its folder can be
            chosen on the page.
        host: the address to listen on.
        port: the port; None: the usual one, or any that is free.
        opens: open a browser.

    Raises:
        ConfigError: there is no such run, or no such address.
        PortBusy: somebody else listens there.
    """
    paths = find(run)
    with tempfile.TemporaryDirectory(prefix="smolcluster-") as folder:
        views = Views(paths.root.parent, lambda chosen: opened(chosen, Path(folder)))
        opens_by = (paths.root, Path.home()) if opens else ()
        write = Writer().write
        serve(views, paths.run_id, write, host=host, port=port, say=say, opens_by=opens_by)
    return 0


def opened(paths: RunPaths, folder: Path) -> Folder:
    """Where a run is read: its own folder, or copies under `folder` that grow with the originals."""
    with suppress(DataError):
        mirror = Mirror(paths, folder / paths.run_id)
        if not mirror.is_here:
            mirror.keep_looking()
        return mirror
    return Folder(paths)


class Writer:
    """Writes with one run's language model at a time, for one caller at a time."""

    def __init__(self) -> None:
        self._model: LanguageModel | None = None
        self._read_of: tuple[object, ...] = ()

    def write(
        self, view: View, prompt: str, max_tokens: int, temperature: float
    ) -> tuple[int, Generator[str]]:
        """Go on from a text with the best weights of a run, or with the newest while it trains.

        A model is read anew when the run has another checkpoint; the one before is freed first.

        Returns:
            The step of the weights, and the text in pieces; the first piece may raise an error, too.

        Raises:
            SmolclusterError: the run has no language model, or no checkpoint that can be read.
        """
        from smolcluster.launch.language_model import (  # noqa: PLC0415 - loads PyTorch
            Author,
            GenerateOptions,
            LanguageModel,
        )

        view.state()  # reads what is new
        is_over, newest = view.snapshot.is_over, list(view.story.of(CheckpointSaved))[-1:]
        meant = (view.paths.root, is_over, newest)
        if self._model is None or self._read_of != meant:
            self._model = None
            self._model = LanguageModel(str(view.paths.root), best=None if is_over else False)
            self._read_of = meant
        options = GenerateOptions(max_tokens, temperature, top_k=None, seed=secrets.randbits(32))
        author = Author(self._model, options)
        author.read(prompt)
        return self._model.step, author.write(stops_at_end=True)
