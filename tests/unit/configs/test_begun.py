"""What is known here of runs, and of the code that their folders name."""

import json
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from harness import local_settings
from smolcluster.configs.begun import (
    WORKLOAD_FOLDER,
    WORKLOAD_NAME,
    brought_workload,
    check_workload,
    code_note,
    content_hash,
    folder_digest,
    forget,
    is_known,
    remember,
    remember_workload,
)
from smolcluster.configs.schema import TrainConfig
from smolcluster.errors import ConfigError


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "smolcluster"


@pytest.fixture
def code(tmp_path: Path) -> Path:
    file = tmp_path / "train.py"
    file.write_text("WIDTH = 1\n")
    return file


def naming(workload: str, **args: object) -> TrainConfig:
    texts = [f"workload={workload}"]
    texts += [f"workload_args={json.dumps(args)}"] if args else []
    return local_settings(*texts, train="workload").train


def known(run: Path, train: TrainConfig, *files: Path) -> None:
    remember_workload(run, train, {str(each): content_hash(each.read_bytes()) for each in files})


def test_what_a_launcher_wrote_is_known_by_run_name_and_content(state: Path) -> None:
    assert not is_known("edp-1", "launch.json", b"{}")
    remember("edp-1", "launch.json", b"{}")
    assert is_known("edp-1", "launch.json", b"{}")
    assert not is_known("edp-2", "launch.json", b"{}")
    assert not is_known("edp-1", "launch.json", b"{ }")
    assert not is_known("edp-1", "launch/told.json", b"{}")
    remember("edp-2", "launch.json", b"{}")
    folder = state / "begun" / "edp-1"
    assert {stat.S_IMODE(each.stat().st_mode) for each in (folder, folder.parent)} == {0o700}
    assert [stat.S_IMODE(each.stat().st_mode) for each in folder.iterdir()] == [0o600]
    forget("edp-1")
    assert not is_known("edp-1", "launch.json", b"{}")
    assert is_known("edp-2", "launch.json", b"{}")


def test_nothing_is_known_where_others_may_write(state: Path) -> None:
    remember("edp-1", "launch.json", b"{}")
    (state / "begun" / "edp-1").chmod(0o777)
    assert not is_known("edp-1", "launch.json", b"{}")


def test_what_cannot_be_noted_is_not_known(state: Path) -> None:
    state.parent.mkdir()
    state.touch()
    remember("edp-1", "launch.json", b"{}")
    assert not is_known("edp-1", "launch.json", b"{}")


def test_a_workload_is_known_by_name_arguments_and_content(tmp_path: Path, code: Path) -> None:
    run, named = tmp_path / "edp-1", f"{code}:workload"
    trained = naming(named, width=3)
    with pytest.raises(ConfigError, match=r"train\.py:workload, which no run .*--workload /"):
        check_workload(run, trained)
    known(run, trained, code)
    check_workload(run, trained)
    check_workload(tmp_path / "moved" / "edp-1", trained)
    for other in (
        naming(named, width=4),
        naming(f"{code}:other", width=3),
        naming("os:system", width=3),
    ):
        with pytest.raises(ConfigError, match="which no run of this name has trained"):
            check_workload(run, other, may_have_changed=True)
    with pytest.raises(ConfigError, match="which no run of this name has trained"):
        check_workload(tmp_path / "edp-2", trained)


def test_the_user_s_own_file_may_be_another_one_only_where_that_is_said(
    tmp_path: Path, code: Path
) -> None:
    run, trained = tmp_path / "edp-1", naming(f"{code}:workload")
    known(run, trained, code)
    code.write_text("WIDTH = 1\r\n")
    check_workload(run, trained)
    code.write_text("WIDTH = 2\n")
    check_workload(run, trained, may_have_changed=True)
    with pytest.raises(ConfigError, match="whose code is another one now"):
        check_workload(run, trained)
    with pytest.raises(ConfigError, match="whose code is another one now"):
        check_workload(tmp_path / "copied" / "edp-1", trained, may_have_changed=True)
    (tmp_path / "linked").symlink_to(tmp_path)
    check_workload(tmp_path / "linked" / "edp-1", trained, may_have_changed=True)


def test_a_workload_that_is_not_here_is_to_be_named_by_its_own_file(tmp_path: Path) -> None:
    gone = naming("/home/pi/runs/edp-1/launch/workload/train.py:workload")
    with pytest.raises(ConfigError, match=r"--workload FILE\.py:FUNCTION"):
        check_workload(tmp_path / "edp-1", gone)


@pytest.fixture
def brought(tmp_path: Path) -> Path:
    """A run's folder into which a launcher has brought code."""
    run = tmp_path / "edp-1"
    folder = run / WORKLOAD_FOLDER
    (folder / "deep").mkdir(parents=True)
    (folder / "train.py").write_text("from deep import model\n")
    (folder / "deep" / "model.py").write_text("WIDTH = 1\n")
    (run / WORKLOAD_NAME).write_text("train.py:workload")
    remember("edp-1", WORKLOAD_FOLDER, code_note("train.py:workload", folder_digest(folder)))
    return run


def test_code_that_was_brought_is_known_whatever_python_has_compiled_of_it(brought: Path) -> None:
    folder = brought / WORKLOAD_FOLDER
    compiled = folder / "deep" / "__pycache__" / "model.cpython-313.pyc"
    compiled.parent.mkdir()
    compiled.write_bytes(b"anything")
    assert brought_workload(brought) == f"{folder}/train.py:workload"
    assert not compiled.exists(), "nobody knows of what it was compiled"


def test_code_that_was_brought_is_known_while_others_import_it_or_ask(brought: Path) -> None:
    folder = brought / WORKLOAD_FOLDER
    is_over = threading.Event()

    def compiling() -> None:
        while not is_over.is_set():
            with suppress(OSError):  # as Python does
                (folder / "__pycache__").mkdir(exist_ok=True)
                for number in range(20):
                    (folder / "__pycache__" / f"{number}.pyc").touch()

    with ThreadPoolExecutor() as pool:
        pool.submit(compiling)
        try:
            found = set(pool.map(brought_workload, [brought] * 200))
        finally:
            is_over.set()
    assert found == {f"{folder}/train.py:workload"}
    assert not list(folder.parent.glob(".*"))


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "deep" / "model.py").write_text("WIDTH = 2\n"),
        lambda folder: (folder / "pandas.py").touch(),
        lambda folder: (folder / "deep" / "model.py").unlink(),
        lambda folder: (folder / "torch").symlink_to(folder / "deep"),
        lambda folder: (folder.parent / "workload.name").write_text("deep/model.py:workload"),
        lambda folder: folder.parents[1].rename(folder.parents[2] / "edp-2"),
    ],
    ids=["changed", "added", "removed", "linked", "renamed", "of another run"],
)
def test_code_that_is_not_as_it_was_brought_is_not_known(brought: Path, change: object) -> None:
    train = naming(f"{brought}/{WORKLOAD_FOLDER}/train.py:workload")
    known(brought, train)
    check_workload(brought, train)
    assert callable(change)
    change(brought / WORKLOAD_FOLDER)
    assert brought_workload(brought) is None
    assert brought_workload(brought.with_name("edp-2")) is None
    with pytest.raises(ConfigError, match="whose code is another one now"):
        check_workload(brought, train, may_have_changed=True)
