"""Which run a server serves and what it goes on from; and that a refusal leaves everything as it was."""

import os
import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from harness import free_port, local_settings, state_of
from made_runs import summary_of
from peers import logger
from smolcluster.algorithms.claim import AUTO, Claimed, claim_run
from smolcluster.configs.schema import Settings
from smolcluster.errors import CheckpointError, ConfigError, PortBusy, RunBusy, SmolclusterError
from smolcluster.runs.lock import run_lock
from smolcluster.runs.paths import LATEST, RunPaths, create_run
from smolcluster.runs.summary import write_summary
from smolcluster.server.listening import check_port
from smolcluster.training.checkpoint import (
    MODEL_FILE,
    CheckpointStore,
    Snapshot,
    TrainingState,
)
from smolcluster.training.replica import Replica

pytestmark = pytest.mark.usefixtures("no_flushing")
EPOCHS = 5


@dataclass
class Runs:
    """A folder of runs."""

    root: Path
    lines: list[str] = field(default_factory=list)

    def run(self, run_id: str, *, newest: bool = True) -> RunPaths:
        """Make a run's folder."""
        return create_run(self.root, run_id, newest=newest)

    def saved(
        self, run_id: str, *steps: int, epoch: int = 0, damaged: tuple[int, ...] = ()
    ) -> RunPaths:
        """A run with a checkpoint of each step, of which some are damaged."""
        paths = self.run(run_id)
        store = CheckpointStore(paths.checkpoints, 9, logger([]))
        torch.manual_seed(0)
        replica = Replica(nn.Linear(2, 2), "sgd")
        for step in steps:
            state = state_of(step, run_id=run_id, samples_applied=10 * step, epoch=epoch)
            store.save(Snapshot.of(replica, state))
        for step in damaged:
            (paths.checkpoints / f"step-{step:08d}" / MODEL_FILE).write_bytes(b"")
        return paths

    def ended(self, run_id: str, epoch: int = EPOCHS - 1) -> RunPaths:
        """A run that has ended in that epoch."""
        paths = self.saved(run_id, 9, epoch=epoch)
        write_summary(paths.summary, summary_of(epochs=EPOCHS))
        return paths

    def settings(self, num_epochs: int = EPOCHS, keep_last: int = 3) -> Settings:
        """What the server was told."""
        base = _settings()
        return Settings(
            base.cluster.model_copy(update={"keep_last": keep_last}),
            base.train.model_copy(update={"num_epochs": num_epochs}),
            base.node.model_copy(update={"runs_dir": self.root}),
        )

    def claim(self, run_id: str | None, resume: str | None, num_epochs: int = EPOCHS) -> Claimed:
        """Claim a run, and let it go again."""
        settings = self.settings(num_epochs)
        with claim_run(settings, "edp", run_id, resume, logger(self.lines)) as claimed:
            with (
                pytest.raises(RunBusy, match=f"process {os.getpid()}"),
                run_lock(claimed.paths.lock),
            ):
                pass
            return claimed

    @property
    def latest(self) -> str | None:
        """Where the link leads."""
        link = self.root / LATEST
        return str(link.readlink()) if link.is_symlink() else None

    def files(self) -> dict[Path, bytes]:
        """Every file but the locks."""
        found = (path for path in sorted(self.root.rglob("*")) if path.name != ".lock")
        return {path: path.read_bytes() for path in found if path.is_file()}


@cache
def _settings() -> Settings:
    return local_settings()


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path / "runs")


def step_of(claimed: Claimed) -> int | None:
    return claimed.checkpoint.state.step if claimed.checkpoint else None


# A run that begins


@pytest.mark.parametrize("resume", [None, AUTO])
def test_without_a_name_a_new_run_gets_one(runs: Runs, resume: str | None) -> None:
    claimed = runs.claim(None, resume)
    assert re.fullmatch(r"edp-\d{8}-\d{6}-[0-9a-f]{4}", claimed.paths.run_id)
    assert claimed.checkpoint is None
    assert claimed.paths.root == runs.root / claimed.paths.run_id
    assert claimed.paths.logs.is_dir()
    assert claimed.store.folder == claimed.paths.checkpoints
    assert runs.latest is None, "it is the newest once it has begun"


@pytest.mark.parametrize("resume", [None, AUTO])
@pytest.mark.parametrize("is_there", [False, True], ids=["new", "made by the launcher"])
def test_a_named_run_without_checkpoints_begins(
    runs: Runs, resume: str | None, is_there: bool
) -> None:
    runs.saved("old", 3)
    if is_there:
        runs.run("mine", newest=False)
    claimed = runs.claim("mine", resume)
    assert (claimed.paths.run_id, step_of(claimed)) == ("mine", None)
    assert runs.latest == "old"


def test_a_name_whose_run_has_checkpoints_is_taken(runs: Runs) -> None:
    runs.saved("mine", 3)
    with pytest.raises(ConfigError, match="run mine has checkpoints already") as caught:
        runs.claim("mine", None)
    assert f"--resume {AUTO}" in str(caught.value)
    assert "another --run-id" in str(caught.value)


@pytest.mark.parametrize("name", ["../out", "a/b", ".hidden", "", "x" * 101])
def test_a_name_that_cannot_be_a_folders_is_refused(runs: Runs, name: str) -> None:
    for run_id, resume in ((name, None), (name, AUTO), (None, name)):
        with pytest.raises(ConfigError, match="cannot name a folder"):
            runs.claim(run_id, resume)
    assert list(runs.root.parent.iterdir()) == [], "nothing was made"


# A run that goes on


@pytest.mark.parametrize(
    ("run_id", "resume", "expected"),
    [
        (None, "one", "one"),
        ("one", "one", "one"),
        ("one", AUTO, "one"),
        (None, AUTO, "two"),
        (None, LATEST, "two"),
        (LATEST, LATEST, "two"),
        (None, "two", "two"),
        ("two", AUTO, "two"),
    ],
)
def test_the_run_that_is_meant_goes_on(
    runs: Runs, run_id: str | None, resume: str, expected: str
) -> None:
    runs.saved("one", 3, 5)
    runs.saved("two", 4, 6)
    runs.saved("elsewhere", 7)
    runs.run("two")
    claimed = runs.claim(run_id, resume)
    assert claimed.paths.run_id == expected
    assert claimed.paths.root == runs.root / expected
    assert step_of(claimed) == {"one": 5, "two": 6}[expected]
    assert runs.latest == "two"
    (line,) = [line for line in runs.lines if "resuming" in line]
    samples = {"one": 50, "two": 60}[expected]
    assert f"resuming run {expected} at step {samples // 10}, after {samples} samples" in line


def test_a_run_goes_on_from_its_newest_good_checkpoint(runs: Runs) -> None:
    runs.saved("mine", 3, 5, 7, damaged=(7,))
    assert step_of(runs.claim(None, "mine")) == 5
    assert any("WARNING a checkpoint is skipped" in line for line in runs.lines)


@pytest.mark.parametrize(("run_id", "resume"), [(None, "mine"), ("mine", AUTO), (None, AUTO)])
def test_a_run_whose_checkpoints_are_all_damaged_is_not_begun_anew(
    runs: Runs, run_id: str | None, resume: str
) -> None:
    runs.saved("mine", 3, 5, damaged=(3, 5))
    with pytest.raises(CheckpointError, match=r"none of the 2 checkpoints in .* is good") as caught:
        runs.claim(run_id, resume)
    assert "begin a new run" in str(caught.value)


def test_a_run_without_a_checkpoint_does_not_go_on_unless_it_may_begin(runs: Runs) -> None:
    runs.run("mine")
    for name in ("mine", LATEST):
        with pytest.raises(CheckpointError, match="run mine has no checkpoint yet") as caught:
            runs.claim(None, name)
        assert f"--resume {AUTO} --run-id mine" in str(caught.value)
    assert step_of(runs.claim("mine", AUTO)) is None
    assert runs.claim(None, AUTO).paths.run_id == "mine"


@pytest.mark.parametrize("resume", ["other", LATEST])
def test_two_names_must_be_one(runs: Runs, resume: str) -> None:
    runs.saved("mine", 3)
    runs.saved("other", 3)
    with pytest.raises(ConfigError, match=f"--resume is '{resume}' and --run-id 'mine'") as caught:
        runs.claim("mine", resume)
    assert f"--resume {AUTO}" in str(caught.value)


@pytest.mark.parametrize(
    ("resume", "missing"), [("nowhere", "no run 'nowhere'"), (LATEST, "no run that has begun")]
)
def test_a_run_that_is_not_there_is_named_with_those_that_are(
    runs: Runs, resume: str, missing: str
) -> None:
    runs.saved("mine", 3)
    (runs.root / LATEST).unlink()
    with pytest.raises(ConfigError, match=rf"{missing} under .*known: mine"):
        runs.claim(None, resume)
    assert not (runs.root / resume).exists()


def test_a_link_to_a_run_that_is_gone_means_no_run(runs: Runs) -> None:
    runs.root.mkdir()
    (runs.root / LATEST).symlink_to("gone")
    assert runs.claim(None, AUTO).paths.run_id not in ("gone", LATEST)
    with pytest.raises(ConfigError, match="no run that has begun"):
        runs.claim(None, LATEST)


def test_as_many_checkpoints_are_kept_as_the_cluster_file_says(runs: Runs) -> None:
    runs.saved("mine", 1, 2)
    with claim_run(runs.settings(keep_last=2), "edp", None, "mine", logger([])) as claimed:
        assert claimed.checkpoint is not None
        replica = Replica(nn.Linear(2, 2), "sgd")
        for step in (3, 4):
            state = claimed.checkpoint.state.model_copy(update={"step": step})
            trained = TrainingState.model_validate(
                {name: getattr(state, name) for name in TrainingState.model_fields}
            )
            claimed.store.save(Snapshot.of(replica, trained))
    assert [info.step for info in claimed.store.list()] == [3, 4]


# A run that is over, or alive


@pytest.mark.parametrize(("run_id", "resume"), [(None, "mine"), ("mine", AUTO), (None, AUTO)])
@pytest.mark.parametrize("num_epochs", [EPOCHS, EPOCHS - 1, 1])
def test_a_run_that_has_ended_is_over(
    runs: Runs, run_id: str | None, resume: str, num_epochs: int
) -> None:
    paths = runs.ended("mine")
    with pytest.raises(CheckpointError, match="run mine has ended") as caught:
        runs.claim(run_id, resume, num_epochs)
    assert f"raise num_epochs above {EPOCHS}" in str(caught.value)
    assert paths.summary.is_file()


@pytest.mark.parametrize(
    ("run_id", "resume"), [("mine", None), ("mine", AUTO), (None, "mine"), (None, AUTO)]
)
def test_a_run_that_somebody_writes_is_busy(runs: Runs, run_id: str | None, resume: str) -> None:
    paths = runs.ended("mine")
    with run_lock(paths.lock), pytest.raises(RunBusy, match="run mine is being written"):
        runs.claim(run_id, resume, EPOCHS + 1)
    assert paths.summary.is_file()
    if resume is not None:
        assert step_of(runs.claim(run_id, resume, EPOCHS + 1)) == 9, "then it is free"


@pytest.mark.parametrize("error", [ValueError("a bug"), KeyboardInterrupt()], ids=repr)
def test_the_lock_is_free_after_whatever_ended_the_server(runs: Runs, error: BaseException) -> None:
    with pytest.raises(type(error)), claim_run(runs.settings(), "edp", "mine", None, logger([])):
        raise error
    with run_lock(runs.root / "mine" / ".lock"):
        pass


# Whatever is asked for


def nothing(_: Runs) -> None:
    pass


def fresh(runs: Runs) -> None:
    runs.run("one")


def going(runs: Runs) -> None:
    runs.saved("one", 3, 5)


def damaged(runs: Runs) -> None:
    runs.saved("one", 3, damaged=(3,))


def ended(runs: Runs) -> None:
    runs.ended("one")


def going_and_fresh(runs: Runs) -> None:
    runs.saved("one", 3)
    runs.run("two")


def linked_to_nothing(runs: Runs) -> None:
    runs.saved("one", 3)
    (runs.root / LATEST).unlink()
    (runs.root / LATEST).symlink_to("gone")


@pytest.mark.parametrize("resume", [None, AUTO, LATEST, "one", "nowhere"])
@pytest.mark.parametrize("run_id", [None, "one", "new"])
@pytest.mark.parametrize(
    "make", [nothing, fresh, going, damaged, ended, going_and_fresh, linked_to_nothing]
)
@pytest.mark.parametrize("is_live", [False, True])
def test_a_claim_moves_no_link_and_a_refusal_changes_nothing(
    runs: Runs, make: Callable[[Runs], None], run_id: str | None, resume: str | None, is_live: bool
) -> None:
    make(runs)
    latest, files = runs.latest, runs.files()

    def claim() -> Claimed | None:
        try:
            return runs.claim(run_id, resume)
        except (ConfigError, CheckpointError, RunBusy) as error:
            assert str(error).isprintable()
            return None

    if is_live and (runs.root / "one").is_dir():
        with run_lock(runs.root / "one" / ".lock"):
            claimed = claim()
        assert claimed is None or claimed.paths.run_id != "one"
    else:
        claimed = claim()
    assert runs.latest == latest
    assert runs.files() == files
    if claimed is not None:
        assert claimed.paths.root.is_dir()
        assert run_id in (None, claimed.paths.run_id)
        assert resume in (None, AUTO, LATEST, claimed.paths.run_id)
        assert (claimed.checkpoint is not None) == (claimed.store.count() > 0)
        assert resume is not None or claimed.checkpoint is None
    for folder in runs.root.glob("[!.]*/"):
        with run_lock(folder / ".lock"):
            pass


# The port


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        yield holder.getsockname()[1]


def test_a_port_that_is_taken_is_found_before_anything_is_written(taken: int) -> None:
    with pytest.raises(PortBusy, match=str(taken)) as caught:
        check_port(local_settings(f"port={taken}").cluster)
    assert caught.value.exit_code == 75


def test_a_port_that_is_free_stays_free() -> None:
    port = free_port()
    for _ in range(2):
        check_port(local_settings(f"port={port}").cluster)
    with socket.create_server(("127.0.0.1", port)) as mine:
        assert mine.getsockname()[1] == port


def test_every_address_must_be_free(taken: int) -> None:
    """One of two is not enough, and none stays open."""
    cluster = local_settings(f"port={taken}").cluster
    cluster = cluster.model_copy(update={"bind": ("127.0.0.2", "127.0.0.1")})
    try:
        socket.create_server(("127.0.0.2", taken)).close()
    except OSError:
        pytest.skip("this machine has one loopback address only")
    with pytest.raises(SmolclusterError):
        check_port(cluster)
    socket.create_server(("127.0.0.2", taken)).close()
