"""Bringing the project to a machine: which files, which never, and how its environment is made."""

import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from reading import fake_ssh
from smolcluster.errors import LaunchError
from smolcluster.launch.host import Host
from smolcluster.launch.manifest import (
    BACKUP,
    NOT_SENT,
    SENDING,
    SENT,
    read_tree,
    sent_files,
    without,
)
from smolcluster.launch.sync import (
    ENVIRONMENT_MARKER,
    environment_digest,
    look,
    make_environment,
    rsync_command,
    send_code,
)

needs_rsync = pytest.mark.skipif(shutil.which("rsync") is None, reason="rsync is not installed")
ODD_NAMES = ("two words", "it's", "new\nline", "*.pyx", "[ab]", "-v", "ünï😀", "a\\b", b"\xff\xfe")
LEFT_OUT = (
    *(".git/HEAD", ".git/objects/ab", "sub/.git/HEAD", ".venv/bin/python", ".uv/uv", SENT),
    *("runs/edp-1/config.yaml", "wandb/x", "data/x", "dist/x.whl", ".DS_Store", "sub/.DS_Store"),
    *("src/a/__pycache__/b.pyc", "src/b.pyc", "src/b.pyo", ".mypy_cache/x", "sub/.ruff_cache/x"),
    *(".hypothesis/x", "src/smolcluster/data/MNIST/raw/t10k", "sub/.venv/pyvenv.cfg"),
    *("torch-2.15.0+cpu-cp311-linux.whl", "torchvision-0.29.2+cpu-cp311-linux.whl"),
)
OURS = (
    *("pyproject.toml", "src/a.py", "src/runs/kept", "sub/wandb/kept", "src/smolcluster/data/a.py"),
    *("sub/dist/kept", ".gitignore", ".github/kept", "b.pyd", "_cache", "x.mypy_cache", ".venvs/a"),
    *("data.txt", "src/data/MNIST/kept", "runs.txt", "sub/.smolclusters"),
)


def write(path: Path, text: str = "x") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A project with what is sent, what is not, and odd names."""
    root = tmp_path / "my project"
    for name in (*OURS, *LEFT_OUT, *(f"odd/{name!s}" for name in ODD_NAMES[:-1])):
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
    assert set(sent) == {*OURS, *links, *odd}
    assert files_in(tree) - set(sent) == set(LEFT_OUT)


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home of the other machine."""
    return fake_ssh(tmp_path, monkeypatch)


PI5 = Host("pi5", "pi@pi5")


def send(
    tree: Path,
    host: Host = PI5,
    project_dir: str = "~/p",
    kept: Sequence[str] = (),
    *,
    overwrite: bool = False,
) -> str:
    """What a launch does with code; returns where replaced files are."""
    found = look(host, project_dir, without(read_tree(tree), kept), overwrite=overwrite)
    return send_code(tree, host, project_dir, found, kept)


def changed_at(root: Path) -> dict[str, int]:
    return {name: (root / name).lstat().st_ctime_ns for name in files_in(root)}


def broken(*_: object) -> list[str]:
    """In place of rsync's command."""
    return ["sh", "-c", "exit 23"]


@needs_rsync
@pytest.mark.parametrize(
    "project_dir", ["~/smolcluster", "~/my 'own' $(touch oops) \"x\"; \\ folder"]
)
def test_rsync_sends_exactly_these_files(tree: Path, there: Path, project_dir: str) -> None:
    project = there / project_dir[2:]
    send(tree, PI5, project_dir)
    assert files_in(project) == {*sent_files(tree), SENT}
    assert str((project / "linked").readlink()) == "src"
    assert list(there.iterdir()) == [project], "nothing was executed"
    assert read_tree(project) == read_tree(tree)
    found = look(PI5, project_dir, read_tree(tree), overwrite=False)
    assert found.is_none, "each name is found again"
    assert found.is_recorded


@needs_rsync
def test_what_was_sent_is_replaced_and_deleted_and_nothing_else(tree: Path, there: Path) -> None:
    project = there / "p"
    write(tree / "old/deep/gone.py")
    write(tree / "old/edited.py")
    write(tree / "src/emptied/gone.py")
    send(tree)
    own = ("runs/edp-1/config.yaml", ".venv/bin/python", "data_mine/x", "src/a.pyc", "src/mine.py")
    for name in own:
        write(project / name, "theirs")
    write(project / "old/edited.py", "theirs")
    write(project / "src/emptied/__pycache__/gone.pyc")
    (project / "b.pyd").unlink()
    shutil.rmtree(tree / "old")
    shutil.rmtree(tree / "src/emptied")
    stat = (tree / "src/a.py").stat()
    write(tree / "src/a.py", "y")
    os.utime(tree / "src/a.py", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert send(tree) == ""
    assert (project / "src/a.py").read_text() == "y", "of the same size, within the same second"
    assert not (project / "old/deep").exists()
    assert not (project / "src/emptied").exists()
    assert (project / "b.pyd").exists()
    kept = (*own, "old/edited.py")
    assert [(project / name).read_text() for name in kept] == ["theirs"] * len(kept)
    assert not (project / SENDING).exists()


@needs_rsync
@pytest.mark.parametrize("has_changed", [False, True], ids=["ours unchanged", "ours changed"])
def test_what_somebody_has_edited_there_is_not_replaced(
    tree: Path, there: Path, has_changed: bool
) -> None:
    """Neither what was sent, nor what is new here, nor what has become something else; twice."""
    send(tree)
    project = there / "p"
    write(project / "src/a.py", "theirs")
    write(project / "src/new.py", "theirs")
    (project / "linked").unlink()
    (project / "linked").symlink_to("sub")
    write(tree / "src/new.py")
    if has_changed:
        write(tree / "src/a.py", "ours")
    before = changed_at(project)
    for _ in range(2):
        with pytest.raises(LaunchError, match=r"pi5: ~/p has 3 files") as refused:
            send(tree)
        for part in ("linked", "src/a.py", "src/new.py", "--overwrite", f"~/p/{BACKUP}"):
            assert part in str(refused.value)
        assert changed_at(project) == before
    backups = set()
    for words in ("theirs", "theirs again"):
        write(project / "src/a.py", words)
        backup = send(tree, overwrite=True)
        assert (there / backup[2:] / "src/a.py").read_text() == words
        backups.add(backup)
    assert len(backups) == 2
    assert read_tree(project) == read_tree(tree)
    assert send(tree) == ""


@needs_rsync
def test_a_folder_or_a_link_in_the_place_of_a_file_is_kept_too(tree: Path, there: Path) -> None:
    send(tree)
    project = there / "p"
    (project / "src").rename(there / "elsewhere")
    (project / "src").symlink_to(there / "elsewhere")
    (project / "b.pyd").unlink()
    write(project / "b.pyd/thesis.tex", "theirs")
    with pytest.raises(LaunchError, match=r"b\.pyd"):
        send(tree)
    backup = there / send(tree, overwrite=True)[2:]
    assert (backup / "b.pyd/thesis.tex").read_text() == "theirs"
    assert (there / "elsewhere/a.py").exists()
    assert read_tree(project) == read_tree(tree)


@needs_rsync
def test_a_folder_of_ours_may_become_a_file_and_a_file_a_folder(tree: Path, there: Path) -> None:
    send(tree)
    for old, new in (("sub/dist/kept", "sub/dist"), ("data.txt", "data.txt/deep")):
        (tree / old).unlink()
        if (tree / new).is_dir():
            (tree / new).rmdir()
        write(tree / new)
    send(tree)
    assert read_tree(there / "p") == read_tree(tree)


@needs_rsync
def test_what_is_there_already_is_not_sent_again(
    tree: Path, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor what uv has made of its own file."""
    write(tree / "uv.lock")
    send(tree)
    write(there / "p/uv.lock", "another uv's")
    monkeypatch.setattr("smolcluster.launch.sync.rsync_command", lambda *_: pytest.fail("rsync"))
    send(tree)
    assert (there / "p/uv.lock").read_text() == "another uv's"


@needs_rsync
def test_a_lock_that_names_wheels_of_this_machine_stays_here(tree: Path, there: Path) -> None:
    """One that was sent before is taken away: uv makes its own there."""
    lock = tree / "uv.lock"
    write(lock, 'name = "torch"\nsource = { registry = "https://pypi.org/simple" }\n')
    send(tree)
    assert (there / "p/uv.lock").is_file()
    write(lock, 'name = "torch"\nsource = { registry = "." }\n')
    assert "uv.lock" not in read_tree(tree)
    write(tree / "src/a.py", "changed")
    send(tree)
    assert (there / "p/src/a.py").read_text() == "changed"
    assert not (there / "p/uv.lock").exists()


@needs_rsync
def test_a_broken_sending_is_taken_up_again(
    tree: Path, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has left there, of whichever version, is nobody's work."""
    send(tree)
    for words in ("second", "third"):
        write(tree / "src/a.py", words)
        with monkeypatch.context() as patch:
            patch.setattr("smolcluster.launch.sync.rsync_command", broken)
            with pytest.raises(LaunchError, match="pi5: rsync failed: exit code 23"):
                send(tree)
    write(there / "p/src/a.py", "second")
    assert look(PI5, "~/p", read_tree(tree), overwrite=False).folder.is_half_sent
    write(tree / "src/a.py", "fourth")
    send(tree)
    assert read_tree(there / "p") == read_tree(tree)
    assert not (there / "p" / SENDING).exists()


@pytest.mark.parametrize("foreign", ["thesis.tex", ".hidden", "pyproject.toml"])
def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, tree: Path, foreign: str) -> None:
    folder = tmp_path / "there"
    write(folder / foreign, 'name = "other"\n')
    with pytest.raises(LaunchError, match=r"pi5: .*there holds something else .* nodes\.pi5\.pro"):
        send(tree, Host("pi5"), str(folder))
    assert [path.name for path in folder.iterdir()] == [foreign]


def test_a_copy_that_was_never_sent_is_taken_as_far_as_it_is_ours(
    tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smolcluster.launch.sync.rsync_command", lambda *_: ["true"])
    copy = tmp_path / "copy"
    shutil.copytree(tree, copy, symlinks=True)
    (copy / "src/a.py").unlink()
    write(copy / "notes.txt")
    send(tree, Host("pi5"), str(copy))
    assert (copy / SENT).exists()
    assert (copy / "notes.txt").exists()
    write(copy / "src/b.py", "theirs")
    write(tree / "src/b.py", "ours")
    with pytest.raises(LaunchError, match=r"copy.* has 1 file .*: src/b\.py: "):
        send(tree, Host("pi5"), str(copy))


@pytest.mark.parametrize("is_committed", [True, False])
def test_a_clone_is_called_one(tmp_path: Path, tree: Path, is_committed: bool) -> None:
    clone = tmp_path / "clone"
    write(clone / "pyproject.toml", (tree / "pyproject.toml").read_text())
    write(clone / "src/a.py", "weeks of work")
    git = ["git", "-C", str(clone), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"])[
        : 1 + 2 * is_committed
    ]:
        subprocess.run([*git, *command], check=True, timeout=60)
    words = "a git clone" if is_committed else "a git clone with uncommitted changes"
    with pytest.raises(LaunchError, match=rf"clone, {words}, has 1 file .*: src/a\.py: "):
        send(tree, Host("pi5"), str(clone))
    assert (clone / "src/a.py").read_text() == "weeks of work"


def test_many_names_are_cut_to_a_number(tmp_path: Path, tree: Path) -> None:
    for name in (*(f"many/{number:02}" for number in range(12)), "pyproject.toml"):
        write(tree / name, 'name = "smolcluster"\n')
        write(tmp_path / "p" / name, 'name = "smolcluster" # theirs\n')
    with pytest.raises(LaunchError, match=r"p has 13 files .*many/08 and 3 more: "):
        send(tree, Host("pi5"), str(tmp_path / "p"))


def test_a_look_that_breaks_off_does_not_make_files_seem_missing(
    tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tree, tmp_path / "p", symlinks=True)
    write(tmp_path / "bin/xargs", "#!/bin/sh\necho 'xargs: out of memory' >&2; exit 1\n")
    (tmp_path / "bin/xargs").chmod(0o755)
    monkeypatch.setattr("smolcluster.launch.host.PREAMBLE", f"PATH={tmp_path}/bin:$PATH; ")
    with pytest.raises(LaunchError, match="cannot be used: xargs: out of memory"):
        send(tree, Host("pi5"), str(tmp_path / "p"))


@needs_rsync
def test_what_is_a_machine_s_own_stays(tree: Path, there: Path) -> None:
    write(tree / "experiments/ours")
    write(there / "p/experiments/edp-1/model")
    write(there / "p/pyproject.toml", (tree / "pyproject.toml").read_text())
    send(tree, kept=["/experiments"])
    assert files_in(there / "p/experiments") == {"edp-1/model"}


@pytest.mark.parametrize("place", ["file/p", "file"])
def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path, tree: Path, place: str) -> None:
    write(tmp_path / "file")
    with pytest.raises(LaunchError, match=rf"pi5: .*{place} cannot be written \(Not a directory\)"):
        send(tree, Host("pi5"), str(tmp_path / place))


def test_a_manifest_that_names_what_is_outside_is_not_believed(tmp_path: Path, tree: Path) -> None:
    shutil.copytree(tree, tmp_path / "p", symlinks=True)
    (tmp_path / "p" / SENT).write_bytes(b"../precious\0link x\0")
    (tmp_path / "precious").symlink_to("x")
    with pytest.raises(LaunchError, match=r"pi5: .*p cannot be used"):
        send(tree, Host("pi5"), str(tmp_path / "p"))
    assert (tmp_path / "precious").is_symlink()


@needs_rsync
def test_without_rsync_there_is_a_way_out(
    tree: Path, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smolcluster.launch.sync.rsync_command", lambda *_: ["/no/such/rsync"])
    with pytest.raises(LaunchError, match="rsync is not installed here: install it, or use --no-s"):
        send(tree)


@needs_rsync
def test_a_machine_that_goes_away_is_named(
    tree: Path, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = Host("pi5", "cut")
    with pytest.raises(LaunchError, match=r"pi5 \(cut\): it does not answer"):
        send(tree, cut)
    command = rsync_command(tree, cut, "~/p")
    monkeypatch.setattr("smolcluster.launch.sync.rsync_command", lambda *_: command)
    with pytest.raises(LaunchError, match=r"pi5 \(pi@pi5\): it does not answer"):
        send(tree)


@pytest.mark.parametrize("destination", ["ssh://pi@pi5:2222", "fe80::1%eth0", "pi@[::1]", "pi5"])
def test_rsync_never_reads_the_destination(tmp_path: Path, there: Path, destination: str) -> None:
    *_, dashes, source, target = rsync_command(tmp_path, Host("pi5", destination), "~/p")
    assert (dashes, source, target) == ("--", f"{tmp_path}/", "env:./")


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
def test_every_change_of_what_is_sent_is_seen(tree: Path, change: Callable[[Path], None]) -> None:
    before = read_tree(tree)
    assert read_tree(tree) == before
    change(tree)
    assert read_tree(tree) != before


def test_a_file_that_vanishes_is_one_line(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smolcluster.launch.manifest.sent_files", lambda _root: iter(["gone"]))
    with pytest.raises(LaunchError, match="gone cannot be read: No such file"):
        read_tree(tree)


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
            "error: Request failed cause: dns error (there:",
        ),
        ("Killed", "environment: Killed (there: "),
    ],
)
@pytest.mark.parametrize("build", ["auto", "pypi"])
def test_what_uv_says_is_told_with_its_cause(
    tmp_path: Path, uv: Path, said: str, told: str, build: str
) -> None:
    """And that PyTorch may come from the registry, where it does not and is what fails."""
    (tmp_path / "said").write_text(said)
    (tmp_path / "bin" / "uv").write_text(f"#!/bin/sh\ncat {tmp_path}/said >&2; exit 2\n")
    write(tmp_path / "p" / ENVIRONMENT_MARKER, "1")
    with pytest.raises(LaunchError, match="pi5: uv cannot make the environment: ") as error:
        make_environment(Host("pi5"), str(tmp_path / "p"), build, "2", {})
    assert (told if build == "auto" else told.replace("(or take", "(there:")) in str(error.value)
    assert ("nodes.pi5.torch to pypi" in str(error.value)) == (build == "auto" and "torch" in said)
    assert not (tmp_path / "p" / ENVIRONMENT_MARKER).exists()
