"""Writes the pages of docs/reference/ from the code: `uv run scripts/make_reference.py`.

With `--setters` it prints instead of each key which files set it: what only tests set may be no setting.
"""

import ast
import inspect
import json
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel
from typer.main import get_command

import smolcluster
from smolcluster import errors
from smolcluster.cli import app
from smolcluster.cli.options import EXIT_CODES
from smolcluster.configs.load import read_yaml
from smolcluster.configs.schema import cluster_section, own_keys, train_section
from smolcluster.configs.spec import algorithms
from smolcluster.runs import paths as runs_paths
from smolcluster.wire import messages as wire

CONFIGS = Path(smolcluster.__file__).parent / "configs"
SITE = frozenset({"host_ip", "port", "num_workers", "workers", "server"})
"""What a cluster file says of machines."""
PROJECT = Path(__file__).resolve().parents[1]
DOCS = PROJECT / "src" / "smolcluster" / "docs"
FOLDER = DOCS / "reference"
SETTERS = {
    "configs": (PROJECT / "src", "*.yaml"),
    "examples": (PROJECT / "examples", "*.py"),
    "docs": (DOCS, "*.md"),
    "benchmarks": (PROJECT / "benchmarks", "*.py"),
    "tests": (PROJECT / "tests", "*.py"),
}
"""Files that set keys, those first that a user sees first."""
CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
SETTING = re.compile(r"([A-Za-z_][\w.]*)[\"']?(?:=(?!=)|:(?=\s|$))", re.MULTILINE)
WRITTEN = "Written from the code by `uv run scripts/make_reference.py`.\n\n"
KEYS = """What wins, from the top: `--override key=value`; the environment (`SMOLCLUSTER_PORT=6000`,
`SMOLCLUSTER_MODEL__HIDDEN=64`); `nodes.NAME` of the cluster file, for what belongs to one machine; the file;
the default. A misspelt key or a wrong value ends in one line that says where it is and what is allowed.
`smolcluster config check` reads both files, `config show` says what they mean, `config schema` helps editors.
Workers get the run's configuration from the server, and set only what belongs to their machine. "Set in" says
where to see it used: the first of shipped files, examples, documents, benchmarks and tests that does.

"""
SET_BY_LOCAL = "local_names"
OF_WHOM = re.compile(r"^(EDP|DiLoCo|PipelineParallel|Mesh|SyncPS)(, Mesh)?: ")
"""What a description begins with says its table."""

Json = dict[str, Any]


def reference() -> dict[str, str]:
    """The pages, by the name of their file."""
    titles = {
        "commands": ("Commands", commands),
        "keys": ("Keys", keys),
        "exit_codes": ("Exit codes", exit_codes),
        "files": ("Files of a run", files),
        "messages": ("Messages", messages),
    }
    return {
        f"{name}.md": f"# {title}\n\n{WRITTEN}{text()}" for name, (title, text) in titles.items()
    }


def commands() -> str:
    """A row a command: its arguments, what it does, its flags."""
    group: Any = get_command(app)
    rows = list(_rows_of(group, "smolcluster"))
    return "Each has `--help`.\n\n" + _table(("Command", "", "Flags"), rows)


def _rows_of(command: Any, name: str) -> Iterator[tuple[str, str, str]]:
    if hasattr(command, "commands"):
        subs = {sub: command.get_command(None, sub) for sub in command.list_commands(None)}
        for sub, each in subs.items():
            if not each.hidden:
                yield from _rows_of(each, f"{name} {sub}")
        return
    shown = [each for each in command.params if not getattr(each, "hidden", False)]
    arguments = [_argument(each) for each in shown if each.param_type_name == "argument"]
    flags = [f"`{max(each.opts, key=len)}`" for each in shown if each.param_type_name == "option"]
    usage = " ".join([name.removeprefix("smolcluster "), *arguments])
    yield f"`{usage}`", _first_sentences(command.help), " ".join(flags)


def _argument(argument: Any) -> str:
    name = (argument.metavar or argument.name.upper()).strip("[]")
    return name if argument.required else f"[{name}]"


def _first_sentences(text: str) -> str:
    return " ".join(text.partition("\n\n")[0].split())


def shipped(name: str, keys: Mapping[str, Json]) -> str:
    """What the cluster file that comes with an algorithm sets to something else than the default."""
    file = CONFIGS / f"cluster_config_{name}.yaml"
    told = read_yaml(file)
    other = [
        key
        for key in told
        if key not in SITE
        and not keys[key].get("deprecated")
        and told[key] != keys[key].get("default")
    ]
    if not other:
        return ""
    settings = ", ".join(f"`{key}: {_yaml(told[key])}`" for key in other)
    return f"\n`{file.name}` sets {settings}.\n"


def keys() -> str:
    """Those of both files."""
    return KEYS + cluster_keys() + training_keys()


def cluster_keys() -> str:
    """Those of the cluster file: of all algorithms, of each, of a machine, of schedulers."""
    schema = cluster_section().model_json_schema()
    properties, definitions = schema["properties"], schema["$defs"]
    own = {spec.name: own_keys(spec.name) for spec in algorithms().values()}
    shared = {
        key: each
        for key, each in properties.items()
        if key != SET_BY_LOCAL and not any(key in keys for keys in own.values())
    }
    parts = ["## The cluster file\n\n" + _keys(shared, definitions)]
    for spec in algorithms().values():
        mine = {key: properties[key] for key in properties if key in own[spec.name]}
        title, text = spec.package.rpartition(".")[2], _keys(mine, definitions, of_one=True)
        parts.append(f"## Keys of {title}\n\n{text}{shipped(spec.name, properties)}")
    machine = definitions["NodeConfig"]["properties"]
    below = _keys(machine, definitions, "nodes.NAME.")
    parts.append(f"## Keys of one machine\n\n{below}")
    return "\n".join(parts)


def training_keys() -> str:
    """Those of the training file; a nested one may also hold them below `training`, `data` and `dataset`."""
    schema = train_section().model_json_schema()
    definitions = schema["$defs"]
    text = "\n## The training file\n\n" + _keys(schema["properties"], definitions)
    for model in ("SimpleNNConfig", "GPTConfig"):
        each = definitions[model]
        text += f"\n## A model of type {each['properties']['type']['const']}\n\n"
        text += _keys(each["properties"], definitions, "model.")
    return text


def _keys(
    properties: Mapping[str, Json],
    definitions: Mapping[str, Json],
    above: str = "",
    *,
    of_one: bool = False,
) -> str:
    """A row a key; `of_one`: the table's title says of which algorithm."""
    rows = list(_key_rows(properties, definitions, above))
    if of_one:
        rows = [(key, default, OF_WHOM.sub("", told)) for key, default, told in rows]
    set_in = [(key, default, " ".join(setters(key)[:1]), told) for key, default, told in rows]
    return _table(("Key", "Default", "Set in", ""), set_in)


def setters(key: str) -> list[str]:
    """Which of `SETTERS` have a file that sets the key; one in a section where both are named."""
    *_, above, last = ("", *key.strip("`").removeprefix("nodes.NAME.").split("."))
    told = {
        f"`{above}.{last}".replace("`.", "`"),
        f"`{above}.{last}".replace("`dataset.", "`data."),
    }
    return [
        name
        for name in SETTERS
        if any(told & each or {above, last} <= each for each in _names_set(name))
    ]


@cache
def _names_set(setter: str) -> list[set[str]]:
    """What each file of a setter gives a value to, and behind a backtick what a document's code names.

    The empty name is everywhere.
    """
    folder, pattern = SETTERS[setter]
    files = [each for each in sorted(folder.rglob(pattern)) if each.parent != FOLDER]
    return [{"", *_names_in(each)} for each in files]


def _names_in(file: Path) -> Iterator[str]:
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".py":
        nodes = list(ast.walk(ast.parse(text)))
        yield from (each.arg for each in nodes if isinstance(each, ast.keyword) and each.arg)
        keys = [key for each in nodes if isinstance(each, ast.Dict) for key in each.keys if key]
        yield from (ast.unparse(each).strip("'") for each in keys)
        told = [each.value for each in nodes if isinstance(each, ast.Constant)]
        text = "\n".join(each for each in told if isinstance(each, str))
    elif file.suffix == ".md":
        text = "\n".join(each.strip("`") for each in CODE.findall(text))
        yield from ("`" + ".".join(each.split(".")[-2:]) for each in re.findall(r"[\w.]+", text))
    for name in SETTING.findall(text):
        yield from name.split(".")


def _key_rows(
    properties: Mapping[str, Json], definitions: Mapping[str, Json], above: str
) -> Iterator[tuple[str, str, str]]:
    for key, each in properties.items():
        if each.get("deprecated"):
            continue
        told = " ".join(each.get("description", "").split())
        name, section = _section(each, definitions)
        if section is not None:
            told = told or _first_sentences(definitions[name].get("description", ""))
            default = "`null`" if each.get("default", "") is None else ""
            yield f"`{above}{key}`", default, told
            yield from _key_rows(section, definitions, f"{above}{key}.")
            continue
        default = f"`{_yaml(each['default'])}`" if "default" in each else ""
        allowed = [name for name in _allowed(each) if not re.search(rf"\b{name}\b", told)]
        if allowed:
            told = f"{told} Allowed: {', '.join(f'`{name}`' for name in _allowed(each))}."
        yield f"`{above}{key}`", default, told.strip()


def _section(each: Json, definitions: Mapping[str, Json]) -> tuple[str, Mapping[str, Json] | None]:
    """The name of a section's schema, the key's own or beside null, and its keys; None: it is no section."""
    kinds = [each, *each.get("anyOf", ())]
    names = [kind["$ref"].rpartition("/")[2] for kind in kinds if "$ref" in kind]
    if len(names) != 1:
        return "", None
    return names[0], definitions[names[0]].get("properties")


def _allowed(each: Json) -> list[str]:
    """The words of which it is one."""
    kinds = [each, *each.get("anyOf", ())]
    return [str(name) for kind in kinds for name in kind.get("enum", ())]


def _yaml(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def exit_codes() -> str:
    """As each command's help tells them, and which errors end with which."""
    found = re.findall(r"(\d+)  +(.+?)(?=;  \d+  |$)", EXIT_CODES, re.MULTILINE)
    return (
        _table(("Code", "Meaning"), found)
        + "\n## Errors\n\nClasses of `smolcluster.errors`. Their sentences say what to do.\n\n"
        + _table(("Error", "Code", ""), list(_errors_below(errors.SmolclusterError)))
    )


def _errors_below(error: type[errors.SmolclusterError]) -> Iterator[tuple[str, str, str]]:
    yield f"`{error.__name__}`", str(error.exit_code), _first_sentences(error.__doc__ or "")
    for each in error.__subclasses__():
        if each.__module__ == errors.__name__:
            yield from _errors_below(each)


def files() -> str:
    """What is in a run's folder: the attributes of `RunPaths`, and what they are for."""
    [paths] = (
        node
        for node in ast.parse(inspect.getsource(runs_paths)).body
        if isinstance(node, ast.ClassDef) and node.name == "RunPaths"
    )
    rows = [
        (f"`{getattr(runs_paths.RunPaths(Path()), each.targets[0].id)}`", _docstring(told))
        for each, told in pairwise(paths.body)
        if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name)
    ]
    where = "In `runs/RUN/`; `runs/latest` is a link to the newest run that has begun.\n\n"
    return where + _table(("File", ""), rows)


def _docstring(told: ast.stmt) -> str:
    if isinstance(told, ast.Expr) and isinstance(told.value, ast.Constant):
        return " ".join(str(told.value.value).split())
    raise ValueError(
        f"line {told.lineno} of {runs_paths.__file__} must say what the file before it is"
    )


def messages() -> str:
    """What may be said in each of the protocol's sets, by whom, and of what each message consists."""
    written = _Source.of(wire)
    shown: set[type[wire.Message]] = set()
    text = (
        "A field with a value need not be sent. The text of a row is the class's in\n"
        "[`messages.py`](../../wire/messages.py). `offer` and `group-store` are in\n"
        "[conversations](../wire_format/conversations.md#offers).\n\n"
    )
    for each in wire.ALL_SETS:
        rows = list(_message_rows(each, written, shown))
        text += f"## {each.name}\n\n{_table(('Kind', 'Message', 'Sent by', 'Fields', ''), rows)}\n"
        shown |= each.kinds
    parts = [
        (f"`{each.__name__}`", written.fields_of(each), written.told_of(each))
        for each in vars(wire).values()
        if isinstance(each, type)
        and issubclass(each, wire.HeaderModel)
        and not issubclass(each, wire.Message)
        and each is not wire.HeaderModel
    ]
    text += f"## Parts of messages\n\n{_table(('Part', 'Fields', ''), parts)}\n"
    return text + f"## Types of fields\n\n{_table(('Type', 'Is', ''), written.types())}"


def _message_rows(
    spoken: wire.MessageSet, written: "_Source", shown: Collection[type[wire.Message]]
) -> Iterator[tuple[str, ...]]:
    sides = {
        "handshake": spoken.in_handshake,
        "dialler": spoken.from_dialler,
        "listener": spoken.from_listener,
    }
    for kind in sorted(spoken.kinds, key=lambda kind: kind.KIND):
        by = ", ".join(side for side, kinds in sides.items() if kind in kinds)
        told = (
            ("as above", "") if kind in shown else (written.fields_of(kind), written.told_of(kind))
        )
        yield str(kind.KIND), f"`{kind.__name__}`", by, *told


@dataclass(frozen=True)
class _Source:
    """What a module of models says that its classes do not know: types' names, and fields' docstrings."""

    module: ModuleType
    body: Sequence[ast.stmt]

    @classmethod
    def of(cls, module: ModuleType) -> "_Source":
        return cls(module, ast.parse(inspect.getsource(module)).body)

    def fields_of(self, model: type[BaseModel]) -> str:
        """Each field with its type, and its default if it need not be given."""
        declared = self._declared(model)
        return "; ".join(
            f"`{name}` {self._type(declared[name][0])}"
            + (
                ""
                if field.is_required()
                else f" = {_json(field.get_default(call_default_factory=True))}"
            )
            for name, field in model.model_fields.items()
        )

    def told_of(self, model: type[BaseModel]) -> str:
        """Its docstring, and those of its fields."""
        docs = [" ".join((model.__doc__ or "").replace("Attributes:", "").split())]
        docs += [f"`{name}`: {told}" for name, (_, told) in self._declared(model).items() if told]
        return " ".join(docs)

    def types(self) -> list[tuple[str, str, str]]:
        """The module's own names of types."""
        return [
            (f"`{each.targets[0].id}`", f"`{self._type(each.value)}`", told)
            for each, told in _told(self.body)
            if isinstance(each, ast.Assign)
            and isinstance(each.targets[0], ast.Name)
            and isinstance(each.value, ast.Subscript | ast.BinOp)
            and re.match("(Annotated|Literal|bool)", ast.unparse(each.value))
        ]

    def _declared(self, model: type[BaseModel]) -> dict[str, tuple[ast.expr, str]]:
        """By field: its annotation, and its docstring; what a class inherits as well."""
        names = [each.__name__ for each in reversed(model.__mro__)]
        classes = {each.name: each for each in self.body if isinstance(each, ast.ClassDef)}
        return {
            ast.unparse(each.target): (each.annotation, told)
            for name in names
            if name in classes
            for each, told in _told(classes[name].body)
            if isinstance(each, ast.AnnAssign)
        }

    def _type(self, node: ast.expr) -> str:
        """As it is written, with bounds in brackets and the values of named numbers."""
        match node:
            case ast.Constant(value=None):
                return "null"
            case ast.BinOp(left=left, right=right):
                return f"{self._type(left)} | {self._type(right)}"
            case ast.Subscript(value=ast.Name("Annotated"), slice=ast.Tuple(elts=[of, *more])):
                bounds = [
                    f"{bound.arg} {self._number(bound.value)}"
                    for call in more
                    if isinstance(call, ast.Call)
                    for bound in call.keywords
                ]
                return f"{self._type(of)} ({', '.join(bounds)})" if bounds else self._type(of)
            case ast.Subscript(value=outer, slice=ast.Tuple(elts=elements)):
                return f"{ast.unparse(outer)}[{', '.join(map(self._type, elements))}]"
            case ast.Subscript(value=outer, slice=of):
                return f"{ast.unparse(outer)}[{self._type(of)}]"
        return ast.unparse(node)

    def _number(self, node: ast.expr) -> str:
        return re.sub(
            r"[A-Z]+_[A-Z_]+", lambda name: str(getattr(self.module, name[0])), ast.unparse(node)
        )


def _told(body: Sequence[ast.stmt]) -> Iterator[tuple[ast.stmt, str]]:
    """Each statement with the docstring that follows it, if one does."""
    for each, following in pairwise([*body, ast.Pass()]):
        is_told = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        yield each, " ".join(str(following.value.value).split()) if is_told else ""


def _json(value: object) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(
        f"| {' | '.join(each.replace('|', chr(92) + '|') for each in row)} |\n" for row in lines
    )


if __name__ == "__main__":
    if sys.argv[1:] == ["--setters"]:
        for key in re.findall(r"^\| (`.+?`) \|", keys(), re.MULTILINE):
            sys.stdout.write(f"{key.strip('`'):45} {' '.join(setters(key)) or 'nobody'}\n")
    else:
        for name, page in reference().items():
            (FOLDER / name).write_text(page, encoding="utf-8")
