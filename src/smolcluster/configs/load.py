"""Configuration files: finding them by path or shipped name, and reading their YAML.

YAML 1.2, so that `6e-4` is a number and `yes` is text. Duplicate keys are refused.
"""

import io
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from smolcluster.configs.spec import algorithms
from smolcluster.errors import ConfigError
from smolcluster.utils.words import nearest, one_line

if TYPE_CHECKING:
    from ruamel.yaml.error import MarkedYAMLError

Kind = Literal["cluster", "training"]

SECTIONS: Mapping[Kind, str] = MappingProxyType({"cluster": "cluster", "training": "train"})
NODE_SECTION = "node"
"""What a run's `config.yaml` calls the three parts of a configuration."""

_FOLDER = Path(__file__).parent


def shipped_names(kind: Kind) -> tuple[str, ...]:
    """Short names of the configurations that come with the package, such as `edp`, `digits`, `nn`."""
    return tuple(_shipped(kind))


def find_config(source: str | Path, kind: Kind) -> Path:
    """The file that `source` means: a shipped name (`edp`, `digits`), or else a path.

    Raises:
        ConfigError: neither a shipped name nor an existing path.
    """
    shipped = _shipped(kind)
    text = str(source)
    if text in shipped:
        return shipped[text]
    path = Path(source)
    with suppress(RuntimeError):  # no such user: then `~name` is not found
        path = path.expanduser()
    if not text or not os.path.lexists(path):
        raise ConfigError(one_line(f"{kind} configuration {text!r}: {_not_found(text, shipped)}"))
    return path


def read_config(path: Path, kind: Kind) -> dict[str, Any]:
    """The mapping that a configuration file holds; of a run's `config.yaml`, the part of that kind.

    Raises:
        ConfigError: see `read_yaml`.
    """
    return part_of(read_yaml(path), kind)


def part_of(content: dict[str, Any], kind: Kind) -> dict[str, Any]:
    """The part of that kind, if this is what a run's `config.yaml` holds; else all of it."""
    if _has_sections(content):
        part = content[SECTIONS[kind]]
        if isinstance(part, dict):
            return part
    return content


def is_of_run(path: Path) -> bool:
    """Whether a configuration file is the `config.yaml` of a run.

    Raises:
        ConfigError: see `read_yaml`.
    """
    return _has_sections(read_yaml(path))


def _has_sections(content: Mapping[str, Any]) -> bool:
    return content.keys() == set(SECTIONS.values()) | {NODE_SECTION}


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping that a YAML file holds.

    Raises:
        ConfigError: the file cannot be read, is no UTF-8, no YAML or no mapping with text keys, or repeats
            a key; the message names the file and, where known, the line.
    """
    text = _read_text(path)
    try:
        content = parse_yaml(text)
    except ValueError as error:
        raise ConfigError(one_line(f"{path}{error}")) from None
    if content is None:
        raise ConfigError(one_line(f"{path}: is empty, must hold a mapping of keys to values"))
    if not isinstance(content, dict):
        is_a = "a list" if isinstance(content, list) else "a single value"
        raise ConfigError(one_line(f"{path}: holds {is_a}, must hold a mapping of keys to values"))
    return content


def parse_yaml(text: str) -> Any:
    """The value of a YAML document; keys of mappings are text.

    Raises:
        ValueError: no YAML; the message is `, line N: what is wrong`, or `: what is wrong`.
    """
    # Imported here because it takes 0.1 s, which `--help` need not wait for.
    from ruamel.yaml import YAML  # noqa: PLC0415
    from ruamel.yaml.error import MarkedYAMLError, YAMLError  # noqa: PLC0415
    from ruamel.yaml.reader import ReaderError  # noqa: PLC0415

    yaml = YAML(typ="safe", pure=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about odd but valid YAML, over several lines
            content = yaml.load(text)
        odd = next(_odd_keys(content), None)
    except MarkedYAMLError as error:
        raise ValueError(_complaint(error)) from None
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ValueError(
            f", line {line}: holds the control character {error.character:#x}"
        ) from None
    except YAMLError as error:
        raise ValueError(f": is not valid YAML ({error})") from None
    except RecursionError:
        raise ValueError(": is nested too deeply, or an alias holds itself") from None
    except ValueError as error:
        reason = str(error).partition(";")[0]
        raise ValueError(f": holds an impossible date or number ({reason})") from None
    if odd is not None:
        raise ValueError(f": the key {odd[0]!r} must be text; put it in quotes")
    return content


def dump_yaml(content: dict[str, Any]) -> str:
    """`content` as a YAML document that `parse_yaml` reads back."""
    from ruamel.yaml import YAML  # noqa: PLC0415

    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    text = io.StringIO()
    yaml.dump(content, text)
    return text.getvalue()


def _shipped(kind: Kind) -> dict[str, Path]:
    """Short name -> file: `digits` for nn_config_digits, `nn` for nn_config; also in algorithms' folders."""
    names = {}
    folders = (_FOLDER, *(spec.folder for spec in algorithms().values()))
    for path in sorted(path for folder in folders for path in folder.glob("*_config*.yaml")):
        before, _, after = path.stem.partition("_config")
        if (before == "cluster") == (kind == "cluster"):
            names[after.removeprefix("_") or before] = path
    return names


def _not_found(text: str, shipped: dict[str, Path]) -> str:
    close = nearest(Path(text).stem, [*shipped, *(path.stem for path in shipped.values())])
    meant = f" (did you mean {close.partition('_config_')[2] or close}?)" if close else ""
    return f"no such file; give a path or a shipped name: {', '.join(shipped)}{meant}"


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        reason = f", line {line}: is not UTF-8 text; save it as UTF-8"
    except FileNotFoundError:
        reason = ": no such file"
    except IsADirectoryError:
        reason = ": is a folder, must be a YAML file"
    except PermissionError:
        reason = ": may not be read by this user; change its permissions"
    except OSError as error:
        reason = f": cannot be read ({error.strerror})"
    raise ConfigError(one_line(f"{path}{reason}"))


def _complaint(error: "MarkedYAMLError") -> str:
    from ruamel.yaml.constructor import DuplicateKeyError  # noqa: PLC0415

    mark = error.problem_mark or error.context_mark
    where = f", line {mark.line + 1}" if mark else ""
    problem = str(error.problem or error.context or "").split("\n", maxsplit=1)[0]
    if isinstance(error, DuplicateKeyError):
        return (
            f"{where}: {problem.removeprefix('found ').split(' with value')[0]}; keep one of them"
        )
    if "'\\t'" in problem:
        return f"{where}: has a tab in a place where YAML allows spaces only"
    return f"{where}: is not valid YAML ({problem})"


def _odd_keys(content: Any) -> Iterator[tuple[Any]]:
    """Keys that are not text, anywhere in `content`, each in a tuple (a key may be None)."""
    if isinstance(content, dict):
        for key, value in content.items():
            if not isinstance(key, str):
                yield (key,)
            yield from _odd_keys(value)
    elif isinstance(content, list):
        for value in content:
            yield from _odd_keys(value)
