"""Bringing the project to a machine: which files, when, and how its environment is made."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from reading import fake_ssh
from smolcluster.errors import LaunchError
from smolcluster.launch.host import Host
from smolcluster.launch.sync import (
    ENVIRONMENT_MARKER,
    MARKER,
    NOT_SENT,
    SENDING,
    environment_digest,
    make_environment,
    rsync_command,
    send_code,
    sent_files,
    tree_digest,
)

needs_rsync = pytest.mark.skipif(shutil.which("rsync") is None, reason="rsync is not installed")
ODD_NAMES = ("two words", "it's", "new\nline", "*.pyx", "[ab]", "-v", "ünï😀", "a\\b", b"\xff\xfe")
LEFT_OUT = (
    *(".git/HEAD", ".git/objects/ab", "sub/.git/HEAD", ".venv/bin/python", ".uv/uv", MARKER),
    *("runs/edp-1/config.yaml", "wandb/x", "data/x", "dist/x.whl", ".DS_Store", "sub/.DS_Store"),
    *("src/a/__pycache__/b.pyc", "src/b.pyc", "src/b.pyo", ".mypy_cache/x", "sub/.ruff_cache/x"),
    *(".hypothesis/x", "src/smolcluster/data/MNIST/raw/t10k", "sub/.venv/pyvenv.cfg"),
)
SENT = (
    *("pyproject.toml", "src/a.py", "src/runs/kept", "sub/wandb/kept", "src/smolcluster/data/a.py"),
    *("sub/dist/kept", ".gitignore", ".github/kept", "b.pyd", "_cache", "x.mypy_cache", ".venvs/a"),
    *("data.txt", "src/data/MNIST/kept", "runs.txt", "sub/.smolcluster-versions"),
)


def write(path: Path, text: str = "x") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A project with what is sent, what is not, and odd names."""
    root = tmp_path / "my project"
    for name in (*SENT, *LEFT_OUT, *(f"odd/{name!s}" for name in ODD_NAMES[:-1])):
        write(root / name)
    Path(os.fsdecode(os.fsencode(root) + b"/odd/" + b"\xff\xfe")).write_text("x")
    (root / "linked").symlink_to("src")
    (root / "dangling").symlink_to("nowhere")
    (root / "src" / "own.py").symlink_to("a.py")
    write(root / "pyproject.toml", '[project]\nname = "smolcluster"\n')
    return root


def files_in(root: Path) -> set[str]:
    return {
        str(path.relative_to(root))
        for path in root.rglob("*")
        if path.is_symlink() or not path.is_dir()
    }


def test_what_belongs_to_the_project_is_sent(tree: Path) -> None:
    sent = list(sent_files(tree))
    assert len(sent) == len(set(sent))
    links = {"linked", "dangling", "src/own.py"}
    odd = {f"odd/{os.fsdecode(name)}" for name in ODD_NAMES}
    assert set(sent) == {*SENT, *links, *odd}
    assert files_in(tree) - set(sent) == set(LEFT_OUT)


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home of the other machine."""
    return fake_ssh(tmp_path, monkeypatch)


@needs_rsync
@pytest.mark.parametrize(
    "project_dir", ["~/smolcluster", "~/my 'own' $(touch oops) \"x\"; \\ folder"]
)
def test_rsync_sends_exactly_these_files(tree: Path, there: Path, project_dir: str) -> None:
    project = there / project_dir[2:]
    host = Host("pi5", "pi@pi5")
    send_code(tree, host, project_dir, "1")
    assert files_in(project) == {*sent_files(tree), MARKER}
    assert str((project / "linked").readlink()) == "src"
    assert list(there.iterdir()) == [project], "nothing was executed"
    assert tree_digest(project) == tree_digest(tree)


@needs_rsync
def test_what_is_gone_here_goes_there_and_what_is_not_sent_stays(tree: Path, there: Path) -> None:
    project, host = there / "p", Host("pi5", "pi@pi5")
    send_code(tree, host, "~/p", "1")
    kept = ("runs/edp-1/config.yaml", ".venv/bin/python", "data/x", "src/a.pyc", "sub/.git/HEAD")
    for name in kept:
        write(project / name, "theirs")
    write(project / "src" / "gone.py")
    (tree / "src" / "a.py").write_text("new contents")
    send_code(tree, host, "~/p", "2")
    assert not (project / "src" / "gone.py").exists()
    assert (project / "src" / "a.py").read_text() == "new contents"
    assert [(project / name).read_text() for name in kept] == ["theirs"] * len(kept)
    assert (project / MARKER).read_text() == "2"
    assert not (project / SENDING).exists()


def test_what_is_there_already_is_not_sent(
    tree: Path, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(there / "p" / MARKER, "1")
    monkeypatch.setattr("smolcluster.launch.sync.rsync_command", lambda *_: pytest.fail("rsync"))
    send_code(tree, Host("pi5", "pi5"), "~/p", "1")


@needs_rsync
def test_a_broken_sending_is_taken_up_again(
    tree: Path, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until all files are there, nothing says that they are."""
    host, project = Host("pi5", "pi5"), there / "p"
    send_code(tree, host, "~/p", "1")
    with monkeypatch.context() as patch:
        patch.setattr("smolcluster.launch.sync.rsync_command", lambda *_: ["sh", "-c", "exit 23"])
        with pytest.raises(LaunchError, match="pi5: rsync failed: exit code 23"):
            send_code(tree, host, "~/p", "2")
    assert not (project / MARKER).exists()
    (project / "pyproject.toml").unlink()
    send_code(tree, host, "~/p", "2")
    assert (project / MARKER).read_text() == "2"


@pytest.mark.parametrize("foreign", ["thesis.tex", ".hidden", "pyproject.toml"])
def test_a_folder_of_something_else_is_left_alone(
    tmp_path: Path, tree: Path, foreign: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "there"
    write(folder / foreign, 'name = "other"\n')
    monkeypatch.setattr("smolcluster.launch.sync.rsync_command", lambda *_: pytest.fail("rsync"))
    with pytest.raises(LaunchError, match=r"pi5: .*there holds something else .* nodes\.pi5\.pro"):
        send_code(tree, Host("pi5"), str(folder), "1")
    assert [path.name for path in folder.iterdir()] == [foreign]


@pytest.mark.parametrize("own", [("pyproject.toml", 'name = "smolcluster"\n'), (SENDING, ""), None])
def test_an_empty_folder_and_a_clone_are_taken(
    tmp_path: Path, tree: Path, own: tuple[str, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "there" / "deep"
    if own:
        write(folder / own[0], own[1])
    monkeypatch.setattr("smolcluster.launch.sync.rsync_command", lambda *_: ["true"])
    send_code(tree, Host("pi5"), str(folder), "1")
    assert (folder / MARKER).read_text() == "1"


@pytest.mark.parametrize("own", ["src/notes.py", "mydata/digits.bin"])
def test_a_clone_with_files_of_its_own_is_left_alone(
    tmp_path: Path, tree: Path, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with those that git ignores, and where git cannot tell."""
    monkeypatch.setattr("smolcluster.launch.sync.rsync_command", lambda *_: ["true"])
    clone = cloned(tmp_path / "there")
    write(clone / own, "weeks of work")
    with pytest.raises(LaunchError, match="a clone with files of its own"):
        send_code(tree, Host("pi5"), str(clone), "1")
    assert (clone / own).read_text() == "weeks of work"
    (clone / own).unlink()
    write(clone / "runs/edp-1/config.yaml")
    write(clone / ".venv/bin/python")
    send_code(tree, Host("pi5"), str(clone), "1")
    assert (clone / MARKER).read_text() == "1"


def test_a_clone_that_git_cannot_read_is_left_alone(tmp_path: Path, tree: Path) -> None:
    clone = cloned(tmp_path / "there")
    (clone / ".git/HEAD").unlink()
    with pytest.raises(LaunchError, match="or git there cannot tell"):
        send_code(tree, Host("pi5"), str(clone), "1")


def cloned(folder: Path) -> Path:
    """A clone of a small project of our name, which ignores `mydata/` and what is not sent."""
    write(folder / "pyproject.toml", 'name = "smolcluster"\n')
    write(folder / ".gitignore", "mydata/\nruns/\n.venv/\n")
    write(folder / "src/train.py")
    git = ["git", "-C", str(folder), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"]):
        subprocess.run([*git, *command], check=True, timeout=60)
    return folder


@needs_rsync
def test_what_is_a_machine_s_own_stays(tree: Path, there: Path) -> None:
    write(there / "p/pyproject.toml", 'name = "smolcluster"\n')
    write(there / "p/experiments/edp-1/model")
    write(there / "p/old.py")
    send_code(tree, Host("pi5", "pi5"), "~/p", "1", ["/experiments"])
    assert (there / "p/experiments/edp-1/model").exists()
    assert not (there / "p/old.py").exists()


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path, tree: Path) -> None:
    write(tmp_path / "file")
    with pytest.raises(LaunchError, match=r"pi5: .*file/p cannot be used: "):
        send_code(tree, Host("pi5"), str(tmp_path / "file" / "p"), "1")


def test_without_rsync_there_is_a_way_out(
    tree: Path, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smolcluster.launch.sync.rsync_command", lambda *_: ["/no/such/rsync"])
    with pytest.raises(LaunchError, match="rsync is not installed here: install it, or use --no-s"):
        send_code(tree, Host("pi5", "pi5"), "~/p", "1")


@needs_rsync
def test_a_machine_that_goes_away_is_named(
    tree: Path, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LaunchError, match=r"pi5 \(cut\): it does not answer"):
        send_code(tree, Host("pi5", "cut"), "~/p", "1")
    command = rsync_command(tree, Host("pi5", "cut"), "~/p")
    with monkeypatch.context() as patch:
        patch.setattr("smolcluster.launch.sync.rsync_command", lambda *_: command)
        with pytest.raises(LaunchError, match=r"pi5 \(pi5\): it does not answer"):
            send_code(tree, Host("pi5", "pi5"), "~/p", "1")


@pytest.mark.parametrize("destination", ["ssh://pi@pi5:2222", "fe80::1%eth0", "pi@[::1]", "pi5"])
def test_rsync_never_reads_the_destination(tmp_path: Path, there: Path, destination: str) -> None:
    *_, dashes, source, target = rsync_command(tmp_path, Host("pi5", destination), "~/p")
    assert (dashes, source, target) == ("--", f"{tmp_path}/", "env:./")


# Versions


@pytest.mark.parametrize(
    "change",
    [
        lambda root: write(root / "src" / "a.py", "y"),
        lambda root: (root / "src" / "a.py").rename(root / "src" / "b.py"),
        lambda root: (root / "src" / "a.py").unlink(),
        lambda root: write(root / "src" / "new", ""),
        lambda root: ((root / "linked").unlink(), (root / "linked").symlink_to("odd")),
        lambda root: ((root / "dangling").unlink(), (root / "dangling").symlink_to("elsewhere")),
        lambda root: (root / "other").symlink_to("src"),
    ],
    ids=["contents", "name", "gone", "new", "link to a folder", "link", "new link to a folder"],
)
def test_the_version_changes_with_what_is_sent(tree: Path, change: Callable[[Path], None]) -> None:
    before = tree_digest(tree)
    assert tree_digest(tree) == before
    change(tree)
    assert tree_digest(tree) != before


def test_contents_and_names_are_told_apart(tmp_path: Path) -> None:
    write(tmp_path / "one" / "a", "b\0001\0c")
    write(tmp_path / "two" / "a", "")
    write(tmp_path / "two" / "b", "c")
    assert tree_digest(tmp_path / "one") != tree_digest(tmp_path / "two")


def test_the_version_does_not_depend_on_what_stays_here(tree: Path, tmp_path: Path) -> None:
    before = tree_digest(tree)
    for name in LEFT_OUT:
        write(tree / name, "changed")
    (tree / "src" / "a.py").touch()
    assert tree_digest(tree) == before
    tree.rename(tmp_path / "elsewhere")
    assert tree_digest(tmp_path / "elsewhere") == before


def test_a_file_that_vanishes_is_one_line(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smolcluster.launch.sync.sent_files", lambda _root: iter(["gone"]))
    with pytest.raises(LaunchError, match="gone cannot be read: No such file"):
        tree_digest(tree)


def test_no_pattern_leaves_out_the_source() -> None:
    root = Path(__file__).parents[3]
    sent = set(sent_files(root))
    assert {"pyproject.toml", "src/smolcluster/train.py", "src/smolcluster/data/mnist.py"} <= sent
    assert not any(name.split("/")[0] in (".git", ".venv", "runs") for name in sent)
    assert all("/" not in pattern.strip("/") or pattern.startswith("/") for pattern in NOT_SENT)


# Environments


def test_an_environment_is_that_of_its_requirements(tmp_path: Path) -> None:
    digests = [environment_digest(tmp_path, "auto"), environment_digest(tmp_path, "cpu")]
    for name, text in (("pyproject.toml", "a"), ("pyproject.toml", "b"), ("uv.lock", "a")):
        write(tmp_path / name, text)
        digests.append(environment_digest(tmp_path, "auto"))
    write(tmp_path / "src" / "a.py")
    assert environment_digest(tmp_path, "auto") == digests[-1]
    assert len(set(digests)) == len(digests)


@pytest.fixture
def uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `uv` that notes what it was asked for; returns its notes."""
    folder, notes = tmp_path / "bin", tmp_path / "notes"
    write(folder / "uv", f'#!/bin/sh\necho "$*" "$INDEX" >> {notes}\nmkdir -p .venv\ntrue\n')
    (folder / "uv").chmod(0o755)
    (tmp_path / "p").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return notes


def test_an_environment_is_made_once(tmp_path: Path, uv: Path) -> None:
    project, env = str(tmp_path / "p"), {"INDEX": "it's $HOME"}
    make_environment(Host("pi5"), project, "cpu", "1", env)
    made = uv.read_text().splitlines()
    assert made == [
        "venv --quiet .venv it's $HOME",
        "pip install --quiet --python .venv/bin/python --torch-backend=cpu -e . it's $HOME",
    ]
    assert (tmp_path / "p" / ENVIRONMENT_MARKER).read_text() == "1"
    make_environment(Host("pi5"), project, "cpu", "1", env)
    assert uv.read_text().splitlines() == made
    make_environment(Host("pi5"), project, "pypi", "2", {})
    assert uv.read_text().splitlines()[2:] == ["sync --no-dev --quiet "]


def test_what_uv_says_is_told(tmp_path: Path, uv: Path) -> None:
    said = "  × No solution found\\nerror: no torch for this machine\\nhint: buy another"
    (tmp_path / "bin" / "uv").write_text(f"#!/bin/sh\nprintf '{said}\\n' >&2; exit 2\n")
    write(tmp_path / "p" / ENVIRONMENT_MARKER, "1")
    with pytest.raises(LaunchError, match=r"pi5: uv cannot make the .*: error: no torch for this"):
        make_environment(Host("pi5"), str(tmp_path / "p"), "auto", "2", {})
    assert not (tmp_path / "p" / ENVIRONMENT_MARKER).exists()
