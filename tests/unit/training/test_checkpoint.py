"""Checkpoints are whole or absent, whatever happens, and bring a run back bit for bit."""

import contextlib
import copy
import errno
import fcntl
import hashlib
import itertools
import json
import math
import mmap
import os
import re
import resource
import shutil
import signal
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from computing import forward_backward
from harness import state_of
from peers import DEADLINE_S, logger
from smolcluster.errors import CheckpointError
from smolcluster.models.SimpleNN import SimpleNN
from smolcluster.training import checkpoint as room
from smolcluster.training.checkpoint import (
    BEST,
    LATEST,
    MODEL_FILE,
    OPTIMIZER_FILE,
    STATE_FILE,
    CheckpointState,
    CheckpointStore,
    CheckpointWriter,
    Snapshot,
    TrainingState,
    check_same,
    export,
    restore,
)
from smolcluster.training.replica import Replica
from smolcluster.utils.retry import Deadline
from waiting import eventually

pytestmark = pytest.mark.usefixtures("no_flushing")
FILES = (MODEL_FILE, OPTIMIZER_FILE, STATE_FILE)
FULL_DISK = SafetensorError("I/O error: No space left on device (os error 28)")
Damage = Callable[[Path], None]


class Odd(nn.Module):
    """A model with tied weights, a frozen parameter, and both kinds of buffers."""

    persistent: Tensor
    passing: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)
        self.frozen = nn.Parameter(torch.randn(2, 3).t(), requires_grad=False)
        self.again = nn.Linear(6, 6, bias=False)
        self.again.weight = self.first.weight
        self.last = nn.Linear(6, 3)
        self.register_buffer("persistent", torch.randn(4))
        self.register_buffer("passing", torch.randn(4), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.again(torch.tanh(self.first(inputs)))
        logits: Tensor = self.last(hidden) + self.frozen.sum()
        return logits


def new_replica(
    optimizer: str = "adam", seed: int = 0, dtype: torch.dtype = torch.float32
) -> Replica:
    torch.manual_seed(seed)
    return Replica(SimpleNN(6, 8, 3).to(dtype), optimizer, weight_decay=0.1)


def train(replica: Replica, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        drawn = torch.Generator().manual_seed(step)
        inputs = torch.randn(16, 6, generator=drawn)
        forward_backward(replica, inputs, torch.randint(0, 3, (16,), generator=drawn))
        replica.step(0.01)


def snapshot_of(step: int, replica: Replica | None = None, **fields: Any) -> Snapshot:
    """The snapshot of a step; its weights are the step's number unless a replica is given."""
    if replica is None:
        replica = new_replica()
        replica.params.fill_(step)
    return Snapshot.of(replica, state_of(step, **fields))


def new_store(
    tmp_path: Path, lines: list[str] | None = None, keep_last: int = 3
) -> CheckpointStore:
    log = logger([] if lines is None else lines)
    return CheckpointStore(tmp_path / "checkpoints", keep_last, log, now=lambda: 1_795_000_000.0)


@pytest.fixture
def lines() -> list[str]:
    """What the store logs."""
    return []


@pytest.fixture
def store(tmp_path: Path, lines: list[str]) -> CheckpointStore:
    return new_store(tmp_path, lines)


def tensors_of(replica: Replica) -> dict[str, Tensor]:
    return {"params": replica.params, **replica.optimizer.state}


def assert_same(one: Replica, other: Replica) -> None:
    mine, theirs = tensors_of(one), tensors_of(other)
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert tensor.dtype == theirs[name].dtype
        assert torch.equal(tensor, theirs[name]), name


def all_equal(tensor: Tensor, value: float) -> bool:
    return torch.equal(tensor, torch.full_like(tensor, value))


def names_in(store: CheckpointStore) -> list[str]:
    """Everything that lies in the store's folder but the links."""
    return sorted(path.name for path in store.folder.iterdir() if not path.is_symlink())


def steps_in(store: CheckpointStore) -> list[int]:
    return [int(name.removeprefix("step-")) for name in names_in(store)]


def newest(store: CheckpointStore) -> room.Checkpoint:
    found = store.newest_good()
    assert found is not None
    return found


def save(store: CheckpointStore, *steps: int) -> None:
    for step in steps:
        store.save(snapshot_of(step))


def best_step(store: CheckpointStore) -> int | None:
    best = store.best()
    return None if best is None else best.state.step


def rewrite(folder: Path, **changes: object) -> None:
    """Change fields of `state.json` as an editor would."""
    path = folder / STATE_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# What is saved comes back


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
def test_a_run_goes_on_bit_for_bit(tmp_path: Path, optimizer: str, dtype: torch.dtype) -> None:
    straight = new_replica(optimizer, dtype=dtype)
    train(straight, 5)
    new_store(tmp_path).save(snapshot_of(5, straight))

    resumed = new_replica(optimizer, seed=1, dtype=dtype)
    train(resumed, 2)
    restore(resumed, newest(new_store(tmp_path)))
    assert_same(resumed, straight)
    if optimizer != "sgd":
        assert resumed.optimizer.state["step"].item() == 5

    train(straight, 5, first=5)
    train(resumed, 5, first=5)
    assert_same(resumed, straight)


def test_the_state_comes_back_as_it_was_told(store: CheckpointStore) -> None:
    progress = {"cursor": [0, 64], "open": [{"epoch": 0, "start": 0, "stop": 32}], "rate": 0.1}
    told = state_of(7, epoch=2, train_loss=0.5, val_loss=1, progress=progress)
    path = store.save(Snapshot.of(new_replica(), told))
    found = newest(store)
    assert path == found.path == store.folder / "step-00000007"
    assert found.state.model_dump(include=set(TrainingState.model_fields)) == told.model_dump()
    assert found.state.format == 1
    assert found.state.model_fingerprint == new_replica().fingerprint
    assert found.state.written_at == "2026-11-18T11:06:40.000Z"
    for name, entry in found.state.files.items():
        data = (path / name).read_bytes()
        assert (entry.nbytes, entry.sha256) == (len(data), hashlib.sha256(data).hexdigest())


def test_the_models_file_holds_all_that_is_no_passing_buffer_also_without_this_package(
    store: CheckpointStore,
) -> None:
    torch.manual_seed(0)
    model = Odd()
    saved, other = Replica(copy.deepcopy(model), "adam"), Replica(model, "adam")
    train(saved, 1)
    stored = load_file(store.save(snapshot_of(1, saved)) / MODEL_FILE)
    assert stored.keys() == {"first.weight", "frozen", "last.weight", "last.bias", "persistent"}
    fresh = Odd()
    assert fresh.load_state_dict(stored, strict=False).unexpected_keys == []
    restore(other, newest(store))
    assert_same(other, saved)
    for name, tensor in saved.model.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], tensor), name
        assert torch.equal(other.model.state_dict()[name], tensor), name


def test_further_tensors_are_kept_beside_the_optimizers_and_must_be_those(
    store: CheckpointStore,
) -> None:
    replica, residual = new_replica(), torch.randn(3)
    with pytest.raises(ValueError, match="'exp_avg' names a tensor of the optimizer"):
        Snapshot.of(replica, state_of(1), {"exp_avg": torch.zeros(1)})
    store.save(Snapshot.of(replica, state_of(1), {"residual": residual}))
    stored = load_file(newest(store).path / OPTIMIZER_FILE)
    assert stored.keys() == {"step", "exp_avg", "exp_avg_sq", "residual"}
    other, back = new_replica(seed=1), torch.zeros(3)
    before = other.params.clone()
    for extra, sentence in (
        (None, "holds residual, float32 of shape"),
        ({"residual": torch.ones(4)}, "holds residual as float32"),
        ({"residual": back, "momentum": torch.ones(3)}, "lacks momentum"),
    ):
        with pytest.raises(CheckpointError, match=sentence):
            restore(other, newest(store), extra)
    assert torch.equal(other.params, before)
    restore(other, newest(store), {"residual": back})
    assert torch.equal(back, residual)


def test_a_snapshot_does_not_follow_later_steps() -> None:
    torch.manual_seed(0)
    replica = Replica(Odd(), "adam")
    train(replica, 1)
    state = state_of(1, progress={"cursor": 3})
    residual = torch.ones(3)
    snapshot = Snapshot.of(replica, state, {"residual": residual})
    before = {
        name: tensor.clone()
        for tensors in (snapshot.model, snapshot.optimizer)
        for name, tensor in tensors.items()
    }
    assert torch.equal(before["first.weight"], replica.model.get_parameter("first.weight"))
    assert before["step"].item() == 1

    train(replica, 2, first=1)
    state.progress["cursor"] = 4
    residual.zero_()
    with torch.no_grad():
        replica.model.get_parameter("frozen").zero_()
        replica.model.get_buffer("persistent").zero_()
    for name, tensor in {**snapshot.model, **snapshot.optimizer}.items():
        assert torch.equal(tensor, before[name]), name
    assert snapshot.state.progress == {"cursor": 3}


def test_a_checkpoint_does_not_hang_on_its_files(store: CheckpointStore) -> None:
    """The server reads one and goes on saving, which may delete those very files."""
    store.save(snapshot_of(4))
    found = newest(store)
    for name in FILES:
        os.truncate(found.path / name, 0)
    restored = new_replica()
    restore(restored, found)
    assert all_equal(restored.params, 4)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_is_none(store: CheckpointStore, loss: float) -> None:
    path = store.save(snapshot_of(1, train_loss=loss, val_loss=loss))
    assert json.loads((path / STATE_FILE).read_text())["val_loss"] is None
    assert newest(store).state.train_loss is None
    assert best_step(store) is None


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    # A lone surrogate is no text that JSON could hold.
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text('abτ\n"'), inner, max_size=4)
    ),
    max_leaves=10,
)


@settings(max_examples=40)
@given(progress=st.dictionaries(st.text("abc"), json_values, max_size=4), loss=st.floats())
def test_any_progress_is_read_as_it_was_written(progress: dict[str, Any], loss: float) -> None:
    told = state_of(1, progress=progress, train_loss=loss)
    files = {name: room.FileEntry(nbytes=1, sha256="0") for name in (MODEL_FILE, OPTIMIZER_FILE)}
    state = CheckpointState(
        **told.model_dump(), model_fingerprint="m", written_at="now", files=files
    )
    read = room._decode(room._encode(state), Path("state.json"))
    assert read.model_copy(update={"sha256": None}) == state


def test_files_are_as_readable_as_their_folder(tmp_path: Path) -> None:
    path = new_store(tmp_path).save(snapshot_of(1))
    modes = {file.stat().st_mode & 0o777 for file in path.iterdir()}
    assert modes == {path.stat().st_mode & 0o666}


# Crashes


def killed_at(point: int, save: Callable[[], object]) -> bool:
    """Run `save` in a child process that is killed before its system call number `point`.

    Returns False when there are not so many calls.
    """
    pid = os.fork()
    if pid == 0:
        try:
            count_calls(die_at(point))
            save()
        except BaseException:
            os._exit(2)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert not os.WIFEXITED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def die_at(point: int) -> Callable[[int], None]:
    def look(number: int) -> None:
        if number == point:
            os.kill(os.getpid(), signal.SIGKILL)

    return look


def count_calls(seen: Callable[[int], None]) -> None:
    """In a child process: call `seen` with its number before each call that changes the disk."""
    numbers = itertools.count()

    def counted(function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: Any, **kwargs: Any) -> object:
            seen(next(numbers))
            return function(*args, **kwargs)

        return call

    for name in ("mkdir", "fsync", "rename", "replace", "symlink", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))

    whole = save_file

    def in_two_halves(tensors: dict[str, Tensor], path: Path) -> None:
        seen(next(numbers))
        whole(tensors, path)
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2])
        seen(next(numbers))
        path.write_bytes(data)

    setattr(room, "save_file", in_two_halves)  # noqa: B010  (mypy refuses the assignment)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize(
    ("before", "step", "keep_last"),
    [([1, 2], 3, 1), ([2], 2, 3), ([], 1, 3)],
    ids=["one more", "the same step again", "the first one"],
)
def test_a_kill_at_any_point_leaves_the_old_or_the_new_checkpoint(
    tmp_path: Path, before: list[int], step: int, keep_last: int
) -> None:
    seen = set()
    weights = new_replica()
    weights.params.fill_(100)
    snapshot = snapshot_of(step, weights)
    for point in itertools.count():
        root = tmp_path / str(point)
        store = new_store(root, keep_last=9)
        for old in before:
            store.save(snapshot_of(old, val_loss=1.0 / old))
        lines: list[str] = []
        store = new_store(root, lines, keep_last)
        survived = not killed_at(point, lambda: store.save(snapshot))  # noqa: B023

        found = store.newest_good()
        assert lines == []
        is_new = found is not None and all_equal(found.model["fc1.weight"], 100)
        last = before[-1] if before else None
        assert (found and found.state.step, is_new) in {(last, False), (step, True)}
        assert [info.problem for info in store.list()] == [None] * len(store.list())
        seen.add(is_new)

        store.save(snapshot_of(9))
        assert newest(store).state.step == 9
        assert not [name for name in names_in(store) if name.startswith(".")]
        if survived:
            break
    assert seen == {False, True}
    assert point > 10


def test_each_thing_is_flushed_before_the_next_depends_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = new_store(tmp_path, keep_last=1)
    store.save(snapshot_of(1))
    events: list[str] = []

    def watch(owner: object, name: str, note: Callable[..., str]) -> None:
        real = getattr(owner, name)

        def call(*args: Any) -> object:
            events.append(note(*args))
            return real(*args)

        monkeypatch.setattr(owner, name, call)

    def named(path: Path) -> str:
        return "draft" if path.name.startswith(".step-00000002.") else path.name

    watch(room, "_sync", lambda path: f"flush {named(path)}")
    watch(os, "rename", lambda _source, target: f"rename to {Path(target).name[:14]}")
    watch(os, "replace", lambda _source, target: f"link {Path(target).name}")
    store.save(snapshot_of(2))
    assert events == [
        "flush model.safetensors",
        "flush optimizer.safetensors",
        "flush state.json",
        "flush draft",
        "rename to step-00000002",
        "flush checkpoints",
        "link latest",
        "flush checkpoints",
        "rename to .step-00000001",
    ]


def test_macos_is_asked_to_empty_the_drives_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    commands: list[int] = []
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", lambda _descriptor, command: commands.append(command))
    monkeypatch.setattr(os, "fsync", lambda _descriptor: commands.append(0))
    room._sync(Path(__file__))
    assert commands == [51]

    def refuse(_descriptor: int, _command: int) -> None:
        raise OSError(errno.ENOTSUP, "not on this file system")

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    room._sync(Path(__file__))
    assert commands == [51, 0]


def test_flushing_reaches_the_disk_and_only_a_folder_may_refuse_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, flushed = tmp_path / "file", list[int]()
    file.write_text("x")
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(os.fstat(descriptor).st_ino))
    for path in (file, tmp_path):
        room._sync(path)
    assert flushed == [file.stat().st_ino, tmp_path.stat().st_ino]
    monkeypatch.setattr(os, "fsync", raiser(OSError(errno.EINVAL, "Invalid argument")))
    room._sync(tmp_path)
    with pytest.raises(OSError, match="Invalid argument"):
        room._sync(file)
    monkeypatch.setattr(os, "fsync", raiser(OSError(errno.EIO, "Input/output error")))
    with pytest.raises(OSError, match="Input/output error"):
        room._sync(tmp_path)


def test_only_a_save_sweeps_and_only_its_own_rubbish(store: CheckpointStore) -> None:
    store.save(snapshot_of(1))
    rubbish = store.folder / ".step-00000009.1a2b3c4d.tmp"
    kept = [".other.tmp", "step-00000009.tmp", ".step-00000009", "notes.txt"]
    for name in (rubbish.name, *kept):
        (store.folder / name).mkdir()
    newest(store)
    store.best()
    assert len(store.list()) == 1
    assert rubbish.is_dir()
    store.save(snapshot_of(2))
    assert names_in(store) == sorted(["step-00000001", "step-00000002", *kept])


def test_what_a_crash_left_aside_is_put_back_before_anything_else(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = store.save(snapshot_of(1))
    place.rename(place.with_name(".step-00000001.old.tmp"))
    assert newest(store).state.step == 1
    with monkeypatch.context() as failing:
        failing.setattr(room, "save_file", raiser(FULL_DISK))
        with pytest.raises(CheckpointError, match="free some space"):
            store.save(snapshot_of(2))
    assert newest(store).path == place


def test_the_step_to_go_on_from_is_that_of_the_newest_whole_checkpoint(
    store: CheckpointStore,
) -> None:
    assert store.newest_step() is None
    save(store, 1, 2, 3)
    assert store.newest_step() == 3
    store.make_latest(2)
    assert store.newest_step() == 2
    (store.folder / "step-00000002" / MODEL_FILE).unlink()
    assert store.newest_step() == 1


# Damage


def flip(name: str) -> Damage:
    def damage(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[-20] ^= 1
        (folder / name).write_bytes(data)

    return damage


def truncate(name: str) -> Damage:
    return lambda folder: os.truncate(folder / name, 40)


def remove(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def edit(**changes: object) -> Damage:
    return lambda folder: rewrite(folder, **changes)


def replace_state(text: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / STATE_FILE).write_text(text)

    return damage


def repeat_a_field(folder: Path) -> None:
    text = (folder / STATE_FILE).read_text()
    (folder / STATE_FILE).write_text(text.replace('"epoch": 0,', '"epoch": 0, "epoch": 1,'))


def name_files(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what is said of the files, with the hash that belongs to it."""
    fields = json.loads((folder / STATE_FILE).read_text())
    change(fields["files"])
    state = CheckpointState.model_validate_json(json.dumps(fields))
    (folder / STATE_FILE).write_bytes(room._encode(state))


def leave_out_a_file(folder: Path) -> None:
    name_files(folder, lambda files: files.pop(OPTIMIZER_FILE))


def other_tensors(folder: Path) -> None:
    """A file of the right size and hash that is no safetensors file."""
    (folder / MODEL_FILE).write_bytes(b"x" * 100)
    entry = {"nbytes": 100, "sha256": hashlib.sha256(b"x" * 100).hexdigest()}
    name_files(folder, lambda files: files.update({MODEL_FILE: entry}))


def swap_names(folder: Path) -> None:
    """Another step's folder under this one's name."""
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name("step-00000001"), folder)


OUTSIDE = {"../../secret": {"nbytes": 1, "sha256": "0" * 64}}
DAMAGES: dict[str, tuple[Damage, str]] = {
    "flipped model": (flip(MODEL_FILE), r"model\.safetensors does not have the SHA-256"),
    "flipped optimizer": (flip(OPTIMIZER_FILE), r"optimizer\.safetensors does not have the SHA"),
    "flipped state": (flip(STATE_FILE), r"state\.json was changed"),
    "short model": (truncate(MODEL_FILE), r"model\.safetensors has 40 bytes, not \d+"),
    "short state": (truncate(STATE_FILE), r"state\.json is not JSON"),
    "no model": (remove(MODEL_FILE), r"model\.safetensors cannot be read \(No such file"),
    "no state": (remove(STATE_FILE), r"state\.json cannot be read \(No such file"),
    "edited": (edit(val_loss=0.001), r"state\.json was changed: it does not match its own SHA"),
    "unsealed": (edit(sha256=None), r"state\.json was changed"),
    "unknown field": (edit(mood="good"), r"state\.json has a wrong mood: Extra inputs"),
    "wrong type": (edit(step="2"), r"state\.json has a wrong step: Input should be a valid int"),
    "negative": (edit(epoch=-1), r"state\.json has a wrong epoch"),
    "outside": (edit(files=OUTSIDE), r"state\.json was changed"),
    "older format": (edit(format=0), r"state\.json has a wrong format"),
    "repeated field": (repeat_a_field, r"state\.json was changed"),
    "file left out": (leave_out_a_file, r"state\.json does not name model\.safetensors and opt"),
    "other step": (swap_names, r"state\.json is of step 1"),
    "no object": (replace_state("[1]"), r"state\.json has a wrong"),
    "empty": (replace_state(""), r"state\.json is not JSON"),
    "deep": (replace_state('{"progress": ' + "[" * 200_000), r"state\.json is not JSON"),
}


@pytest.mark.parametrize(("damage", "problem"), DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    store: CheckpointStore, lines: list[str], damage: Damage, problem: str
) -> None:
    store.save(snapshot_of(1, val_loss=0.5))
    damage(store.save(snapshot_of(2, val_loss=0.4)))
    lines.clear()
    assert newest(store).state.step == 1
    [line] = lines
    assert line.startswith("WARNING a checkpoint is skipped: ")
    assert re.search(rf"step-00000002/{problem}", line)
    assert line.endswith("; remove that checkpoint, or resume from another one of the run")
    assert line.isprintable()
    assert len(line) < 400
    good, bad = store.list()
    assert good.problem is None
    assert bad.problem is not None
    assert line.endswith(bad.problem)


def test_no_flipped_bit_of_the_state_goes_unnoticed(tmp_path: Path) -> None:
    path = new_store(tmp_path).save(snapshot_of(1, val_loss=0.5, progress={"open": [1.5, "é"]}))
    file = path / STATE_FILE
    data = file.read_bytes()
    state = room._decode(data, file)
    for place in range(len(data)):
        for bit in (1, 32):
            flipped = bytearray(data)
            flipped[place] ^= bit
            with contextlib.suppress(CheckpointError):
                assert room._decode(bytes(flipped), file) == state, "the same in other letters"


def test_a_file_that_holds_no_tensors_is_damaged_whatever_its_hash(
    store: CheckpointStore, lines: list[str]
) -> None:
    other_tensors(store.save(snapshot_of(1)))
    assert store.newest_good() is None
    assert re.search(r"step-00000001/model\.safetensors cannot be read \(.*header", lines[-1])


def test_a_newer_format_asks_for_an_update(store: CheckpointStore, lines: list[str]) -> None:
    store.save(snapshot_of(1))
    path = store.save(snapshot_of(2))
    rewrite(path, format=2, news="unheard of")
    assert newest(store).state.step == 1
    assert lines[-1].endswith(
        "state.json has format 2, and this smolcluster reads up to 1: update it"
    )


def test_a_state_too_large_is_neither_read_nor_written(
    store: CheckpointStore, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save(snapshot_of(1))
    monkeypatch.setattr(room, "MAX_STATE_NBYTES", 500)
    assert store.newest_good() is None
    assert "state.json is larger than 500 B" in lines[-1]
    with pytest.raises(CheckpointError, match=r"the progress of step 2 takes .* at most 500 B"):
        store.save(snapshot_of(2))
    assert steps_in(store) == [1]


def test_when_all_are_damaged_there_is_none(store: CheckpointStore, lines: list[str]) -> None:
    assert store.newest_good() is None
    assert store.list() == []
    for step in (1, 2):
        flip(MODEL_FILE)(store.save(snapshot_of(step, val_loss=1.0)))
    lines.clear()
    assert store.newest_good() is None
    assert len(lines) == 2
    assert best_step(store) is None


def test_what_a_server_deletes_meanwhile_is_not_damaged(
    store: CheckpointStore, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store, 1, 2, 3)
    lines.clear()
    read = room._read_state

    def deleting(folder: Path) -> CheckpointState:
        if folder.name != "step-00000001":
            shutil.rmtree(folder)
        return read(folder)

    monkeypatch.setattr(room, "_read_state", deleting)
    assert newest(store).state.step == 1
    store.save(snapshot_of(2))
    assert [info.step for info in store.list()] == [1]
    assert [line for line in lines if line.startswith("WARNING")] == []


def test_a_file_that_may_not_be_read_is_not_to_be_removed(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save(snapshot_of(1))
    monkeypatch.setattr(room, "_sha256", raiser(PermissionError(errno.EACCES, "x")))
    [info] = store.list()
    assert info.problem is not None
    assert info.problem.endswith(
        "model.safetensors cannot be read (Permission denied); mend the folder's rights"
    )


def test_a_folder_that_cannot_be_read_is_an_error_not_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot read .*checkpoints: Not a directory"):
        new_store(tmp_path).newest_good()


# What is kept


def test_the_last_ones_and_the_best_are_kept(tmp_path: Path) -> None:
    store = new_store(tmp_path, keep_last=2)
    kept = []
    for step, loss in enumerate([0.5, 0.2, 0.4, None, 0.3, 0.2, 0.9], start=1):
        store.save(snapshot_of(step, val_loss=loss))
        kept.append(steps_in(store))
    assert kept == [[1], [1, 2], [2, 3], [2, 3, 4], [2, 4, 5], [5, 6], [6, 7]]
    assert (store.folder / LATEST).readlink() == Path("step-00000007")
    assert (store.folder / BEST).readlink() == Path("step-00000006")
    assert best_step(store) == 6


def test_the_next_best_serves_where_the_best_is_damaged(store: CheckpointStore) -> None:
    for step, loss in ((1, 0.3), (2, 0.1), (3, 0.2)):
        store.save(snapshot_of(step, val_loss=loss))
    flip(MODEL_FILE)(store.folder / "step-00000002")
    assert best_step(store) == 3


def test_a_list_tells_what_there_is(store: CheckpointStore) -> None:
    path = store.save(snapshot_of(3, train_loss=0.6, val_loss=0.5))
    damaged = store.save(snapshot_of(4))
    (damaged / STATE_FILE).unlink()
    good, bad = store.list()
    assert (good.step, good.path, good.problem) == (3, path, None)
    assert (good.train_loss, good.val_loss) == (0.6, 0.5)
    assert good.written_at == "2026-11-18T11:06:40.000Z"
    assert good.nbytes == sum((path / name).stat().st_size for name in FILES)
    assert (bad.step, bad.train_loss, bad.val_loss, bad.written_at) == (4, None, None, None)
    assert bad.problem is not None
    assert bad.nbytes > 0


def test_damaged_ones_do_not_count_and_are_left_to_be_looked_at(tmp_path: Path) -> None:
    store = new_store(tmp_path, keep_last=2)
    save(store, 1, 2, 3)
    truncate(MODEL_FILE)(store.folder / "step-00000003")
    store.save(snapshot_of(4))
    assert steps_in(store) == [2, 3, 4]


def test_an_abandoned_time_line_is_not_gone_on_with(store: CheckpointStore) -> None:
    """After resuming from step 2, step 3 of the new time line is newer than step 4 of the old one."""
    for step in (1, 2, 4, 5):
        store.save(snapshot_of(step, val_loss={5: 0.1}.get(step)))
    store.save(snapshot_of(3))
    assert steps_in(store) == [2, 3, 5], "4 is abandoned, 5 is the best"
    assert newest(store).state.step == 3
    flip(MODEL_FILE)(store.folder / "step-00000003")
    assert newest(store).state.step == 2


def test_without_the_link_the_highest_step_is_the_newest(store: CheckpointStore) -> None:
    save(store, 1, 2)
    (store.folder / LATEST).unlink()
    assert newest(store).state.step == 2


def test_a_step_that_is_reached_again_is_replaced(store: CheckpointStore) -> None:
    flip(MODEL_FILE)(store.save(snapshot_of(1, incarnation="a1")))
    store.save(snapshot_of(1, incarnation="b2"))
    assert newest(store).state.incarnation == "b2"
    assert names_in(store) == ["step-00000001"]


def test_the_best_link_goes_when_nothing_is_the_best(store: CheckpointStore) -> None:
    store.save(snapshot_of(1, val_loss=0.5))
    store.save(snapshot_of(1))
    assert not (store.folder / BEST).is_symlink()


# A disk that fails


def raiser(error: Exception) -> Callable[..., None]:
    def fail(*_args: object, **_options: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("place", "error", "sentence"),
    [
        ((room, "save_file"), FULL_DISK, "No space left on device; free some space"),
        ((os, "fsync"), OSError(errno.ENOSPC, "x"), "No space left on device; free some space"),
        ((os, "mkdir"), OSError(errno.EACCES, "x"), "Permission denied; mend the folder's rights"),
        ((os, "rename"), OSError(errno.EROFS, "x"), "Read-only file system; mend the folder's"),
        ((os, "fsync"), OSError(errno.EIO, "x"), "Input/output error; look at the disk"),
    ],
)
def test_a_failing_disk_is_one_sentence_and_leaves_the_old_ones(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: tuple[object, str],
    error: Exception,
    sentence: str,
) -> None:
    store = new_store(tmp_path, keep_last=1)
    store.save(snapshot_of(1))
    with monkeypatch.context() as failing:
        failing.setattr(*place, raiser(error))
        with pytest.raises(CheckpointError, match=rf"cannot write .*step-00000002: {sentence}"):
            store.save(snapshot_of(2))
    assert names_in(store) == ["step-00000001"]
    assert newest(store).state.step == 1
    store.save(snapshot_of(2))
    assert newest(store).state.step == 2


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_real_limit_on_files_is_told_in_the_systems_words(
    tmp_path: Path, store: CheckpointStore
) -> None:
    report = tmp_path / "report"
    snapshot = snapshot_of(1)
    pid = os.fork()
    if pid == 0:
        descriptor = os.open(report, os.O_WRONLY | os.O_CREAT)
        resource.setrlimit(resource.RLIMIT_FSIZE, (400, 400))
        try:
            store.save(snapshot)
        except CheckpointError as error:
            os.write(descriptor, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert report.read_text().endswith("step-00000001: File too large; look at the disk")
    assert names_in(store) == []


def test_old_ones_that_cannot_be_deleted_do_not_fail_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    store = new_store(tmp_path, lines, keep_last=1)
    store.save(snapshot_of(1))
    rename = os.rename

    def stubborn(source: Path, target: Path) -> None:
        if Path(source).name == "step-00000001":
            raise OSError(errno.EACCES, "x")
        rename(source, target)

    monkeypatch.setattr(os, "rename", stubborn)
    store.save(snapshot_of(2))
    assert steps_in(store) == [1, 2]
    assert "WARNING cannot write old checkpoints" in lines[-1]


# Restoring into something else


def bigger() -> Replica:
    return Replica(SimpleNN(6, 16, 3), "adam")


def renamed() -> Replica:
    return Replica(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)), "adam")


def partly_frozen() -> Replica:
    model = SimpleNN(6, 8, 3)
    model.get_parameter("fc1.bias").requires_grad_(False)
    return Replica(model, "adam")


def with_more() -> Replica:
    model = SimpleNN(6, 8, 3)
    model.extra = nn.Linear(2, 2)
    return Replica(model, "adam")


@pytest.mark.parametrize(
    ("replica", "sentence"),
    [
        (bigger(), r"holds fc1\.weight as float32 of shape \(8, 6\), here it is .* \(16, 6\)"),
        (new_replica(dtype=torch.float64), r"holds fc1\.weight as float32 .* here it is float64"),
        (renamed(), r"model\.safetensors lacks 0\.weight, float32 of shape \(8, 6\)"),
        (with_more(), r"lacks extra\.weight, float32 of shape \(2, 2\)"),
        (partly_frozen(), r"a model with other frozen parameters"),
        (new_replica("sgd"), r"optimizer\.safetensors holds exp_avg, .*, unknown here"),
    ],
)
def test_nothing_is_restored_into_something_else(
    store: CheckpointStore, replica: Replica, sentence: str
) -> None:
    store.save(snapshot_of(3))
    before = {name: tensor.clone() for name, tensor in tensors_of(replica).items()}
    with pytest.raises(CheckpointError, match=f"{sentence}.*resume with the configuration of run"):
        restore(replica, newest(store))
    for name, tensor in tensors_of(replica).items():
        assert torch.equal(tensor, before[name]), name


def test_a_model_that_lost_a_layer_is_told(store: CheckpointStore) -> None:
    store.save(snapshot_of(1, with_more()))
    with pytest.raises(CheckpointError, match=r"holds extra\.\w+, float32 of shape .*unknown here"):
        restore(new_replica(), newest(store))


@pytest.mark.parametrize(
    ("differing", "sentence"),
    [
        ({"algorithm": "syncps"}, "trained by algorithm edp, not by syncps: resume it with edp"),
        ({"seed": 43}, "began with seed 42, not 43, .*: set seed=42"),
        ({"dataset_fingerprint": "e" * 64}, "on other data .fingerprint d{12}, here e{12}.: give"),
        ({"model_fingerprint": "f" * 64}, "of another model .fingerprint .*, here f{12}.: set"),
    ],
)
def test_a_run_goes_on_with_what_it_began_with(
    store: CheckpointStore, differing: dict[str, object], sentence: str
) -> None:
    store.save(snapshot_of(5))
    same: dict[str, Any] = {
        "algorithm": "edp",
        "dataset_fingerprint": "d" * 64,
        "seed": 42,
        "model_fingerprint": new_replica().fingerprint,
    }
    check_same(newest(store).state, **same)
    with pytest.raises(CheckpointError, match=f"step 5 of run edp-1 .*{sentence}.*a new run"):
        check_same(newest(store).state, **(same | differing))


# Export


def test_the_best_models_file_is_exported_and_nothing_is_overwritten(
    tmp_path: Path, store: CheckpointStore
) -> None:
    store.save(snapshot_of(2, val_loss=0.5))
    best = store.best()
    assert best is not None
    target = export(best, tmp_path / "new" / "folder")
    assert target == tmp_path / "new" / "folder" / MODEL_FILE
    model = SimpleNN(6, 8, 3)
    model.load_state_dict(load_file(target))
    assert all_equal(model.get_parameter("fc1.weight"), 2)
    target.write_bytes(b"precious")
    with pytest.raises(CheckpointError, match="exists and is not overwritten: name another folder"):
        export(best, target.parent)
    assert target.read_bytes() == b"precious"
    target.unlink()
    target.symlink_to(tmp_path / "a disk that is not there")
    with pytest.raises(CheckpointError, match="exists and is not overwritten"):
        export(best, target.parent)
    assert target.is_symlink()


def test_what_cannot_be_exported_is_told_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: CheckpointStore
) -> None:
    store.save(snapshot_of(2))
    found = newest(store)
    (tmp_path / "file").write_text("")
    with pytest.raises(
        CheckpointError, match=r"cannot write .*file/sub/model\.safetensors: Not a dir"
    ):
        export(found, tmp_path / "file" / "sub")
    with pytest.raises(CheckpointError, match=r"cannot write .*: File name too long"):
        export(found, tmp_path / ("x" * 300))
    with monkeypatch.context() as failing:
        failing.setattr(shutil, "copyfile", raiser(OSError(errno.ENOSPC, "x")))
        with pytest.raises(CheckpointError, match="No space left on device; free some space"):
            export(found, tmp_path / "out")
    flip(MODEL_FILE)(found.path)
    with pytest.raises(CheckpointError, match="does not have the SHA-256"):
        export(found, tmp_path / "out")
    shutil.rmtree(found.path)
    with pytest.raises(CheckpointError, match=r"step-00000002/model.safetensors cannot be read"):
        export(found, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


# The writer


class Gated(CheckpointStore):
    """A store whose disk is stuck until the gate opens, and fails with what `errors` holds."""

    def __init__(self, tmp_path: Path, lines: list[str]) -> None:
        super().__init__(tmp_path, 9, logger(lines))
        self.entered, self.gate = threading.Semaphore(0), threading.Event()
        self.errors: list[Exception | None] = []
        self.saved: list[int] = []

    def save(self, snapshot: Snapshot) -> Path:
        self.entered.release()
        assert self.gate.wait(DEADLINE_S)
        if self.errors and (error := self.errors.pop(0)):
            raise error
        self.saved.append(snapshot.state.step)
        return self.folder


def written(writer: CheckpointWriter) -> Snapshot:
    """The next snapshot that was written, or could not be."""
    deadline = Deadline(DEADLINE_S)
    while (spare := writer.take_spare()) is None and not deadline.expired:
        time.sleep(0.001)
    assert spare is not None
    return spare


def test_a_stuck_disk_stops_nobody_and_the_newest_waits(tmp_path: Path) -> None:
    """It is written at the end."""
    lines: list[str] = []
    store = Gated(tmp_path, lines)
    with CheckpointWriter(store, logger(lines)) as writer:
        writer.submit(snapshot_of(1))
        assert store.entered.acquire(timeout=DEADLINE_S)
        for step in (2, 3, 4):
            writer.submit(snapshot_of(step))
        store.gate.set()
    assert store.saved == [1, 4]
    assert lines == [
        "DEBUG step 2 is not saved: the disk was busy until step 3 came",
        "DEBUG step 3 is not saved: the disk was busy until step 4 came",
    ]


def test_who_is_told_of_a_step_that_is_not_saved_hears_why(tmp_path: Path) -> None:
    store, told = Gated(tmp_path, []), list[tuple[int, Exception]]()
    errors = [CheckpointError("a full disk"), OSError(errno.EIO, "I/O error")]
    store.errors = [*errors]
    store.gate.set()
    with CheckpointWriter(store, logger([]), on_not_saved=lambda *it: told.append(it)) as writer:
        for step in (1, 2, 3):
            writer.submit(snapshot_of(step))
            written(writer)
    assert (told, store.saved) == ([*enumerate(errors, 1)], [3])


def test_a_disk_that_hangs_does_not_keep_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "EXIT_TIMEOUT_S", 0.05)
    lines, told = list[str](), list[tuple[int, Exception]]()
    store = Gated(tmp_path, lines)
    with CheckpointWriter(store, logger(lines), on_not_saved=lambda *it: told.append(it)) as writer:
        writer.submit(snapshot_of(1))
    assert "WARNING the last checkpoint is still being written after" in lines[0]
    assert [step for step, _ in told] == [1]
    store.gate.set()
    written(writer)


class Growing(Gated):
    """A store that is said to have written `nbytes` of a checkpoint, from the second look on."""

    nbytes, num_looks = 1, 0

    def draft_nbytes(self) -> int:
        self.num_looks += 1
        return self.nbytes if self.num_looks > 1 else 0


def test_a_last_checkpoint_that_gets_on_is_waited_for_and_said_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it takes: here more than three times as long as one that does not."""
    monkeypatch.setattr(room, "PROGRESS_S", 0.001)
    lines, told = list[str](), list[int]()
    store = Growing(tmp_path, lines)

    def write_more() -> None:
        told.append(store.nbytes)
        store.nbytes += 1
        if store.nbytes > 4:
            store.gate.set()

    def now() -> float:
        return len(told) * 0.9 * room.EXIT_TIMEOUT_S

    with CheckpointWriter(store, logger(lines), on_progress=write_more, now=now) as writer:
        writer.submit(snapshot_of(1))
    assert told[:4] == [1, 2, 3, 4]
    assert not lines and store.saved == [1]


def test_a_checkpoint_gets_on_as_it_is_flushed_and_hashed(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = mmap.ALLOCATIONGRANULARITY
    monkeypatch.setattr(room, "FLUSHED_NBYTES", page)
    replica = Replica(nn.Linear(page, 1), "sgd")
    place = store.save(snapshot_of(1, replica))
    sizes = [(place / name).stat().st_size for name in (MODEL_FILE, OPTIMIZER_FILE)]
    assert sizes[0] // page == 4
    assert store.draft_nbytes() == sum(sizes) + 4 * page


def test_a_last_checkpoint_that_lies_there_already_does_not_get_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "PROGRESS_S", 0.001)
    lines, told = list[str](), list[bool]()
    store = Growing(tmp_path, lines)
    store.num_looks = 1

    def now() -> float:
        return room.EXIT_TIMEOUT_S if store.num_looks > 5 else 0.0

    with CheckpointWriter(
        store, logger(lines), on_progress=lambda: told.append(True), now=now
    ) as writer:
        writer.submit(snapshot_of(1))
    assert not told and "is given up" in lines[0]
    store.gate.set()
    written(writer)


def test_a_failure_is_told_once_a_kind_until_it_works_again(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    errors = [
        FULL_DISK,
        FULL_DISK,
        OSError(errno.EACCES, "x"),
        OSError(errno.ENOSPC, "x"),
        ValueError("a mistake"),
        ValueError("a mistake"),
        None,
        FULL_DISK,
    ]

    def fail_or_save(tensors: dict[str, Tensor], path: Path) -> None:
        if path.name == MODEL_FILE and (error := errors.pop(0)):
            raise error
        save_file(tensors, path)

    monkeypatch.setattr(room, "save_file", fail_or_save)
    with CheckpointWriter(store, logger(lines)) as writer:
        for step in range(1, 9):
            writer.submit(snapshot_of(step))
            written(writer)
    told = [line.replace(str(store.folder), "…") for line in lines]
    full = "cannot write checkpoint …/step-{}: No space left on device; free some space"
    assert told == [
        "WARNING step 1 is not saved, training goes on: " + full.format("00000001"),
        "WARNING step 3 is not saved, training goes on: cannot write checkpoint …/step-00000003: "
        "Permission denied; mend the folder's rights",
        "WARNING step 5 is not saved, training goes on: ValueError('a mistake')",
        "WARNING step 8 is not saved, training goes on: " + full.format("00000008"),
        "WARNING the last step, 8, is not saved; see the warning before and what is left with "
        "`uv run smolcluster checkpoints`",
    ]
    assert steps_in(store) == [7]


def test_the_writer_says_what_it_is_told_of_the_step_that_is_saved_and_of_no_other(
    store: CheckpointStore,
) -> None:
    lines: list[str] = []
    with CheckpointWriter(store, logger(lines)) as writer:
        writer.submit(snapshot_of(1))
        writer.tell(state_of(1, val_loss=0.5))
        eventually(store.best)
        writer.tell(state_of(7, val_loss=0.25))
        writer.submit(snapshot_of(2))
    assert [(each.step, each.val_loss) for each in store.list()] == [(1, 0.5), (2, None)]
    assert lines == []


def test_the_writer_keeps_one_spare_snapshot_for_its_memory(store: CheckpointStore) -> None:
    saved = threading.Semaphore(0)
    with CheckpointWriter(store, logger([]), lambda *_: saved.release()) as writer:
        assert writer.take_spare() is None
        snapshots = [snapshot_of(step) for step in (1, 2)]
        for snapshot in snapshots:
            writer.submit(snapshot)
            assert saved.acquire(timeout=DEADLINE_S)
    gone = weakref.ref(snapshots[0])
    assert writer.take_spare() is snapshots[1]
    assert writer.take_spare() is None
    del snapshot, snapshots
    assert gone() is None


def test_a_spare_snapshot_is_written_over(tmp_path: Path) -> None:
    replica = new_replica()
    first = Snapshot.of(replica, state_of(1), {"residual": torch.ones(3)})
    memory = {name: tensor.data_ptr() for name, tensor in first.optimizer.items()}
    replica.params.add_(1.0)
    replica.optimizer.state["exp_avg"].add_(2.0)
    second = Snapshot.of(replica, state_of(2), {"residual": torch.zeros(3)}, first)
    fresh = Snapshot.of(replica, state_of(2), {"residual": torch.zeros(3)})
    assert {name: tensor.data_ptr() for name, tensor in second.optimizer.items()} == memory
    assert second.weights.data_ptr() == first.weights.data_ptr()
    for kept, expected in ((second.model, fresh.model), (second.optimizer, fresh.optimizer)):
        assert kept.keys() == expected.keys()
        assert all(torch.equal(kept[name], expected[name]) for name in kept)


def test_an_earlier_step_can_be_the_one_to_go_on_from(store: CheckpointStore) -> None:
    save(store, 10, 20, 30)
    store.make_latest(20)
    assert newest(store).state.step == 20
    store.save(snapshot_of(25))
    assert newest(store).state.step == 25
    with pytest.raises(CheckpointError, match="no checkpoint of step 7"):
        store.make_latest(7)


def test_what_becomes_known_of_a_saved_step_is_said_and_may_make_it_the_best(
    store: CheckpointStore,
) -> None:
    store.save(snapshot_of(1, val_loss=0.5))
    store.save(snapshot_of(2))
    store.tell(state_of(2, val_loss=0.25, progress={"told": 1}))
    found = store.newest_good()
    assert found is not None
    assert (found.state.step, found.state.val_loss) == (2, 0.25)
    assert found.state.progress == {"told": 1}
    assert (store.folder / BEST).readlink() == Path("step-00000002")
    with pytest.raises(CheckpointError):
        store.tell(state_of(3))
