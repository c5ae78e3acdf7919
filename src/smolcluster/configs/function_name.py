"""The name of a user's function: `my_project/train.py:workload`, or `package.module:workload`."""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from smolcluster.errors import ConfigError
from smolcluster.utils.words import hint_at, one_line

FORM = "FILE.py:FUNCTION or package.module:function"
ARGS = "workload_args"
"""The key of its keyword arguments."""
MAX_LABEL_CHARS = 200
FROM_ENVIRONMENT = re.compile(r"env:([A-Z_][A-Z0-9_]*)")
"""A value of `workload_args` that each machine takes from its own environment."""
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|-")
"""Where a word begins in `hfToken`, `HFToken` and `hf-token`."""
_KEYS_OF = (
    "api|access|account|auth|private|secret|aws|github|gitlab|hf|hub|huggingface|openai|wandb"
)
_SECRET_KEY = re.compile(
    r"(^|_)(token|secrets?|passwords?|passwd|passphrase|pwd|credentials?|bearer|auth|authorization"
    rf"|({_KEYS_OF})_?keys?)(_?\d+)?$"
)
_AUTH = re.compile(r"(^|_)auth(orization)?$")
"""Its value may also be the name of a method, in small letters."""
_TEXT_TOKEN = re.compile(r"(^|_)(pad|bos|eos|unk|mask|sep|cls)_token$")
"""Of a tokenizer."""
_SECRET = re.compile(r"[^\s<>~./][^\s<>]{7,}|(bearer|basic)\s+\S{8,}", re.I)
"""No path, and none of a tokenizer's words."""
_KNOWN_SECRET = re.compile(
    r"\b(hf_|sk-|gh[oprsu]_|github_pat_|glpat-|pypi-|npm_|xox[abprs]-|AKIA|ASIA|AIza)[\w-]{12,}"
    r"|://[^\s/:@]*:[^\s/@]+@"
)
"""Of Hugging Face, OpenAI, GitHub, GitLab, PyPI, npm, Slack, Amazon, Google; a password in a URL."""
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


@dataclass(frozen=True)
class FunctionName:
    """A function of a file, or of a module that is looked for in `folder` first.

    Attributes:
        file: None: it is of a module.
        folder: where the module's first package is; None: it is installed.
        module: with dots; of a file, its name without the ending.
    """

    file: Path | None
    folder: Path | None
    module: str
    function: str

    @classmethod
    def parse(cls, text: str) -> "FunctionName":
        """Read a name; a module's folder may stand before it: `my_project/package.module:function`.

        Raises:
            ValueError: it is no such name.
        """
        place, _, function = text.rpartition(":")
        if not function.isidentifier() or not place:
            raise ValueError(f"must be {FORM}")
        if place.endswith(".py"):
            file = Path(place)
            if "." in file.stem:
                raise ValueError(
                    f"must be {FORM}, and Python imports no file with another dot in its name: rename it"
                )
            return cls(file, None, file.stem, function)
        folder, slash, module = place.rpartition("/")
        if not _DOTTED.fullmatch(module):
            raise ValueError(f"must be {FORM}")
        return cls(None, Path(folder or slash) if slash else None, module, function)

    @property
    def label(self) -> str:
        """What it is called where no code may be named: letters, digits, dots and underscores."""
        name = f"{self.module}.{self.function}"[-MAX_LABEL_CHARS:]
        return "".join(c if c.isalpha() or c.isdecimal() or c in "._" else "_" for c in name)

    @property
    def text(self) -> str:
        """As it is written."""
        place = self.module if self.folder is None else f"{self.folder}/{self.module}"
        return f"{self.file or place}:{self.function}"

    def source_file(self) -> Path | None:
        """The file that it is in, as it is found without importing anything; None: it is not here."""
        if self.file is not None:
            file = self.file.expanduser()
            return file if file.is_file() else None
        base = (self.folder or Path()).expanduser().joinpath(*self.module.split("."))
        candidates = (base.with_name(f"{base.name}.py"), base / "__init__.py")
        return next((path for path in candidates if path.is_file()), None)

    def absolute(self) -> "FunctionName":
        """The same for any current folder, if it is found from this one; else as it is."""
        try:
            if self.source_file() is None:
                return self
            if self.file is not None:
                return replace(self, file=self.file.expanduser().absolute())
            return replace(self, folder=(self.folder or Path()).expanduser().absolute())
        except (OSError, RuntimeError):
            return self

    @property
    def is_installed(self) -> bool:
        """Whether it is looked for where Python keeps its packages."""
        return self.file is None and self.folder is None

    def below(self, folder: str) -> "FunctionName":
        """The same name, seen from outside a folder; an installed one is the same everywhere."""
        if self.file is not None:
            return replace(self, file=Path(folder, self.file))
        return self if self.folder is None else replace(self, folder=Path(folder, self.folder))


def known_here(text: str) -> FunctionName:
    """The name for any current folder.

    Raises:
        ConfigError: it is none, or its file is not here.
    """
    try:
        name = FunctionName.parse(text)
    except ValueError as error:
        raise ConfigError(one_line(f"--workload is {text!r}, {error}")) from None
    if name.source_file() is None and not name.is_installed:
        raise ConfigError(one_line(f"--workload is {text!r}: there is no such file"))
    return name.absolute()


def check_workload_args(
    given: Collection[str], known: Mapping[str, bool], said: str, *, takes_any: bool
) -> None:
    """Compare `workload_args` with what a function takes.

    Args:
        given: the names of the arguments.
        known: those that the function has, and whether it needs them.
        said: what the function is called.
        takes_any: whether it takes others too.

    Raises:
        ConfigError: it takes no such argument, or needs another one.
    """
    for key in given:
        if key not in known and not takes_any:
            instead = hint_at(key, known) or f"; it takes {', '.join(known) or 'none'}"
            raise ConfigError(one_line(f"{ARGS}.{key} is no argument of {said}{instead}"))
    for key, is_needed in known.items():
        if is_needed and key not in given:
            raise ConfigError(f"{said} needs an argument: set {ARGS}.{key}")


def check_secrets(args: Mapping[str, Any]) -> None:
    """Refuse secrets among `workload_args`, which stand in command lines, logs and the run's files.

    Raises:
        ConfigError: a value looks like one by its key or how it begins, and is not `env:NAME`.
    """
    for key, value in args.items():
        for each in _leaves(value):
            if isinstance(each, Mapping):
                check_secrets(each)
            elif _is_secret(key, each):
                raise ConfigError(
                    f"{ARGS}.{key} looks like a secret, and would stand in command lines, logs and the run's "
                    f"files: say {ARGS}.{key}=env:NAME, which each machine takes from its own environment "
                    "(nodes.<name>.env of the cluster file, or export NAME=…)"
                )


def _leaves(value: Any) -> Iterator[Any]:
    """What is in a list, and in the lists in it."""
    if isinstance(value, list):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _is_secret(key: str, value: Any) -> bool:
    text, name = str(value), _HUMP.sub("_", key).lower()
    if FROM_ENVIRONMENT.fullmatch(text):
        return False
    is_named = _SECRET_KEY.search(name) and not _TEXT_TOKEN.search(name)
    is_method = _AUTH.search(name) and text.isalpha() and text.islower()
    is_meant = bool(is_named and not is_method and _SECRET.fullmatch(text))
    return is_meant or bool(_KNOWN_SECRET.search(text))


def is_from_environment(value: Any) -> bool:
    """Whether a value of `workload_args`, or a part of it, is `env:NAME`."""
    match value:
        case Mapping():
            return any(map(is_from_environment, value.values()))
        case list():
            return any(map(is_from_environment, value))
    return FROM_ENVIRONMENT.fullmatch(str(value)) is not None


def from_environment(value: Any, environ: Mapping[str, str], key: str) -> Any:
    """A value of `workload_args`, in which `env:NAME` is what the variable NAME holds on this machine.

    Raises:
        ConfigError: the variable is not set.
    """
    match value:
        case Mapping():
            return {
                name: from_environment(each, environ, f"{key}.{name}")
                for name, each in value.items()
            }
        case list():
            return [from_environment(each, environ, key) for each in value]
        case str() if found := FROM_ENVIRONMENT.fullmatch(value):
            if found[1] not in environ:
                raise ConfigError(
                    f"{ARGS}.{key} is {value}, but {found[1]} is not set on this machine: export it, or say "
                    "it in nodes.<name>.env of the cluster file"
                )
            return environ[found[1]]
    return value


def check_name(text: str) -> str:
    """Raise ValueError unless it is a function's name."""
    FunctionName.parse(text)
    return text
