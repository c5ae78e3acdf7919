"""What this user's own processes have written into folders of runs, and trained there.

A run's folder is data: somebody else may have made it. The code that it names, and the machines and commands
that its launch files list, are followed only if a record that lies elsewhere knows them:

    <state>/begun/<run id>/<SHA-256>        a launcher of this user wrote a file of this name and content
    <state>/begun/<run id>/<SHA-256>.json   a process of this user trained a workload in that run

where <state> is `$XDG_STATE_HOME/smolcluster`, by default `~/.local/state/smolcluster`. Only this user may
enter these folders. Nothing is imported here, and a record is asked before anything of the code is.
"""

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from smolcluster.configs.function_name import FunctionName
from smolcluster.configs.schema import TrainConfig
from smolcluster.errors import ConfigError
from smolcluster.utils.folders import user_state
from smolcluster.utils.replacing import replacing
from smolcluster.utils.words import one_line

WORKLOAD_FOLDER, WORKLOAD_NAME = "launch/workload", "launch/workload.name"
"""In a run's folder on every machine: the code, and the function as it is seen from there."""
BEGUN = "begun"
COMPILED = "__pycache__"


def remember(run_id: str, name: str, content: bytes) -> None:
    """Note that a launcher of this user writes a file of this name and content into a run's folder.

    Where the note cannot be written, the file counts as somebody else's.
    """
    with suppress(OSError):
        (_made(run_id) / marker(name, content)).touch(mode=0o600)


def is_known(run_id: str, name: str, content: bytes) -> bool:
    """Whether `remember` was told the same."""
    folder = _folder(run_id)
    return _is_private(folder) and (folder / marker(name, content)).is_file()


def marker(name: str, content: bytes) -> str:
    """The name of the note on a file."""
    return hashlib.sha256(name.encode() + b"\0" + content).hexdigest()


def remember_workload(run: Path, train: TrainConfig, files: Mapping[str, str]) -> None:
    """Note that a process of this user trains the workload that `train` names, in the folder `run`.

    `files`: what its code consists of, and the SHA-256 of each, as `content_hash` gives it.

    Raises:
        OSError: the note cannot be written.
    """
    run = run.resolve()
    note = {"run": str(run), "workload": _identity(train), "files": dict(files)}
    text = json.dumps(note).encode()
    path = _made(run.name) / f"{marker(str(run), _identity(train).encode())}.json"
    with replacing(path, durable=False) as draft:
        draft.write_bytes(text)
    path.chmod(0o600)


def check_workload(run: Path, train: TrainConfig, *, may_have_changed: bool = False) -> None:
    """Refuse a workload that the configuration in a run's folder names, unless this user trained it there.

    Args:
        run: the run's folder.
        train: what its own configuration says.
        may_have_changed: whether the user's own files may be others than those that were trained with, if the
            run has not been moved. What lies in the run's folder never may.

    Raises:
        ConfigError: nobody has, or the code is not what it was.
    """
    if train.workload is None:
        return
    run = run.resolve()
    name, identity = FunctionName.parse(train.workload), _identity(train)
    notes = [note for note in _notes(run.name) if note.get("workload") == identity]
    is_here = name.is_installed or name.source_file() is not None
    flag = one_line(f"--workload {name.text if is_here else 'FILE.py:FUNCTION'}")
    if not notes:
        raise ConfigError(
            one_line(
                f"run {run.name} names the workload {name.text}, which no run of this name has trained with "
                "these arguments on this machine: what a run's folder names is not imported; if you trust "
                f"the code, say {flag}"
            )
        )
    place, *_ = _place(name)
    if place is not None and place.is_relative_to(run):
        brought = brought_workload(run)
        is_same = brought is not None and _place(FunctionName.parse(brought)) == _place(name)
    else:
        is_same = any(
            (may_have_changed and note.get("run") == str(run)) or _is_unchanged(note["files"])
            for note in notes
        )
    if not is_same:
        raise ConfigError(
            one_line(
                f"run {run.name} was trained with the workload {name.text}, whose code is another one now; "
                f"to use it as it is, say {flag}"
            )
        )


def brought_workload(run: Path) -> str | None:
    """The function whose code a launcher of this user brought into a run's folder; None: none was.

    Nor is it one whose name leads out of that folder, or whose files are not those that were brought. What
    Python has compiled of them is removed, for nobody knows of what.
    """
    try:
        said = (run / WORKLOAD_NAME).read_text()
        name = FunctionName.parse(said)
        digest = folder_digest(run / WORKLOAD_FOLDER)
    except (OSError, ValueError):
        return None
    place = name.file or name.folder or Path()
    if place.is_absolute() or ".." in place.parts:
        return None
    if not is_known(run.name, WORKLOAD_FOLDER, code_note(said, digest)):
        return None
    return name.below(str(run / WORKLOAD_FOLDER)).text


def code_note(name: str, digest: str) -> bytes:
    """What is noted of code that is brought to a machine: the function, and the digest of the files."""
    return f"{name}\0{digest}".encode()


def folder_digest(folder: Path) -> str:
    """`files_digest` of a folder of code. What Python has compiled is removed.

    Other processes may import this code, and so compile it, or remove what was compiled, meanwhile.

    Raises:
        OSError: a file cannot be read, or is none.
    """
    hashes = {}
    for place, folders, files in os.walk(folder):
        if COMPILED in folders:
            folders.remove(COMPILED)
            out = TemporaryDirectory(dir=folder.parent, prefix=".removed-")  # nobody writes there
            with out, suppress(FileNotFoundError):
                Path(place, COMPILED).rename(Path(out.name, COMPILED))
        for each in (Path(place, name) for name in (*folders, *files)):
            mode = each.lstat().st_mode
            if stat.S_ISREG(mode):
                content = each.read_bytes()
                hashes[each.relative_to(folder).as_posix()] = hashlib.sha256(content).hexdigest()
            elif not stat.S_ISDIR(mode):
                raise OSError(f"{each} is no file")
    return files_digest(hashes)


def files_digest(hashes: Mapping[str, str]) -> str:
    """SHA-256 of files, by their names and the SHA-256 of each, in hex."""
    lines = "".join(f"{name}\0{hashes[name]}\n" for name in sorted(hashes))
    return hashlib.sha256(lines.encode()).hexdigest()


def content_hash(content: bytes) -> str:
    """SHA-256 of a file of code, in hex. Line ends do not count, for git changes them between machines."""
    return hashlib.sha256(content.replace(b"\r\n", b"\n")).hexdigest()


def forget(run_id: str) -> None:
    """Remove all notes on runs of this name, as far as they can be."""
    shutil.rmtree(_folder(run_id), ignore_errors=True)


def _identity(train: TrainConfig) -> str:
    """What the function and its arguments are known by: arguments may be secrets."""
    said = json.dumps(train.workload_args, sort_keys=True, default=str)
    return marker(str(train.workload), said.encode())


def _is_unchanged(files: Mapping[str, str]) -> bool:
    with suppress(OSError):
        return all(content_hash(Path(file).read_bytes()) == files[file] for file in files)
    return False


def _place(name: FunctionName) -> tuple[Path | None, str, str]:
    """A function, however the way to its file is written."""
    place = name.file or name.folder
    return place and place.expanduser().resolve(), name.module, name.function


def _notes(run_id: str) -> Iterator[dict[str, Any]]:
    folder = _folder(run_id)
    for path in folder.glob("*.json") if _is_private(folder) else ():
        with suppress(OSError, ValueError):
            yield json.loads(path.read_bytes())


def _folder(run_id: str) -> Path:
    return user_state() / BEGUN / run_id


def _made(run_id: str) -> Path:
    folder = _folder(run_id)
    folder.parent.parent.mkdir(parents=True, exist_ok=True)
    for each in (folder.parent, folder):
        each.mkdir(mode=0o700, exist_ok=True)
    return folder


def _is_private(folder: Path) -> bool:
    """Whether only this user can have written what is in a folder."""
    with suppress(OSError):
        status = folder.lstat()
        return status.st_uid == os.getuid() and not status.st_mode & 0o022
    return False
