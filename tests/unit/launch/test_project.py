"""Bringing the project to a machine: which files, in which folder, and how its environment is made."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from reading import fake_ssh
from smolcluster.errors import LaunchError
from smolcluster.launch import clean_projects
from smolcluster.launch.clean_projects import old_projects, remove_projects
from smolcluster.launch.host import Host
from smolcluster.launch.project import (
    CACHE,
    Project,
    bring,
    look_at_clone,
    packed,
    read_project,
)

CHECKOUT = Path(__file__).parents[3]
ODD_NAMES = (
    "two words",
    "it's",
    "new\nline",
    "[ab]",
    "-v",
    "ünï😀",
    "a\\b",
    os.fsdecode(b"\xff\xfe"),
)
LEFT_OUT = (
    *(".git/HEAD", ".venv/bin/python", ".uv/uv", "runs/edp-1/config.yaml", "wandb/x", "data/x"),
    *("tests/a.py", "notes.txt", "src/.DS_Store", "src/.venv/x", "logging/.env", "src/b.pyc"),
    *("src/a/__pycache__/b.pyc", "src/b.pyo", "src/smolcluster/data/MNIST/raw/t10k"),
)
OURS = (
    *(
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "uv.lock",
        "src/a.py",
        "src/runs/kept",
        "src/b.pyd",
    ),
    *("src/smolcluster/data/a.py", "src/_cache", "logging/promtail-worker-remote.yaml"),
    *(f"src/odd/{name}" for name in ODD_NAMES),
)
PI5 = Host("pi5", "pi@pi5")
UV = """#!/bin/sh
echo "$PWD $UV_PROJECT_ENVIRONMENT $* $INDEX" >> ~/asked
case $1 in venv)
  for new; do :; done
  mkdir -p "$new/bin" "$new/lib/python3.11/site-packages" && : > "$new/bin/python"
  echo /somewhere > ~/cached
  ln -s ~/cached "$new/lib/python3.11/site-packages/_editable_impl_smolcluster.pth"
esac
[ ! -e ~/said ] || { cat ~/said >&2; exit 2; }
"""


def write(path: Path, text: str = "x") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout with what is sent, what is not, and odd names."""
    root = tmp_path / "my checkout"
    for name in (*OURS, *LEFT_OUT):
        write(root / name)
    return root


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home of the other machine, whose `uv` notes what it is asked for."""
    home = fake_ssh(tmp_path, monkeypatch)
    write(home / ".local/bin/uv", UV)
    (home / ".local/bin/uv").chmod(0o755)
    return home


def brought(project: Project, torch: str = "cpu", *, is_allowed: bool = True) -> bool:
    return bring(PI5, project, torch, {"INDEX": "it's $HOME"}, is_allowed=is_allowed)


def at(there: Path, path: str) -> Path:
    return there / path.removeprefix("~/")


def cached(there: Path) -> list[str]:
    cache = at(there, CACHE)
    return sorted(str(path.relative_to(cache)) for path in cache.glob("*/*"))


# What is sent


def test_what_belongs_to_the_project_is_sent(tree: Path) -> None:
    assert set(read_project(tree).files) == set(OURS)
    (tree / "src/linked.py").symlink_to("a.py")
    (tree / "src/dangling").symlink_to("nowhere")
    assert set(read_project(tree).files) == {*OURS, "src/linked.py"}


def test_all_that_a_node_needs_of_this_checkout_is_sent() -> None:
    sent = set(read_project(CHECKOUT).files)
    assert {"pyproject.toml", "README.md", "LICENSE", "src/smolcluster/data/mnist.py"} <= sent
    assert {f"logging/promtail-{role}-remote.yaml" for role in ("server", "worker")} <= sent


def test_a_lock_that_names_wheels_of_this_machine_stays_here(tree: Path) -> None:
    (tree / "uv.lock").write_text('name = "torch"\nsource = { registry = "." }\n')
    assert "uv.lock" not in read_project(tree).files


@pytest.mark.parametrize(
    "change",
    [
        lambda root: write(root / "src" / "a.py", "y"),
        lambda root: (root / "src" / "a.py").rename(root / "src" / "c.py"),
        lambda root: (root / "src" / "a.py").unlink(),
        lambda root: write(root / "src" / "new", ""),
    ],
    ids=["contents", "name", "gone", "new"],
)
def test_every_change_of_what_is_sent_is_another_folder(
    tree: Path, change: Callable[[Path], None]
) -> None:
    before = read_project(tree)
    write(tree / "tests/a.py", "other")
    assert read_project(tree).folder("cpu") == before.folder("cpu")
    change(tree)
    after = read_project(tree)
    assert after.folder("cpu") != before.folder("cpu")
    assert after.environment("cpu") == before.environment("cpu")


def test_an_environment_is_that_of_its_requirements(tree: Path) -> None:
    found = [(project := read_project(tree)).environment("cpu"), project.environment("auto")]
    for name in ("pyproject.toml", "uv.lock"):
        write(tree / name, "other")
        found.append(read_project(tree).environment("cpu"))
    assert len(set(found)) == len(found)
    assert project.folder("cpu") != project.folder("auto"), "each has its own .venv"


def test_the_same_files_are_the_same_archive(tree: Path) -> None:
    once = packed(read_project(tree).files)
    for path in tree.rglob("*"):
        os.utime(path, (0, 0), follow_symlinks=False)
    assert packed(read_project(tree).files) == once


def test_a_file_that_cannot_be_read_is_one_line(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(LaunchError, match=r"pyproject.toml cannot be read: Permission denied"):
        read_project(tree)


# Bringing it


def test_exactly_these_files_are_brought_once(tree: Path, there: Path) -> None:
    project = read_project(tree)
    folder, environment = (
        at(there, path) for path in (project.folder("cpu"), project.environment("cpu"))
    )
    assert brought(project)
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files == set(OURS)
    assert (folder / ".venv").resolve() == environment
    assert (folder.parent / "latest").resolve() == folder
    pth = environment / "lib/python3.11/site-packages/_editable_impl_smolcluster.pth"
    found = folder / ".venv" / pth.relative_to(environment).parent / pth.read_text().strip()
    assert os.path.normpath(found) == str(folder / "src")
    assert (there / "cached").read_text() == "/somewhere\n", "uv's cache is as it was"
    asked = (there / "asked").read_text()
    venv, install = asked.splitlines()
    assert venv.startswith(f"{folder}  venv --quiet --relocatable --allow-existing {environment}.")
    assert install.endswith("/bin/python --torch-backend=cpu -e . it's $HOME")
    before = cached(there)
    assert not brought(project)
    assert not brought(project, is_allowed=False)
    assert ((there / "asked").read_text(), cached(there)) == (asked, before)
    write(tree / "src/a.py", "other")
    assert brought(read_project(tree))
    assert (there / "asked").read_text() == asked, "the environment is the same"
    assert (folder / "src/a.py").read_text() == "x", "runs of the code of before go on"
    assert len(cached(there)) == len(before) + 1


def test_pytorch_of_the_registry_is_that_of_the_lock(tree: Path, there: Path) -> None:
    project = read_project(tree)
    brought(project, "pypi")
    [_, sync] = (there / "asked").read_text().splitlines()
    assert f"{at(there, project.environment('pypi'))}." in sync
    assert sync.endswith(" sync --no-dev --quiet it's $HOME")


def test_an_environment_runs_the_code_of_the_project_by_which_it_is_started(there: Path) -> None:
    """With a real environment, and two versions of the project."""
    project = at(there, CACHE) / "projects"
    environment = at(there, CACHE) / "environments" / "e"
    base = Path(
        subprocess.run(
            [shutil.which("python3") or "python3", "-c", "import sys; print(sys._base_executable)"],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout.strip()
    )
    subprocess.run([base, "-m", "venv", "--without-pip", environment], check=True, timeout=60)
    [packages] = environment.glob("lib/python*/site-packages")
    (packages / "_smolcluster.pth").write_text("../../../../src\n")
    for version in ("one", "two"):
        write(project / version / "src/of_project.py", f"print('{version}')")
        (project / version / ".venv").symlink_to("../../environments/e")
        command = [".venv/bin/python", "-P", "-m", "of_project"]
        said = subprocess.check_output(command, cwd=project / version, text=True, timeout=60)
        assert said == f"{version}\n"


@pytest.mark.parametrize("what", ["code", "environment"])
def test_what_is_cut_leaves_nothing_and_is_made_by_the_next(
    tree: Path, there: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = read_project(tree)
    with monkeypatch.context() as patch:
        if what == "code":
            cut = SimpleNamespace(compress=lambda content, mtime: gzip_of(content, mtime)[:-9])
            patch.setattr("smolcluster.launch.project.gzip", cut)
        else:
            write(there / "said", "error: Request failed\n")
        with pytest.raises(LaunchError, match=r"pi5: .*(cannot be written|cannot make the env)"):
            brought(project)
    assert len(cached(there)) == {"code": 0, "environment": 2}[what]
    (there / "said").unlink(missing_ok=True)
    assert brought(project)
    assert len(cached(there)) == 3


def gzip_of(content: bytes, mtime: float) -> bytes:
    import gzip

    return gzip.compress(content, mtime=mtime)


def test_without_sync_what_is_missing_is_named(tree: Path, there: Path) -> None:
    with pytest.raises(LaunchError, match=r"pi5: has not this code nor this env.*project_dir"):
        brought(read_project(tree), is_allowed=False)
    assert cached(there) == []


def test_a_cache_that_cannot_be_written_is_one_line(tree: Path, there: Path) -> None:
    write(there / ".cache", "a file")
    with pytest.raises(LaunchError, match=r"pi5: ~/.cache.* cannot be written: "):
        brought(read_project(tree))


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "warning: slow\nerror: No solution found\n  cause: Because there is no torch for\n  it",
            "environment: error: No solution found cause: Because there is no torch for it (or take",
        ),
        (
            "  × No solution found\n  ╰─▶ Because torch==9 has no wheels\n      and you require it\n",
            "environment: No solution found Because torch==9 has no wheels and you require it (or take",
        ),
        (
            "error: Request failed\n  cause: dns error\n",
            "error: Request failed cause: dns error (set nodes.pi5.project_dir",
        ),
        ("Killed", "environment: Killed (set "),
    ],
)
@pytest.mark.parametrize("build", ["auto", "pypi"])
def test_what_uv_says_is_told_with_its_cause(
    tree: Path, there: Path, said: str, told: str, build: str
) -> None:
    """And that PyTorch may come from the registry, where it does not and is what fails."""
    write(there / "said", said)
    with pytest.raises(LaunchError, match="pi5: uv cannot make the environment: ") as error:
        brought(read_project(tree), build)
    assert (told if build == "auto" else told.replace("(or take", "(set")) in str(error.value)
    assert ("nodes.pi5.torch to pypi" in str(error.value)) == (build == "auto" and "torch" in said)


# A clone of a machine's owner


def test_a_clone_is_used_as_it_is_and_what_differs_is_counted(tree: Path, there: Path) -> None:
    clone = there / "my 'own' $(touch oops)"
    shutil.copytree(tree, clone)
    (clone / "src/smolcluster").mkdir(exist_ok=True)
    write(clone / ".venv/bin/python")
    (clone / ".venv/bin/python").chmod(0o755)
    project, folder = read_project(tree), f"~/{clone.name}"
    before = sorted(there.rglob("*"))
    assert look_at_clone(PI5, folder, project) == 0
    write(clone / "src/a.py", "theirs")
    (clone / "src/b.pyd").unlink()
    before.remove(clone / "src/b.pyd")
    assert look_at_clone(PI5, folder, project) == 2
    assert sorted(there.rglob("*")) == before, "nothing was sent or executed"


@pytest.mark.parametrize("lacks", [".venv", "src/smolcluster", ""])
def test_a_folder_that_is_no_clone_or_has_no_environment_is_refused(
    tree: Path, there: Path, lacks: str
) -> None:
    clone = there / "clone"
    for name in (".venv/bin/python", "src/smolcluster/a.py"):
        write(clone / name)
        (clone / name).chmod(0o755)
    shutil.rmtree(clone / lacks)
    with pytest.raises(LaunchError, match=r"pi5: ~/clone is not a clone .*project_dir out"):
        look_at_clone(PI5, "~/clone", read_project(tree))


# What nobody needs any more


@dataclass
class Cache:
    """A machine's cache."""

    there: Path

    def make(self, project: str, environment: str, *, is_old: bool = True) -> None:
        cache = at(self.there, CACHE)
        for path in (cache / "projects" / project, cache / "environments" / environment):
            path.mkdir(parents=True, exist_ok=True)
        (cache / "projects" / project / ".venv").symlink_to(f"../../environments/{environment}")
        for path in (cache / "projects" / project, cache / "environments" / environment):
            os.utime(path, (0, 0) if is_old else None)


@pytest.fixture
def cache(there: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cache]:
    monkeypatch.setattr(clean_projects, "_hosts", lambda _root: [PI5, PI5])
    yield Cache(there)


@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="of Linux")
def test_old_code_goes_unless_it_is_the_newest_or_a_process_uses_it(
    cache: Cache, there: Path
) -> None:
    one, two, three, four, five = (f"{number}{os.getpid():015d}" for number in range(1, 6))
    for name, environment in ((one, "e1"), (two, "e1"), (three, "e2"), (four, "e3")):
        cache.make(name, environment)
    cache.make(five, "e4", is_old=False)
    projects = at(there, CACHE) / "projects"
    (projects / "latest").symlink_to(two)
    user = subprocess.Popen(["sleep", "600"], cwd=projects / three)
    try:
        [found] = old_projects(there).values()
        assert set(found) == {f"projects/{one}", f"projects/{four}", "environments/e3"}
        assert all(size > 0 for size in found.values())
        later = subprocess.Popen(["sleep", "600"], cwd=projects / four)
        try:
            assert remove_projects({PI5: found}) == []
        finally:
            later.kill()
            later.wait(60)
    finally:
        user.kill()
        user.wait(60)
    assert set(cached(there)) == {
        *(f"projects/{each}" for each in (two, three, four, five, "latest")),
        *("environments/e1", "environments/e2", "environments/e3", "environments/e4"),
    }


def test_a_machine_without_code_or_out_of_reach_has_nothing_to_remove(
    cache: Cache, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clean_projects, "_hosts", lambda _root: [PI5, Host("pi4", "cut")])
    assert old_projects(there) == {}
    [stays] = remove_projects({Host("pi4", "cut"): {"projects/1": 1}})
    assert stays.startswith("pi4: projects/1 stays: ")
