"""A user's code, of a workload or a script: looked at before anything starts, and sent to a run's machines.

Nothing of it is imported here: that is for the processes that train.
"""

import ast
import gzip
import hashlib
import io
import os
import shlex
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from smolcluster.configs.argument_types import checked_argument, type_of
from smolcluster.configs.begun import (
    BEGUN,
    WORKLOAD_FOLDER,
    WORKLOAD_NAME,
    code_note,
    files_digest,
    marker,
)
from smolcluster.configs.function_name import (
    FunctionName,
    check_workload_args,
    is_from_environment,
)
from smolcluster.errors import ConfigError, LaunchError
from smolcluster.launch.host import Host, run_here, shell_path
from smolcluster.launch.project import packed
from smolcluster.utils.units import format_bytes
from smolcluster.utils.words import hint_at, one_line

WORKLOAD_FILE = "launch/workload.tgz"
"""On the machine that launched: the same code, for who joins later."""
MOST_NBYTES = 64 * 1000**2
"""Of code, as it lies on the disk."""
NO_CODE = ("__pycache__", "node_modules", "runs", "wandb")
"""Folders that are not sent, nor hidden ones and virtual environments, where no git says what belongs."""
SEND_TIMEOUT_S = 600.0
GIT_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class WorkloadCode:
    """What is sent of a user's code.

    Attributes:
        name: the function, as it is seen from the folder of the code; or the script there, and its arguments.
        packed: the files, as a compressed tar archive; the same bytes for the same files.
        num_files: how many there are.
    """

    name: str
    packed: bytes
    num_files: int


def code_of(workload: str) -> WorkloadCode | None:
    """The code that a function is in: its folder, of which git's files if it is in a repository.

    A file that is in a package comes with all that lies beside that package. None: it is installed.

    Raises:
        ConfigError: it cannot be read, or is more than code.
    """
    name = FunctionName.parse(workload)
    root, seen = _root_of(name)
    if root is None:
        return None
    return _packed(root, name.source_file(), seen.text)


def code_of_script(script: str) -> WorkloadCode:
    """The folder of a script that attaches, which is given with its arguments.

    Raises:
        ConfigError: it cannot be read, or is more than code.
    """
    file, *arguments = shlex.split(script)
    path = Path(file)
    return _packed(path.parent, path, shlex.join([path.name, *arguments]))


def _packed(root: Path, own: Path | None, name: str) -> WorkloadCode:
    files = {}
    for relative, path in _files(root, own):
        try:
            files[relative] = path.read_bytes()
        except OSError as error:
            why = error.strerror or error
            raise ConfigError(one_line(f"workload: {path} cannot be read: {why}")) from None
    return WorkloadCode(name, gzip.compress(packed(files), mtime=0), len(files))


def _root_of(name: FunctionName) -> tuple[Path | None, FunctionName]:
    """The folder that is sent, and the name as it is seen from there."""
    if name.file is None:
        seen = name if name.folder is None else replace(name, folder=Path())
        return name.folder, seen
    root = name.file.parent
    while (root / "__init__.py").is_file():
        root = root.parent
    return root, replace(name, file=name.file.relative_to(root))


def _files(root: Path, own: Path | None) -> Iterator[tuple[str, Path]]:
    """The files of a folder that are code, or lie beside it, by what they are called from there.

    Where git ignores `own`, the function's file, it does not say what belongs to it.

    Raises:
        ConfigError: they are too large, or git does not answer.
    """
    total = 0
    tracked = _of_git(root)
    if tracked is not None and own is not None and str(own.relative_to(root)) not in tracked:
        tracked = None
    for relative in sorted(_entered(root, _of_folder(root) if tracked is None else tracked)):
        path = root / relative
        if not path.is_file():
            continue  # git knows it still
        total += path.stat().st_size
        if total > MOST_NBYTES:
            raise ConfigError(
                f"workload: {root} holds more than {format_bytes(MOST_NBYTES)}, which would be sent to "
                "every machine: put the code in a folder of its own, or in a git repository, whose files "
                "alone are sent"
            )
        yield relative, path


def _entered(root: Path, names: Iterable[str]) -> Iterator[str]:
    """What is called so below a folder; of a submodule, and of a linked folder of code, the Python files.

    Both may hold more than code, and a link may lead around itself.
    """
    for name in names:
        path = root / name
        if not path.is_dir():
            yield name
        elif not path.is_symlink() or (
            any(path.glob("*.py")) and not root.resolve().is_relative_to(path.resolve())
        ):
            yield from (f"{name}/{each}" for each in _of_folder(path) if each.endswith(".py"))


def _of_git(root: Path) -> set[str] | None:
    """What git tracks below a folder, and Python files that it does not ignore; None: it is no repository."""
    found: set[str] = set()
    for choice in (("--cached",), ("--others", "--exclude-standard", "--", "*.py")):
        try:
            done = run_here(
                ["git", "-C", str(root), "ls-files", "-z", *choice], timeout_s=GIT_TIMEOUT_S
            )
        except OSError:
            return None
        except subprocess.TimeoutExpired:
            raise ConfigError(
                f"workload: git has not listed the files of {root} within {GIT_TIMEOUT_S:.0f} s: put the "
                "code in a folder outside that repository"
            ) from None
        if not done.ok:
            return None
        found.update(filter(None, done.stdout.split("\0")))
    return found


def _of_folder(root: Path) -> Iterator[str]:
    for folder, folders, files in os.walk(root):
        folders[:] = [
            name
            for name in folders
            if not (name[0] == "." or name in NO_CODE or Path(folder, name, "pyvenv.cfg").is_file())
        ]
        links = [name for name in folders if Path(folder, name).is_symlink()]
        for name in (*files, *links):
            if not name.endswith((".pyc", ".pyo")) and name[0] != ".":
                yield os.path.relpath(Path(folder, name), root)


def _digest(archive: bytes) -> str:
    """`files_digest` of packed code."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        members = [(each.name, tar.extractfile(each)) for each in tar]
        return files_digest(
            {name: hashlib.sha256(file.read()).hexdigest() for name, file in members if file}
        )


def put_code(host: Host, run_dir: str, archive: bytes, name: str) -> None:
    """Make a run's folder on a machine hold this code and no other, and the name of its function.

    It is unpacked beside, since processes of the run may be importing what is there. Outside that folder it
    is noted what was brought, see `brought_workload`.

    Raises:
        LaunchError: it cannot be written; what was there before still is.
    """
    there, named = (shell_path(f"{run_dir}/{each}") for each in (WORKLOAD_FOLDER, WORKLOAD_NAME))
    run_id = shlex.quote(run_dir.rpartition("/")[2])
    note = marker(WORKLOAD_FOLDER, code_note(name, _digest(archive)))
    script = (
        f'umask 077; new={there}.$$; mkdir -p "$new" && tar -xzf - -C "$new" && rm -rf {there} && '
        f'mv "$new" {there} && printf %s {shlex.quote(name)} > {named} || {{ rm -rf "$new"; exit 1; }}; '
        f'notes="${{XDG_STATE_HOME:-$HOME/.local/state}}"/smolcluster/{BEGUN}/{run_id}; '
        f'{{ mkdir -p "$notes" && : > "$notes"/{note}; }} 2>/dev/null; exit 0'
    )
    done = host.run(script, stdin=archive, timeout_s=SEND_TIMEOUT_S)
    if not done.ok:
        raise LaunchError(f"{host.node}: the workload's code cannot be written: {done.stderr_tail}")


def check_source(name: FunctionName, args: Mapping[str, Any]) -> None:
    """Look, without running it, whether a file has this function, and whether it takes these arguments.

    Of what is annotated with Python's own types the values are checked too.

    Raises:
        ConfigError: it has not, it does not, or it is no Python.
    """
    file = name.source_file()
    if file is None:
        return  # it is installed, perhaps elsewhere
    tree = _parsed(file, name.text)
    functions = {each.name: each for each in tree.body if isinstance(each, ast.FunctionDef)}
    found = functions.get(name.function)
    if found is None and not {name.function, "*"}.intersection(_bound(tree)):
        hint = hint_at(name.function, functions)
        raise ConfigError(f"workload {name.text}: {file.name} has no {name.function}{hint}")
    if found is not None and not found.decorator_list:
        takes = found.args
        first_default = len(takes.args) - len(takes.defaults)
        known = {each.arg: place < first_default for place, each in enumerate(takes.args)}
        known |= {
            each.arg: default is None
            for each, default in zip(takes.kwonlyargs, takes.kw_defaults, strict=True)
        }
        check_workload_args(args, known, name.text, takes_any=takes.kwarg is not None)
        for each in (*takes.args, *takes.kwonlyargs):
            if each.arg in args and not is_from_environment(args[each.arg]):
                hint = type_of(each.annotation)
                checked_argument(each.arg, args[each.arg], hint, name.text, environ={})


def _parsed(file: Path, said: str) -> ast.Module:
    try:
        return ast.parse(file.read_bytes(), str(file))
    except SyntaxError as error:
        raise ConfigError(
            one_line(f"workload {said}: {file}, line {error.lineno}: {error.msg}")
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(one_line(f"workload {said}: {file} cannot be read: {error}")) from None


def packages_of(name: FunctionName) -> list[str]:
    """The packages that a workload's file, and what it imports of its folder, cannot do without.

    Those are what the files import where nothing is tried, and neither Python's nor the user's own.

    Raises:
        ConfigError: one of the files is no Python.
    """
    file, (root, _) = name.source_file(), _root_of(name)
    if file is None or root is None:
        return []
    packages, seen, todo = set[str](), {file}, [file]
    while todo:
        current = todo.pop()
        for module, folders in _imported(_parsed(current, name.text), current, (file.parent, root)):
            first = module.partition(".")[0]
            own = [_source_of(module, folder) for folder in folders]
            todo += [path for path in own if path is not None and path not in seen]
            seen.update(filter(None, own))
            if not any(
                (folder / first).is_dir() or _source_of(first, folder) for folder in folders
            ):
                packages.add(first)
    return sorted(packages - sys.stdlib_module_names - {"smolcluster"})


def _imported(
    tree: ast.Module, file: Path, folders: Sequence[Path]
) -> Iterator[tuple[str, Sequence[Path]]]:
    """What a file imports, modules or names in them, each with the folders in which it may be."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from ((alias.name, folders) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            within = [file.parents[node.level - 1]] if node.level else folders
            yield node.module, within
            yield from ((f"{node.module}.{alias.name}", within) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):  # of a relative's name it is not known what it is
            within = [file.parents[node.level - 1]]
            found = [alias.name for alias in node.names if _source_of(alias.name, within[0])]
            yield from ((each, within) for each in found)


def _source_of(module: str, folder: Path) -> Path | None:
    return FunctionName(None, folder, module, "").source_file()


def _bound(tree: ast.Module) -> Iterator[str]:
    """Names that a file may give a meaning; `*` for those of `from … import *`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias):
            yield node.asname or node.name.partition(".")[0]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
