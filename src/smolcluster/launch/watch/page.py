"""`smolcluster dashboard`: a run on a web page, wherever its files are."""

import tempfile
from contextlib import suppress
from pathlib import Path

from smolcluster.errors import DataError
from smolcluster.launch.find import find
from smolcluster.launch.watch.mirror import Mirror
from smolcluster.observability.dashboard.app import Views
from smolcluster.observability.dashboard.serve import serve
from smolcluster.observability.view.view import Files, files_here
from smolcluster.runs.paths import RunPaths
from smolcluster.utils.words import say


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
        views = Views(paths.root.parent, lambda chosen: open_files(chosen, Path(folder)))
        opens_by = (paths.root, Path.home()) if opens else ()
        serve(views, paths.run_id, host=host, port=port, say=say, opens_by=opens_by)
    return 0


def open_files(paths: RunPaths, folder: Path) -> Files:
    """Where a run is read: its own folder, or copies under `folder` that grow with the originals."""
    with suppress(DataError):
        mirror = Mirror(paths, folder / paths.run_id)
        mirror.keep_looking()
        return mirror.files()
    return files_here(paths)
