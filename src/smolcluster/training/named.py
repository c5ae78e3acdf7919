"""A workload by the name of the function that makes it: `FILE.py:FUNCTION` or `package.module:function`.

The function is called with `workload_args`. Only a name that this process was given by its own user comes
here: what a server says of its workload is a label that no code is looked for by.
"""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

from smolcluster.configs.argument_types import checked_argument
from smolcluster.configs.begun import content_hash, files_digest
from smolcluster.configs.function_name import FunctionName, check_workload_args
from smolcluster.errors import ConfigError
from smolcluster.training.workload import UNNAMED, Workload
from smolcluster.utils.isolated_rng import isolated_rng
from smolcluster.utils.seed import derive_seed
from smolcluster.utils.user_code import user_code
from smolcluster.utils.words import hint_at, one_line

_OURS = "smolcluster"
_HASH = "__smolcluster_sha256__"
"""A module's attribute."""
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def load_named(name: str, args: Mapping[str, Any], seed: int) -> Workload:
    """What the function of that name makes of these keyword arguments; `source` and `files` are set.

    They are of its module and of all that was imported from that one's folders, as it was imported.

    The generators of PyTorch, NumPy and Python are seeded for its module and for it, so that it makes the
    same on every machine.

    Raises:
        ConfigError: there is no such function, it does not take these arguments, or makes no workload.
        UserCodeError: it, or what it is imported with, raises an exception.
    """
    parsed = FunctionName.parse(name)
    with isolated_rng(seed=derive_seed(seed, "workload", "module")):
        function, folders = _find(parsed)
    arguments = checked_arguments(function, args, parsed.text)
    # apart, for the module may have been imported before
    with isolated_rng(seed=derive_seed(seed, "workload")), user_code(parsed.function):
        workload = function(**arguments)
    if not isinstance(workload, Workload):
        kind = type(workload).__name__
        raise ConfigError(
            f"workload {name}: {parsed.function} returns an object of type {kind}, must return a "
            "smolcluster.Workload(model, loss, train)"
        )
    if not workload.is_named:
        is_usual = parsed.function == UNNAMED
        workload.name = parsed.module.rpartition(".")[2] if is_usual else parsed.function
    hashes = {
        (name, file): _imported_hash(sys.modules[name], file)
        for name, file in _own_files(parsed.module, folders)
    }
    workload.source = files_digest({name: found for (name, _), found in hashes.items()})
    workload.files = {str(file): found for (_, file), found in hashes.items()}
    return workload


def _find(name: FunctionName) -> tuple[Callable[..., Any], list[Path]]:
    """The function, and the folders that its module and that module's neighbours are imported from."""
    if name.file is not None:
        module, folders = _import_file(name.file)
    else:
        folders = [] if name.folder is None else [name.folder.expanduser().absolute()]
        module = _import(name.module, folders, name.text)
    found = getattr(module, name.function, None)
    if found is None:
        functions = [
            key for key, value in vars(module).items() if callable(value) and key[0] != "_"
        ]
        hint = hint_at(name.function, functions)
        raise ConfigError(f"workload {name.text}: {name.module} has no {name.function}{hint}")
    if not callable(found):
        kind = type(found).__name__
        raise ConfigError(
            f"workload {name.text}: {name.function} is a {kind}, must be a function that returns a Workload"
        )
    return found, folders


def _import_file(stated: Path) -> tuple[ModuleType, list[Path]]:
    """Import a file as what it is called in its package, if it is in one; its folder is looked in first."""
    file = stated.expanduser().absolute()
    if not file.is_file():
        raise ConfigError(f"workload {stated}: there is no such file")
    parts, top = [file.stem], file.parent
    while (top / "__init__.py").is_file():
        parts, top = [top.name, *parts], top.parent
    folders = list(dict.fromkeys((file.parent, top)))
    module = _import(".".join(parts), folders, str(file))
    if not (module.__file__ and Path(module.__file__).samefile(file)):
        raise ConfigError(
            f"workload {file}: the module {module.__name__} is another file already, "
            f"{module.__file__ or 'of Python itself'}: rename yours"
        )
    return module, folders


def _import(module: str, folders: list[Path], said: str) -> ModuleType:
    first = [str(folder) for folder in folders]
    sys.path[:] = [*first, *(path for path in sys.path if path not in first)]
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            with user_code(f"import of {module}"):
                raise
        where = f" in {folders[0]}" if folders else ", and no such file"
        raise ConfigError(f"workload {said}: there is no module {error.name}{where}") from None
    except SyntaxError as error:
        raise ConfigError(
            one_line(f"workload {said}: {error.filename}, line {error.lineno}: {error.msg}")
        ) from None
    except (Exception, SystemExit):
        with user_code(f"import of {module}"):
            raise


def checked_arguments(
    function: Callable[..., Any], args: Mapping[str, Any], said: str
) -> dict[str, Any]:
    """Keyword arguments for a function, of the types that it is annotated with.

    Raises:
        ConfigError: it takes no such argument, needs another one, or one is of another type.
    """
    parameters = inspect.signature(function).parameters.values()
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    for parameter in parameters:
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY and _is_needed(parameter):
            raise ConfigError(f"{said}: {parameter.name} is positional only, must have a name")
    known = {each.name: _is_needed(each) for each in parameters if each.kind in _NAMED}
    check_workload_args(args, known, said, takes_any=takes_any)
    try:
        hints = get_type_hints(function)
    except (NameError, TypeError, AttributeError):  # of names that exist for type checkers alone
        hints = {}
    return {
        key: checked_argument(key, value, hints.get(key, Any), said, os.environ)
        for key, value in args.items()
    }


def _is_needed(parameter: inspect.Parameter) -> bool:
    return parameter.default is inspect.Parameter.empty


def _imported_hash(module: ModuleType, file: Path) -> str:
    """The hash of a module's file as it was when it was first asked for, soon after its import."""
    if not hasattr(module, _HASH):
        setattr(module, _HASH, content_hash(file.read_bytes()))
    found: str = getattr(module, _HASH)
    return found


def _own_files(module: str, folders: list[Path]) -> Iterator[tuple[str, Path]]:
    """A module, and all that was imported from its folders: names and files."""
    for name, loaded in list(sys.modules.items()):
        file = getattr(loaded, "__file__", None)
        if not isinstance(file, str) or name.partition(".")[0] == _OURS:
            continue
        path, below = Path(file), Path(*name.split("."))
        if name == module and not folders:
            yield name, path
        for folder in folders:
            if path in (folder / below.with_suffix(".py"), folder / below / "__init__.py"):
                yield name, path
