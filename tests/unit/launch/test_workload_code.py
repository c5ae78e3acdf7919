"""What is seen of a user's workload without running it, and what of its code is sent."""

import io
import subprocess
import tarfile
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from smolcluster.configs.begun import brought_workload
from smolcluster.configs.function_name import known_here
from smolcluster.configs.spec import get_algorithm
from smolcluster.errors import ConfigError, LaunchError
from smolcluster.launch import workload_code
from smolcluster.launch.host import Host
from smolcluster.launch.requests import request_of, resolved
from smolcluster.launch.workload_code import (
    check_source,
    code_of,
    packages_of,
    put_code,
)

SOURCE = """
raise SystemExit("this file must not be run")
import functools
from elsewhere import imported
def workload(width, depth=2, *, rate, name="x"): ...
def typed(width: int, rate: float = 1.0, *, kind: Literal["a", "b"] = "a", sizes: list[int] | None = None,
          device: torch.device = None, later: "int" = 1, odd: dict[int] = None,
          named: Optional[str] = None): ...
def takes_any(width=1, **others): ...
@functools.wraps(print)
def decorated(anything): ...
made = functools.partial(workload, 3)
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "train.py"
    file.write_text(SOURCE)
    return file


@pytest.mark.parametrize(
    ("function", "args"),
    [
        ("workload", {"width": 1, "rate": 1}),
        ("workload", {"width": "wide", "depth": 1, "rate": 1, "name": "y"}),
        ("typed", {"width": 1, "rate": 2, "kind": "b", "sizes": [1], "named": None}),
        ("typed", {"width": 1, "sizes": None, "device": "cpu", "later": "x", "odd": 3}),
        ("typed", {"width": "env:WIDTH", "sizes": ["env:SIZE"]}),
        ("takes_any", {"more": 1}),
        ("decorated", {"other": 1}),
        ("made", {"depth": 1}),
        ("imported", {}),
    ],
)
def test_what_may_be_right_is_not_refused(file: Path, function: str, args: dict[str, Any]) -> None:
    check_source(known_here(f"{file}:{function}"), args)


@pytest.mark.parametrize(
    ("function", "args", "words"),
    [
        ("workload", {"width": 1}, "needs an argument: set workload_args.rate"),
        (
            "workload",
            {"width": 1, "rate": 1, "dept": 1},
            "workload_args.dept is no argument of .*mean depth",
        ),
        ("workloda", {}, "train.py has no workloda; did you mean workload"),
        ("typed", {"width": "wide"}, "workload_args.width is 'wide', .*valid integer"),
        ("typed", {"width": 1, "kind": "c"}, "workload_args.kind is 'c', .*'a' or 'b'"),
        ("typed", {"width": 1, "sizes": 3}, "workload_args.sizes is 3, .*valid (array|list)"),
        ("typed", {"width": 1, "named": 3}, "workload_args.named is 3, .*valid string"),
    ],
)
def test_what_is_wrong_for_sure_is_refused(
    file: Path, function: str, args: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        check_source(known_here(f"{file}:{function}"), args)


def test_a_file_that_is_no_python_names_its_line(file: Path) -> None:
    file.write_text("\n\ndef workload(:\n")
    with pytest.raises(ConfigError, match=r"train\.py, line 3"):
        check_source(known_here("train.py:workload"), {})


def asked(*overrides: str, **stated: Any) -> Any:
    spec = get_algorithm("edp")
    command = next(each for each in spec.commands if each.name == "edp")
    values: dict[str, Any] = {"num_workers": 1, "config": None, "train_config": None} | stated
    return request_of(spec, command, local=True, overrides=overrides, **values)


def test_the_function_is_the_same_wherever_it_is_named(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ("workload_args.width=1", "workload_args.rate=2")
    training = file.with_name("train.yaml")
    training.write_text("workload: train.py:workload\nworkload_args: {width: 1, rate: 2}\n")
    by_flag = asked(*args, workload="train.py:workload")
    by_file = asked(train_config=str(training))
    by_override = asked(*args, "workload=train.py:workload")
    for request in (by_flag, by_file, by_override):
        named = resolved(request, local=True)
        assert named.request.workload == f"{file}:workload"
        assert named.settings.train.workload_args == {"width": 1, "rate": 2}
    assert by_flag.train_config == "workload"
    monkeypatch.chdir("/")
    for request in (by_flag, by_override):
        with pytest.raises(ConfigError, match=r"train\.py:workload'?: there is no such file"):
            resolved(request, local=True)
    with pytest.raises(ConfigError, match=r"--workload is 'train\.py', must be FILE"):
        resolved(asked(workload="train.py"), local=True)


def names_in(packed: bytes) -> set[str]:
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        return set(tar.getnames())


def write(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"# {name}\n")


OTHERS = (".hidden/a.py", "__pycache__/a.py", "runs/a.txt", "venv/pyvenv.cfg", "venv/a.py", "b.pyc")


def test_of_a_folder_all_but_what_is_no_code_is_sent(tmp_path: Path) -> None:
    write(tmp_path, "train.py", "data/points.csv", "model.py", *OTHERS)
    (tmp_path / "away").symlink_to("/nowhere")
    code = code_of(f"{tmp_path}/train.py:workload")
    assert code is not None
    assert names_in(code.packed) == {"train.py", "model.py", "data/points.csv"}
    assert (code.name, code.num_files) == ("train.py:workload", 3)
    again = code_of(f"{tmp_path}/train.py:workload")
    assert again == code, "the same files are the same bytes"


def test_of_a_repository_what_git_tracks_is_sent_and_new_python_files(tmp_path: Path) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    write(tmp_path, "mine/train.py", "mine/tracked.csv", "mine/gone.py", "beside.py")
    (tmp_path / ".gitignore").write_text("ignored*\n")
    subprocess.run([*git, "add", "-A"], check=True)
    write(tmp_path, "mine/new.py", "mine/new.csv", "mine/ignored.py")
    (tmp_path / "mine/gone.py").unlink()
    (tmp_path / "mine/train.py").write_text("# changed since\n")
    code = code_of(f"{tmp_path}/mine/train.py:workload")
    assert code is not None
    assert names_in(code.packed) == {"train.py", "tracked.csv", "new.py"}
    with tarfile.open(fileobj=io.BytesIO(code.packed)) as tar:
        member = tar.extractfile("train.py")
        assert member is not None
        assert member.read() == b"# changed since\n"


@pytest.mark.parametrize("in_git", [True, False])
def test_python_files_of_submodules_and_linked_folders_are_sent(
    tmp_path: Path, *, in_git: bool
) -> None:
    settings = ("user.name=a", "user.email=a@b", "protocol.file.allow=always")
    git = ["git", *(word for each in settings for word in ("-c", each)), "-C"]
    other, mine, data = tmp_path / "other", tmp_path / "mine", tmp_path / "data"
    write(other, "model.py", "deep/layer.py", "large.bin")
    write(data, "points.csv")
    write(mine, "train.py")
    for name, target in {"linked": other, "data": data, "around": mine}.items():
        (mine / name).symlink_to(target)
    expected = {"train.py", "linked/model.py", "linked/deep/layer.py"}
    if in_git:
        for root in (other, mine):
            subprocess.run([*git, str(root), "init", "-q"], check=True)
            subprocess.run([*git, str(root), "add", "-A"], check=True)
            subprocess.run([*git, str(root), "commit", "-qm", "first"], check=True)
        submodule = ("submodule", "--quiet", "add", str(other), "within")
        subprocess.run([*git, str(mine), *submodule], check=True)
        write(mine, "within/new.py")
        within = {f"within/{name}" for name in ("model.py", "deep/layer.py", "new.py")}
        expected |= {".gitmodules", *within}
    code = code_of(f"{mine}/train.py:workload")
    assert code is not None
    assert names_in(code.packed) == expected


def test_a_file_that_git_ignores_is_sent_with_its_folder(tmp_path: Path) -> None:
    subprocess.run(["git", "-C", str(tmp_path), "init", "-q"], check=True)
    (tmp_path / ".gitignore").write_text("scratch/\n")
    write(tmp_path, "scratch/train.py", "scratch/model.py", "beside.py")
    code = code_of(f"{tmp_path}/scratch/train.py:workload")
    assert code is not None
    assert names_in(code.packed) == {"train.py", "model.py"}


def test_a_git_that_does_not_answer_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "train.py")
    hangs = Mock(side_effect=subprocess.TimeoutExpired("git", 9))
    monkeypatch.setattr(workload_code, "run_here", hangs)
    with pytest.raises(ConfigError, match="git has not listed the files"):
        code_of(f"{tmp_path}/train.py:workload")


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("ours/deep/train.py:workload", "ours/deep/train.py:workload"),
        ("ours.deep.train:workload", "./ours.deep.train:workload"),
    ],
)
def test_a_package_is_sent_with_what_lies_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, seen: str
) -> None:
    write(tmp_path, "ours/__init__.py", "ours/deep/__init__.py", "ours/deep/train.py", "others.py")
    monkeypatch.chdir(tmp_path)
    code = code_of(known_here(name).text)
    assert code is not None
    assert (code.name, code.num_files) == (seen, 4)


def test_of_an_installed_module_nothing_is_sent() -> None:
    assert code_of("of.somebody:workload") is None


def test_more_than_code_is_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "train.py", "images.bin")
    monkeypatch.setattr(workload_code, "MOST_NBYTES", 15)
    with pytest.raises(ConfigError, match=r"holds more than 15 B, .* git repository"):
        code_of(f"{tmp_path}/train.py:workload")


def test_a_machine_has_the_code_that_was_sent_last_and_no_other(tmp_path: Path) -> None:
    write(tmp_path / "mine", "train.py", "deep/model.py")
    code = code_of(f"{tmp_path}/mine/train.py:workload")
    assert code is not None
    run = tmp_path / "a b" / "run"
    assert brought_workload(run) is None
    there = run / "launch/workload"
    write(there, "of_before.py")
    put_code(Host("pi5"), str(run), code.packed, code.name)
    assert brought_workload(run) == f"{there}/train.py:workload"
    (there / "deep/model.py").write_text("# not what was brought\n")
    assert brought_workload(run) is None
    put_code(Host("pi5"), str(run), code.packed, code.name)
    found = {str(path.relative_to(there)) for path in there.rglob("*.py")}
    assert found == {"train.py", "deep/model.py"}
    assert (there / "deep/model.py").read_text() == "# deep/model.py\n"


def test_code_that_does_not_arrive_whole_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "mine", "train.py")
    code = code_of(f"{tmp_path}/mine/train.py:workload")
    assert code is not None
    run = tmp_path / "run"
    put_code(Host("pi5"), str(run), code.packed, code.name)
    monkeypatch.setattr(workload_code, "_digest", lambda _: "of what was cut")
    with pytest.raises(LaunchError, match="pi5: the workload's code cannot be written"):
        put_code(Host("pi5"), str(run), code.packed[:-40], code.name)
    assert brought_workload(run) == f"{run}/launch/workload/train.py:workload"
    assert {each.name for each in (run / "launch").iterdir()} == {"workload", "workload.name"}


def test_the_packages_are_those_that_no_machine_can_do_without(tmp_path: Path) -> None:
    file = tmp_path / "ours/train.py"
    write(tmp_path, "ours/__init__.py", "ours/unused.py", "beside.py", "deep/model.py")
    (tmp_path / "ours/unused.py").write_text("import unused_package\n")
    (tmp_path / "beside.py").write_text("from deep import model\n")
    (tmp_path / "deep/model.py").write_text("import einops\nimport beside\n")
    (tmp_path / "ours/sizes.py").write_text("import peft.tuners\n")
    file.write_text(
        "import os, torch, beside\nfrom smolcluster import Workload\nfrom .sizes import WIDTH\n"
        "from torchvision.models import resnet18\nfrom . import sizes\nimport unused_as_name as ours\n"
        "try:\n    import flash_attn\nexcept ImportError: ...\ndef workload():\n    import wandb\n"
    )
    name = known_here(f"{file}:workload")
    assert packages_of(name) == ["einops", "peft", "torch", "torchvision", "unused_as_name"]
