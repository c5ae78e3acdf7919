"""Workloads by the name of the function that makes them."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from connection_pairs import RUN
from smolcluster.configs.function_name import FunctionName, known_here
from smolcluster.configs.schema import RunConfig
from smolcluster.errors import ConfigError, UserCodeError
from smolcluster.training import named
from smolcluster.training.named import load_named
from smolcluster.training.workload import Workload

TRAIN = """
from __future__ import annotations
from typing import TYPE_CHECKING, Literal
import torch
from torch import nn
from smolcluster.training.workload import Workload
{imports}
if TYPE_CHECKING:
    from nowhere import Unknown

def loss(model, batch):
    return model(batch).square().mean()

def workload({parameters}):
    made.append(locals())
    return Workload(nn.Linear({width}, 1), loss, torch.zeros(20, {width}).unbind())

def number(): return 3
made = []
"""


@pytest.fixture(autouse=True)
def _imports_nothing_for_others(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and name.startswith("our"):
            del sys.modules[name]


def write(
    path: Path, parameters: str = "width: int = 4", *, width: str = "width", imports: str = ""
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(TRAIN.format(parameters=parameters, width=width, imports=imports))
    return path


def load(name: str, **args: Any) -> Workload:
    return load_named(name, args, 42)


def test_a_file_that_imports_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "our_sizes.py").write_text("WIDTH = 5\n")
    file = write(
        tmp_path / "our_train.py", "", width="WIDTH", imports="from our_sizes import WIDTH"
    )
    workload = load(f"{file}:workload")
    assert workload.new_model().get_parameter("weight").shape == (1, 5)
    assert workload.train.num_samples == 20


def test_a_workload_without_a_name_has_the_function_s_or_the_file_s(tmp_path: Path) -> None:
    file = write(tmp_path / "our_train.py")
    file.write_text(file.read_text() + "small = workload\n")
    assert load(f"{file}:workload").name == "our_train"
    assert load(f"{file}:small").name == "small"
    file.write_text(file.read_text().replace(".unbind())", ".unbind(), name='points')"))
    del sys.modules["our_train"]
    assert load(f"{file}:workload").name == "points"


def test_arguments_come_as_the_annotations_say(tmp_path: Path) -> None:
    parameters = (
        "width: int, *, rate: float = 0.1, kind: Literal['a', 'b'] = 'a', sizes: tuple[int, ...] = (), "
        "device: torch.device = None, plain=None"
    )
    file = write(tmp_path / "our_train.py", parameters)
    load(f"{file}:workload", width=3, rate=1, sizes=[1, 2], device="cpu", plain={"a": 1})
    [made] = sys.modules["our_train"].made
    assert made == {
        "width": 3,
        "rate": 1.0,
        "kind": "a",
        "sizes": (1, 2),
        "device": "cpu",
        "plain": {"a": 1},
    }


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"widht": 3}, ("workload_args.widht", "our_train.py:workload", "did you mean width?")),
        ({"width": 3, "zzz": 3}, ("workload_args.zzz", "it takes width, kind")),
        ({"width": "3"}, ("workload_args.width is '3'", "valid integer")),
        ({"width": 2.5}, ("workload_args.width is 2.5", "valid integer")),
        ({"width": 3, "kind": "c"}, ("workload_args.kind is 'c'", "'a' or 'b'")),
        ({}, ("needs an argument", "set workload_args.width")),
    ],
)
def test_arguments_that_the_function_does_not_take(
    tmp_path: Path, args: dict[str, Any], words: tuple[str, ...]
) -> None:
    file = write(tmp_path / "our_train.py", "width: int, kind: Literal['a', 'b'] = 'a'")
    with pytest.raises(ConfigError) as caught:
        load(f"{file}:workload", **args)
    assert [word for word in words if word not in str(caught.value)] == []


def test_names_that_exist_for_type_checkers_alone_are_not_checked(tmp_path: Path) -> None:
    file = write(tmp_path / "our_train.py", "width: Unknown, **others")
    load(f"{file}:workload", width=3, more=4)
    assert sys.modules["our_train"].made == [{"width": 3, "others": {"more": 4}}]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("our_train.py:workloud", ("has no workloud", "did you mean workload?")),
        ("our_train.py:made", ("made is a list", "must be a function")),
        (
            "our_train.py:number",
            ("number returns an object of type int", "must return a smolcluster.Workload("),
        ),
        ("our_other.py:workload", ("our_other.py", "no such file")),
        ("our_broken.py:workload", ("our_broken.py, line 2",)),
        ("our.train:workload", ("no module our",)),
        ("random.py:workload", ("the module random", "rename")),
    ],
)
def test_what_is_no_workload_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "our_train.py")
    write(tmp_path / "random.py")
    (tmp_path / "our_broken.py").write_text("\ndef workload(:\n")
    with pytest.raises(ConfigError) as caught:
        load(name)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("imports", "words"),
    [
        (
            "import our_nothing",
            "our_train.py:7.: ModuleNotFoundError: No module named 'our_nothing'",
        ),
        ("1 / 0", "our_train.py:7.: ZeroDivisionError"),
        ("raise SystemExit(2)", "our_train.py:7.: SystemExit: 2"),
        (
            "def workload(): helper()\ndef helper(): 1 / 0\ntaken = workload",
            "helper .our_train.py:8.",
        ),
    ],
)
def test_what_the_user_s_code_raises_names_its_line(
    tmp_path: Path, imports: str, words: str
) -> None:
    file = write(tmp_path / "our_train.py", imports=imports)
    with pytest.raises(UserCodeError, match=words):
        load(f"{file}:taken")


@pytest.mark.parametrize(
    "name", ["ours/deep/our_train.py:workload", "ours.deep.our_train:workload"]
)
def test_a_module_of_a_package_may_import_its_relatives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    imports = "from ..sizes import WIDTH\nfrom ours import sizes"
    write(tmp_path / "ours/deep/our_train.py", "", width="WIDTH", imports=imports)
    (tmp_path / "ours/sizes.py").write_text("WIDTH = 6\n")
    for folder in ("ours", "ours/deep"):
        (tmp_path / folder / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    name = known_here(name).text
    monkeypatch.chdir("/")
    workload = load(name)
    assert workload.new_model().get_parameter("weight").shape == (1, 6)


def test_the_same_name_is_loaded_twice_from_one_module(tmp_path: Path) -> None:
    file = write(tmp_path / "our_train.py")
    first, second = (load(f"{file}:workload", width=3) for _ in range(2))
    assert first.source == second.source
    assert first is not second
    weights = [each.new_model().get_parameter("weight") for each in (first, second)]
    assert torch.equal(*weights), "the function draws from the run's seed"


def test_what_module_and_function_draw_is_the_same_in_each_process(tmp_path: Path) -> None:
    """Also from the generators of NumPy and Python."""
    file = write(
        tmp_path / "our_train.py",
        imports="""
import random
import numpy as np
drawn = [torch.rand(1).item(), np.random.rand(), random.random()]
""",
    )
    draws = "drawn.extend([torch.rand(1).item(), np.random.rand(), random.random()])"
    file.write_text(file.read_text().replace("made.append(locals())", draws))
    found = []
    for _ in range(2):
        load(f"{file}:workload")
        found.append(sys.modules.pop("our_train").drawn)
    assert len(set(found[0])) == 6
    assert found[0] == found[1]
    for _ in range(2):
        load(f"{file}:workload")
    again = sys.modules.pop("our_train").drawn
    assert again[3:6] == again[6:] == found[0][3:], "also where the module had been imported before"


def test_the_hash_is_of_the_file_and_of_what_it_imports_from_its_folder(tmp_path: Path) -> None:
    hashes = {}
    for folder, end, size in (("a", "\n", 5), ("b", "\r\n", 5), ("c", "\n", 6)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "our_sizes.py").write_bytes(f"WIDTH = {size}{end}".encode())
        (tmp_path / folder / "our_unused.py").write_text(f"'of {folder}'")
        imports = "from our_sizes import WIDTH"
        file = write(tmp_path / folder / "our_train.py", "", width="WIDTH", imports=imports)
        hashes[folder] = load(f"{file}:workload").source
        for name in ("our_train", "our_sizes"):
            del sys.modules[name]
        sys.path.remove(str(tmp_path / folder))
    assert hashes["a"] == hashes["b"], "line ends do not count, nor what is not imported"
    assert hashes["a"] != hashes["c"]
    assert len(hashes["a"] or "") == 64


@pytest.mark.parametrize(
    "name",
    ["train.py", "a b.py:1", ":workload", "train:", "a/../b-c:workload", "train.v2.py:workload"],
)
def test_what_is_no_name(name: str) -> None:
    with pytest.raises(ConfigError, match="must be FILE"):
        known_here(name)


def test_the_label_says_nothing_of_where_the_code_is() -> None:
    for name in ("/home/me/my_project/train.py:workload", "~/train.py:workload", "train:workload"):
        assert FunctionName.parse(name).label == "train.workload"
    assert FunctionName.parse("/home/me/a.train:workload").label == "a.train.workload"


def test_the_documented_example(tmp_path: Path) -> None:
    document = Path(named.__file__).parents[1] / "docs/your_model.md"
    _, _, rest = document.read_text().partition("```python\n# my_project/train.py\n")
    code, found, _ = rest.partition("```")
    assert found
    (tmp_path / "our_points.py").write_text("def Points(n):\n    return [{'x': 0.0}] * n\n")
    file = tmp_path / "our_train.py"
    file.write_text(code.replace("from data import", "from our_points import"))
    workload = load(f"{file}:workload", width=8, activation="relu")
    model = workload.new_model()
    assert workload.train.num_samples == 4000
    batch = {"x": torch.zeros(5, 4), "y": torch.zeros(5, 1)}
    result = workload.loss(model, batch)
    assert isinstance(result, torch.Tensor)
    assert result.shape == ()


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("my-train.py:workload", "my_train.workload"),
        ("my train (2).py:workload", "my_train__2_.workload"),
        ("größe.py:wörter", "größe.wörter"),
        (f"{230 * 'a'}.py:workload", f"{191 * 'a'}.workload"),
        ("e\u0301té·.py:e\u0301té·", "e_té_.e_té_"),
    ],
)
def test_every_name_has_a_label_that_can_be_sent(name: str, label: str) -> None:
    run = RUN.model_dump() | {"workload": FunctionName.parse(name).label}
    assert RunConfig.model_validate(run).workload == label


def test_a_file_s_name_may_have_a_hyphen(tmp_path: Path) -> None:
    file = write(tmp_path / "our-train.py")
    assert load(f"{file}:workload").source


def test_a_value_comes_from_this_machines_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "our_train.py", "api_key: str, nested: dict", width="4")
    said = {"api_key": "env:OUR_KEY", "nested": {"key": "env:OUR_KEY"}}
    monkeypatch.delenv("OUR_KEY", raising=False)
    with pytest.raises(ConfigError, match="OUR_KEY is not set on this machine"):
        load(f"{path}:workload", **said)
    monkeypatch.setenv("OUR_KEY", "sesame")
    load(f"{path}:workload", **said)
    [made] = sys.modules["our_train"].made
    assert made == {"api_key": "sesame", "nested": {"key": "sesame"}}
