"""Checkpoints: what a run needs to go on, on disk, whole or not at all.

    <folder>/step-00001000/model.safetensors      parameters and buffers of the model, by name
                           optimizer.safetensors  flat tensors by name: exp_avg, exp_avg_sq, step, …
                           state.json             where the run stood, and the SHA-256 of the other two
    <folder>/latest, best                         symbolic links, for people and for the order below

A checkpoint is written into a hidden folder `.step-00001000.<random>.tmp`, flushed to the disk, and renamed.
One that is replaced (a step that was reached again) steps aside as `.step-00001000.old.tmp` meanwhile and
counts as long as its place is empty. So a crash leaves the old one or the new one, and hidden folders that
the next save sweeps away. Only a save does: whoever merely looks may do so while a server writes.

When a run was resumed from an older checkpoint, those of later steps belong to an abandoned time line. The
link `latest` tells: what lies beyond it is the last choice, and goes with the next save.
"""

import errno
import fcntl
import hashlib
import json
import logging
import mmap
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal, Self, TypeVar

import torch
from pydantic import (
    BaseModel,
    Field,
    JsonValue,
    StringConstraints,
    ValidationError,
)
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from smolcluster.errors import CheckpointError
from smolcluster.runs.files import FULL, utc_timestamp
from smolcluster.runs.model_file import Measured, Strict, problem_of
from smolcluster.runs.paths import CHECKPOINT
from smolcluster.training.kept import on_cpu
from smolcluster.training.replica import AVERAGE, Replica
from smolcluster.utils.replacing import replacing
from smolcluster.utils.units import format_bytes, format_duration
from smolcluster.utils.words import as_command, one_line

FORMAT: Final = 1
MODEL_FILE = "model.safetensors"
EMA_FILE = "ema.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "state.json"
LATEST = "latest"
BEST = "best"
MAX_STATE_NBYTES = 16 * 1024 * 1024
EXIT_TIMEOUT_S = 120.0
PROGRESS_S = 0.5
FLUSHED_NBYTES, HASHED_NBYTES = 64 << 20, 1 << 20
"""Of a file, flushed and hashed at once: a multiple of the system's pages."""

_TENSOR_FILES = frozenset({MODEL_FILE, OPTIMIZER_FILE})
_ASIDE = re.compile(r"\.step-(\d{8,16})\.old\.tmp")
_HIDDEN = ".step-*.tmp"
_OS_ERROR = re.compile(r"os error (\d+)")
_NO_FOLDER_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP})
_USE_ANOTHER = "remove that checkpoint, or resume from another one of the run"
_REMEDIES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EACCES: "mend the folder's rights",
    errno.EPERM: "mend the folder's rights",
    errno.EROFS: "mend the folder's rights",
}


Count = Annotated[int, Field(ge=0, lt=2**63)]
Text = Annotated[str, StringConstraints(min_length=1, max_length=200)]
Shape = TypeVar("Shape", bound=BaseModel)
Progress = dict[str, JsonValue]
"""What an algorithm needs to go on, besides tensors: plain JSON."""


class TrainingState(Strict):
    """Where a run stands, as its algorithm tells it. A loss that is not finite becomes None."""

    run_id: Text
    algorithm: Text
    incarnation: Text = Field(description="Which start of the server this is.")
    step: Count = Field(description="Optimizer steps taken: the version of the weights.")
    samples_applied: Count
    epoch: Count
    dataset_fingerprint: Text
    seed: Count = Field(description="Which orders its epochs have.")
    codec: Text
    train_loss: Measured = None
    val_loss: Measured = None
    progress: Progress = Field(
        {}, description="What else the algorithm needs to go on; nobody else looks into it."
    )


class FileEntry(Strict):
    """Size and SHA-256 of a file beside `state.json`."""

    nbytes: Count
    sha256: Text


class CheckpointState(TrainingState):
    """What `state.json` says."""

    format: Literal[1] = FORMAT
    model_fingerprint: Text
    base: Text | None = Field(
        None, description="Of adapters: what they were put on, which is not saved with them."
    )
    written_at: Text
    files: dict[str, FileEntry]
    sha256: str | None = Field(None, description="Of all other fields, as compact JSON in hex.")

    def seal(self) -> str:
        """What `sha256` has to be."""
        unsaid = {"sha256", "base"} if self.base is None else {"sha256"}  # as before there was one
        return hashlib.sha256(self.model_dump_json(exclude=unsaid).encode()).hexdigest()


@dataclass(frozen=True)
class Snapshot:
    """A copy of all that a checkpoint holds, on the CPU, which later steps do not change.

    `model` and `optimizer` are tensors by name, `optimizer` with what else was handed over; `weights`, flat
    (num_params,), are those of `model` that are trained, in the same memory.
    """

    state: TrainingState
    model_fingerprint: str
    base: str | None
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    weights: Tensor

    @classmethod
    def of(
        cls,
        replica: Replica,
        state: TrainingState,
        extra: Mapping[str, Tensor] | None = None,
        spare: Self | None = None,
    ) -> Self:
        """Copy the replica, and the tensors `extra`.

        The memory of `spare`, a snapshot of the same replica that nobody needs any more, is used again: five
        times as fast as new memory, which the system has to clear first.

        Raises:
            ValueError: a name in `extra` is one of the optimizer's.
        """
        extra = extra or {}
        if taken := sorted(extra.keys() & replica.optimizer.state.keys()):
            raise ValueError(f"{taken[0]!r} names a tensor of the optimizer")
        flat = replica.snapshot(spare.weights if spare else None)
        places, old = dict(replica.layers), spare.optimizer if spare else {}
        return cls(
            state=state.model_copy(deep=True),
            model_fingerprint=replica.fingerprint,
            base=replica.base,
            model={
                name: flat[places[name]].view(tensor.shape) if name in places else on_cpu(tensor)
                for name, tensor in model_tensors(replica).items()
            },
            optimizer={
                name: old[name].copy_(tensor) if name in old else on_cpu(tensor)
                for name, tensor in optimizer_tensors(replica, extra).items()
            },
            weights=flat,
        )


@dataclass
class Checkpoint:
    """A checkpoint that was read and found good. Its tensors are on the CPU, apart from the files."""

    path: Path
    state: CheckpointState
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]

    def release(self) -> None:
        """Its tensors have been used: give their memory back."""
        self.model = self.optimizer = {}


@dataclass(frozen=True)
class CheckpointInfo:
    """One line of a list; what a damaged checkpoint does not tell is None, and `problem` says why."""

    path: Path
    step: int
    nbytes: int
    train_loss: float | None
    val_loss: float | None
    written_at: str | None
    problem: str | None


class CheckpointStore:
    """The checkpoints of one run. One process at a time may save (see `run_lock`); any may read."""

    def __init__(
        self,
        folder: Path,
        keep_last: int,
        log: logging.Logger,
        *,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Keep the last `keep_last` checkpoints in `folder`, which the first save makes, and the best one."""
        self.folder = folder
        self._keep_last = keep_last
        self._log = log
        self._now = now
        self._sealed_nbytes = 0
        """Of drafts, flushed or hashed so far."""

    def draft_nbytes(self) -> int:
        """What has been written of drafts, and flushed and hashed: it changes while the disk gets on."""
        with suppress(OSError):  # it was renamed meanwhile
            files = (file for draft in self.folder.glob(_HIDDEN) for file in draft.glob("*"))
            return self._sealed_nbytes + sum(file.stat().st_size for file in files)
        return self._sealed_nbytes

    def save(self, snapshot: Snapshot) -> Path:
        """Write a checkpoint, let `latest` and `best` point right, and delete those no longer kept.

        Returns when it would survive a loss of power. One of the same step is replaced. Damaged ones
        do not count and are left for a person to look at.

        Raises:
            CheckpointError: it cannot be written; the older ones are still there. If the disk failed
                at the very end, the new one may be there as well.
        """
        draft = self.begin(snapshot.state.step)
        mode = draft.stat().st_mode & 0o666  # save_file would leave them to their owner alone
        try:
            for name, tensors in (
                (MODEL_FILE, snapshot.model),
                (OPTIMIZER_FILE, snapshot.optimizer),
            ):
                save_file(dict(tensors), draft / name)
                (draft / name).chmod(mode)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(draft, ignore_errors=True)
            raise _cannot_write(
                f"checkpoint {self.folder / _name(snapshot.state.step)}", error
            ) from error
        return self.finish(draft, snapshot.state, snapshot.model_fingerprint, snapshot.base)

    def begin(self, step: int) -> Path:
        """An empty folder for the tensor files of a step, which `finish` makes a checkpoint.

        Raises:
            CheckpointError: it cannot be made.
        """
        draft = self._hidden(_name(step))
        try:
            self._make_folder()
            self._sweep()
            draft.mkdir()
        except OSError as error:
            raise _cannot_write(f"checkpoint {self.folder / _name(step)}", error) from error
        return draft

    def finish(
        self, draft: Path, state: TrainingState, model_fingerprint: str, base: str | None
    ) -> Path:
        """Make a checkpoint of a folder with both tensor files; see `save`.

        Raises:
            CheckpointError: as `save`; the folder is gone.
        """
        place = self.folder / _name(state.step)
        began = time.monotonic()
        try:
            written = self._seal(draft, state, model_fingerprint, base)
            self._put_in_place(draft, place)
            self._link(LATEST, place.name)
        except OSError as error:
            raise _cannot_write(f"checkpoint {place}", error) from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        took = format_duration(time.monotonic() - began)
        size = format_bytes(sum(entry.nbytes for entry in written.files.values()))
        self._log.debug("saved step %d: %s in %s", state.step, size, took)
        self._tidy(state.step)
        return place

    def tell(self, state: TrainingState) -> None:
        """Let the checkpoint of a step say what has become known of its weights since it was saved.

        Raises:
            CheckpointError: there is none of that step, it is damaged, or cannot be written.
        """
        place = self.folder / _name(state.step)
        known = {"val_loss": state.val_loss, "progress": state.progress}
        written = _read_state(place).model_copy(update=known)
        try:
            with replacing(place / STATE_FILE) as draft:
                draft.write_bytes(_encode(written))
        except OSError as error:
            raise _cannot_write(f"checkpoint {place}", error) from error
        self._tidy(state.step)

    def newest_good(self, *, is_loaded: bool = True) -> Checkpoint | None:
        """The checkpoint to go on from; None when there is none. Damaged ones are skipped with a warning.

        `is_loaded`: with its tensors; else they are checked, and stay in their files.
        """
        return self._first_good(self._newest_first(), is_loaded=is_loaded)

    def newest_step(self) -> int | None:
        """That of the checkpoint to go on from, which is whole at a glance; None: there is none.

        Raises:
            CheckpointError: the folder cannot be read.
        """
        for path in self._newest_first():
            with suppress(CheckpointError):
                return _read_state(path).step
        return None

    def make_latest(self, step: int) -> None:
        """Let a checkpoint be the one to go on from, whatever was trained after it.

        Raises:
            CheckpointError: there is none of that step, or it is damaged.
        """
        places = self._places()
        if step not in places:
            known = ", ".join(f"{each:,}" for each in sorted(places)) or "none"
            raise CheckpointError(
                f"{self.folder} has no checkpoint of step {step:,} (known: {known})"
            )
        _load(places[step])
        try:
            self._link(LATEST, places[step].name)
        except OSError as error:
            raise _cannot_write(f"{self.folder / LATEST}", error) from error

    def count(self) -> int:
        return len(self._places())

    def best(self) -> Checkpoint | None:
        """The checkpoint of the lowest validation loss; None when none has one."""
        states = self._readable()
        return self._first_good(states[step][0] for step in _best_first(states))

    def list(self) -> list[CheckpointInfo]:
        """All checkpoints by step. Every file is read, to tell which ones are damaged."""
        infos = [_info(step, path) for step, path in sorted(self._places().items())]
        return [info for info in infos if info.path.exists()]  # a server may have deleted some

    def _first_good(self, paths: Iterable[Path], *, is_loaded: bool = True) -> Checkpoint | None:
        for path in paths:
            try:
                return _load(path, is_loaded=is_loaded)
            except CheckpointError as error:
                if path.exists():  # else a server has deleted it meanwhile
                    self._log.warning("a checkpoint is skipped: %s", error)
        return None

    def _places(self) -> dict[int, Path]:
        """The folder of each step; one that stepped aside counts where its place is empty."""
        try:
            found = list(self.folder.iterdir())
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise CheckpointError(
                f"cannot read {self.folder}: {_reason(error)}; mend the folder's rights"
            ) from error
        asides = {int(match[1]): path for path in found if (match := _ASIDE.fullmatch(path.name))}
        return asides | {
            int(match[1]): path for path in found if (match := CHECKPOINT.fullmatch(path.name))
        }

    def _newest_first(self) -> Iterable[Path]:
        """By step, downwards; but what lies beyond `latest` comes last."""
        places = self._places()
        steps = sorted(places, reverse=True)
        latest = self._latest_step()
        if latest is not None:
            steps.sort(key=lambda step: step > latest)
        return [places[step] for step in steps]

    def _latest_step(self) -> int | None:
        try:
            match = CHECKPOINT.fullmatch(str((self.folder / LATEST).readlink()))
        except OSError:
            return None
        return int(match[1]) if match else None

    def _readable(self) -> dict[int, tuple[Path, CheckpointState]]:
        """Folder and state of each checkpoint that is whole at a glance, hashes aside."""
        found = {}
        for step, path in self._places().items():
            try:
                found[step] = (path, _read_state(path))
            except CheckpointError:
                continue
        return found

    def _make_folder(self) -> None:
        if not self.folder.is_dir():
            self.folder.mkdir(parents=True, exist_ok=True)
            _sync(self.folder.parent)

    def _sweep(self) -> None:
        """Put back what stepped aside and was not replaced; delete all else that is hidden."""
        for path in list(self.folder.glob(_HIDDEN)):
            match = _ASIDE.fullmatch(path.name)
            if match and not (place := self.folder / _name(int(match[1]))).exists():
                path.rename(place)
            else:
                _delete(path)

    def _seal(
        self, draft: Path, state: TrainingState, model_fingerprint: str, base: str | None
    ) -> CheckpointState:
        """Flush the tensor files in `draft`, and write beside them what belongs to them."""
        files = {}
        for name in (MODEL_FILE, OPTIMIZER_FILE):
            _flush(draft / name, self._got_on)
            _sync(draft / name)
            nbytes = (draft / name).stat().st_size
            files[name] = FileEntry(nbytes=nbytes, sha256=_sha256(draft / name, self._got_on))
        written = CheckpointState(
            **state.model_dump(),
            model_fingerprint=model_fingerprint,
            base=base,
            written_at=utc_timestamp(self._now()),
            files=files,
        )
        path = draft / STATE_FILE
        path.write_bytes(_encode(written))
        _sync(path)
        _sync(draft)
        return written

    def _got_on(self, nbytes: int) -> None:
        self._sealed_nbytes += nbytes

    def _put_in_place(self, draft: Path, place: Path) -> None:
        aside = self.folder / f".{place.name}.old.tmp"
        if replaced := place.exists():
            place.rename(aside)
        draft.rename(place)
        _sync(self.folder)
        if replaced:
            _delete(aside)

    def _link(self, name: str, target: str) -> None:
        beside = self._hidden(target)
        beside.symlink_to(target)
        beside.replace(self.folder / name)
        _sync(self.folder)

    def _hidden(self, name: str) -> Path:
        return self.folder / f".{name}.{secrets.token_hex(4)}.tmp"

    def _tidy(self, newest: int) -> None:
        """Keep the last ones up to `newest` and the best one; the new checkpoint is safe already."""
        states = self._readable()
        best = _best_first(states)[:1]
        own = sorted((step for step in states if step <= newest), reverse=True)
        try:
            if best:
                self._link(BEST, _name(best[0]))
            else:
                (self.folder / BEST).unlink(missing_ok=True)
            for step in states.keys() - {*own[: self._keep_last], *best}:
                hidden = self._hidden(_name(step))
                states[step][0].rename(hidden)  # half of one must not look like a checkpoint
                _delete(hidden)
        except OSError as error:
            self._log.warning("%s", _cannot_write(f"old checkpoints in {self.folder}", error))


class CheckpointWriter:
    """Writes snapshots in a thread of its own, so that training goes on meanwhile.

    Hashing and writing leave the interpreter to others. At most three snapshots are in memory: one that
    is being written, one that waits, and a spare one.
    """

    def __init__(
        self,
        store: CheckpointStore,
        log: logging.Logger,
        on_saved: Callable[[int, Path], None] = lambda *_: None,
        before_saving: Callable[[], None] = lambda: None,
        on_progress: Callable[[], None] = lambda: None,
        *,
        on_not_saved: Callable[[int, Exception], None] = lambda *_: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """In the writer's thread `before_saving` is called before a step is saved, and `on_saved` when it is,
        with the step and its folder, or `on_not_saved`, with why it is not; in the thread that waits for the
        end `on_progress`, as the disk gets on, and `on_not_saved` when it does not.
        """
        self._store = store
        self._log = log
        self._on_saved = on_saved
        self._before_saving = before_saving
        self._on_progress, self._on_not_saved = on_progress, on_not_saved
        self._now = now
        self._grown = 0
        self._changed = threading.Condition()
        self._waiting: Snapshot | None = None
        self._told: TrainingState | None = None
        self._spare: Snapshot | None = None
        self._ending = False
        self._reported: set[object] = set()
        self._submitted_step: int | None = None
        self._saved_step: int | None = None
        self._failed_step: int | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoints", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Write what waits, then end the thread; it is left when nothing was written for `EXIT_TIMEOUT_S`."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        self._wait_while_it_grows()
        if self._failed_step is not None:
            self._log.warning(
                f"the last step, {self._failed_step}, is not saved; see the warning before and what is left "
                f"with {as_command('checkpoints')}"
            )
        if self._thread.is_alive():
            self._log.warning(
                f"the last checkpoint is still being written after {format_duration(EXIT_TIMEOUT_S)} and is "
                f"given up; the one before it is the newest: look at the disk of {self._store.folder}"
            )
            if self._submitted_step is not None:
                stuck = CheckpointError(f"look at the disk of {self._store.folder}, which hangs")
                self._on_not_saved(self._submitted_step, stuck)

    def _wait_while_it_grows(self) -> None:
        over = threading.Event()
        looking = threading.Thread(target=self._see_growth, args=(over,), daemon=True)
        seen, since = self._grown, self._now()
        looking.start()
        while self._thread.is_alive() and self._now() < since + EXIT_TIMEOUT_S:
            self._thread.join(min(PROGRESS_S, EXIT_TIMEOUT_S))
            if self._grown != seen:
                seen, since = self._grown, self._now()
                self._on_progress()
        over.set()

    def _see_growth(self, over: threading.Event) -> None:
        """Count how often the disk got on; in a thread, for a disk that hangs does not answer."""
        known = self._store.draft_nbytes()
        while not over.wait(PROGRESS_S):
            nbytes = self._store.draft_nbytes()
            self._grown += nbytes != known
            known = nbytes

    def submit(self, snapshot: Snapshot) -> None:
        """Have it written as soon as the disk is free; never waits. Not after the writer's end.

        A snapshot that still waits then is dropped for this newer one, and the log says so.
        """
        with self._changed:
            dropped, self._waiting = self._waiting, snapshot
            self._submitted_step = snapshot.state.step
            self._spare = dropped or self._spare
            self._changed.notify_all()
        if dropped is not None:
            steps = dropped.state.step, snapshot.state.step
            self._log.debug("step %d is not saved: the disk was busy until step %d came", *steps)

    def tell(self, state: TrainingState) -> None:
        """What has become known of the last snapshot since it was submitted; said when that is saved."""
        with self._changed:
            self._told = state
            self._changed.notify_all()

    def take_spare(self) -> Snapshot | None:
        """A snapshot that is on the disk, or was dropped, for its memory to be used again."""
        with self._changed:
            spare, self._spare = self._spare, None
        return spare

    def _run(self) -> None:
        while (task := self._next()) is not None:
            if isinstance(task, TrainingState):
                self._say(task)
                continue
            self._write(task)
            with self._changed:
                self._spare = task

    def _next(self) -> Snapshot | TrainingState | None:
        """Wait for a snapshot, or for what is told of the one that is saved; None at the end."""
        with self._changed:
            while True:
                told, self._told = self._told, None
                if told is not None and told.step == self._saved_step:
                    return told
                if self._waiting is not None:
                    snapshot, self._waiting, self._told = self._waiting, None, told
                    return snapshot
                if self._ending:
                    return None
                self._changed.wait()

    def _say(self, told: TrainingState) -> None:
        try:
            self._store.tell(told)
        except Exception as error:  # whatever it is, a run is worth more than its checkpoint
            self._log.warning("step %d: its validation loss is not kept: %s", told.step, error)

    def _write(self, snapshot: Snapshot) -> None:
        """Save it, or warn: once a kind of error until a checkpoint succeeds again."""
        step = snapshot.state.step
        try:
            self._before_saving()
            place = self._store.save(snapshot)
            self._reported.clear()
            self._saved_step, self._failed_step = step, None
            self._on_saved(step, place)
        except Exception as error:  # whatever it is, a run is worth more than its checkpoint
            known = isinstance(error, CheckpointError)
            cause = error.__cause__ if known else error
            kind = _errno(error.__cause__) or type(cause)
            self._failed_step = step
            self._on_not_saved(step, error)
            if kind not in self._reported:
                self._reported.add(kind)
                said, trace = (error, None) if known else (repr(error), error)
                self._log.warning(
                    "step %d is not saved, training goes on: %s", step, said, exc_info=trace
                )


def restore(
    replica: Replica, checkpoint: Checkpoint, extra: Mapping[str, Tensor] | None = None
) -> None:
    """Copy a checkpoint's weights and optimizer state into `replica`: all or nothing.

    The tensors `extra`, which were handed to `Snapshot.of` by the same names, are filled as well.

    Raises:
        CheckpointError: the model, the optimizer or `extra` is not what was saved; the message names
            the first tensor that differs. Nothing has been changed.
    """
    state, folder = checkpoint.state, checkpoint.path
    model, optimizer = model_tensors(replica), optimizer_tensors(replica, extra)
    buffers = replica.buffers.by_name()
    model |= {name: buffers[name] for name in checkpoint.model if name in buffers}
    remedy = f"resume with the configuration of run {state.run_id}"
    if state.base != replica.base:
        raise CheckpointError(
            f"checkpoint {folder} is of adapters on {state.base or 'no base'}, here it is "
            f"{replica.base or 'none'}; {remedy}"
        )
    _check_tensors(folder / MODEL_FILE, checkpoint.model, model, remedy)
    if state.model_fingerprint != replica.fingerprint:
        raise CheckpointError(
            f"checkpoint {folder} is of a model with other frozen parameters or activations, "
            f"though all tensors have the same names and shapes; {remedy}"
        )
    _check_tensors(folder / OPTIMIZER_FILE, checkpoint.optimizer, optimizer, remedy)
    replica.buffers.will_be(checkpoint.model)
    with torch.no_grad():
        for live, stored in ((model, checkpoint.model), (optimizer, checkpoint.optimizer)):
            for name, tensor in live.items():
                fill(tensor, stored[name])
    replica.buffers.look()


def fill(place: Tensor, values: Tensor) -> None:
    """Copy `values` into a tensor, also if it was expanded: its equal elements share their memory."""
    once = tuple(slice(1) if stride == 0 else slice(None) for stride in place.stride())
    place[once].copy_(values[once])


def parse_progress(kind: type[Shape], stored: JsonValue, step: int) -> Shape:
    """What a checkpoint's progress says, as `kind`.

    Raises:
        CheckpointError: it is something else.
    """
    try:
        return kind.model_validate_json(json.dumps(stored))
    except ValidationError as error:
        raise CheckpointError(
            one_line(
                f"the progress of step {step} cannot be read: {problem_of(error)}; {_USE_ANOTHER}"
            )
        ) from None


def check_same(
    state: CheckpointState,
    *,
    model_fingerprint: str,
    dataset_fingerprint: str,
    algorithm: str,
    seed: int,
) -> None:
    """See to it that a run goes on with what it began with.

    Raises:
        CheckpointError: something differs; one sentence says what, and what to do.
    """
    if state.algorithm != algorithm:
        problem = (
            f"was trained by algorithm {state.algorithm}, not by {algorithm}: "
            f"resume it with {state.algorithm}"
        )
    elif state.seed != seed:
        problem = (
            f"began with seed {state.seed}, not {seed}, and with it the order of its samples: "
            f"set seed={state.seed}"
        )
    elif state.dataset_fingerprint != dataset_fingerprint:
        problem = (
            f"was trained on other data (fingerprint {state.dataset_fingerprint[:12]}, here "
            f"{dataset_fingerprint[:12]}): give it the same data, in the same form"
        )
    elif state.model_fingerprint != model_fingerprint:
        problem = (
            f"is of another model (fingerprint {state.model_fingerprint[:12]}, here "
            f"{model_fingerprint[:12]}): set it as it was then"
        )
    else:
        return
    raise CheckpointError(f"step {state.step} of run {state.run_id} {problem}, or begin a new run")


def export(checkpoint: Checkpoint, folder: Path) -> Path:
    """Copy a checkpoint's `model.safetensors` into `folder`, which is made if need be.

    The average of the weights, if the run has one, goes into `ema.safetensors` beside it.

    Raises:
        CheckpointError: there is such a file already, the checkpoint was damaged or deleted since it
            was read, or the copy cannot be written; nothing is left of it then.
    """
    source, target = checkpoint.path / MODEL_FILE, folder / MODEL_FILE
    _check_hash(source, checkpoint.state.files[MODEL_FILE])
    average = averaged(checkpoint)
    beside = [folder / EMA_FILE] if average else []
    for each in (target, *beside):
        if os.path.lexists(each):
            raise CheckpointError(
                f"{each} exists and is not overwritten: name another folder, or remove it"
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for each in beside:
            with replacing(each) as draft:
                save_file(dict(average), draft)
        with replacing(target) as draft:
            shutil.copyfile(source, draft)
    except (OSError, SafetensorError) as error:
        raise _cannot_write(str(target), error) from error
    return target


def averaged(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The model with the average of its weights in place of these; empty if the run has no average."""
    found = {
        name.removeprefix(AVERAGE): tensor
        for name, tensor in checkpoint.optimizer.items()
        if name.startswith(AVERAGE)
    }
    if not found:
        return {}
    return {
        name: found[name].view(tensor.shape) if name in found else tensor
        for name, tensor in checkpoint.model.items()
    }


def evaluated(checkpoint: Checkpoint) -> Mapping[str, Tensor]:
    """The model with the weights that its validation loss is of: their average, if the run has one."""
    return averaged(checkpoint) or checkpoint.model


def _name(step: int) -> str:
    return f"step-{step:08d}"


def model_tensors(replica: Replica) -> dict[str, Tensor]:
    """What is saved of the model: `Replica.saved_parameters`, and the buffers of its state."""
    return {**replica.saved_parameters(), **replica.buffers.to_save()}


def optimizer_tensors(
    replica: Replica, extra: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """What is saved of what the optimizer and the replica keep, and the tensors `extra`."""
    return {**replica.optimizer.state, **replica.kept(), **(extra or {})}


def _best_first(states: Mapping[int, tuple[Path, CheckpointState]]) -> list[int]:
    """Steps by validation loss, the later one first among equals."""
    losses = [(state.val_loss, -step) for step, (_, state) in states.items()]
    return [-step for _, step in sorted(pair for pair in losses if pair[0] is not None)]


def _info(step: int, path: Path) -> CheckpointInfo:
    state, problem = None, None
    try:
        state = _read_state(path)
        _check_files(path, state)
    except CheckpointError as error:
        problem = str(error)
    return CheckpointInfo(
        path=path,
        step=step,
        nbytes=sum(file.lstat().st_size for file in path.glob("*")),
        train_loss=state.train_loss if state else None,
        val_loss=state.val_loss if state else None,
        written_at=state.written_at if state else None,
        problem=problem,
    )


def _load(folder: Path, *, is_loaded: bool = True) -> Checkpoint:
    """Read a checkpoint; its tensors stay in their files unless they are to be loaded.

    Raises:
        CheckpointError: it is damaged, or too new.
    """
    state = _read_state(folder)
    _check_files(folder, state)
    if not is_loaded:
        return Checkpoint(folder, state, {}, {})
    return Checkpoint(
        folder, state, _load_tensors(folder / MODEL_FILE), _load_tensors(folder / OPTIMIZER_FILE)
    )


def _load_tensors(path: Path) -> dict[str, Tensor]:
    try:
        # Not mapped into memory: a disk that fails then ends as an error, not as a signal.
        return load_file(path, backend="pread")
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from error


def _read_state(folder: Path) -> CheckpointState:
    """Read `state.json` and compare the sizes of the other files.

    Raises:
        CheckpointError: something is damaged, missing, or too new.
    """
    path = folder / STATE_FILE
    try:
        with path.open("rb") as file:
            data = file.read(MAX_STATE_NBYTES + 1)
    except OSError as error:
        raise _unreadable(path, error) from error
    state = _decode(data, path)
    match = CHECKPOINT.fullmatch(folder.name) or _ASIDE.fullmatch(folder.name)
    if match is None or int(match[1]) != state.step:
        raise _damaged(path, f"is of step {state.step}")
    for name, entry in state.files.items():
        try:
            nbytes = (folder / name).stat().st_size
        except OSError as error:
            raise _unreadable(folder / name, error) from error
        if nbytes != entry.nbytes:
            raise _damaged(folder / name, f"has {nbytes} bytes, not {entry.nbytes}")
    return state


def _check_files(folder: Path, state: CheckpointState) -> None:
    for name, entry in state.files.items():
        _check_hash(folder / name, entry)


def _check_hash(path: Path, entry: FileEntry) -> None:
    try:
        digest = _sha256(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    if digest != entry.sha256:
        raise _damaged(path, f"does not have the SHA-256 that {STATE_FILE} tells")


def _encode(state: CheckpointState) -> bytes:
    """`state.json`.

    Raises:
        CheckpointError: it would be too large to be read again.
    """
    sealed = state.model_copy(update={"sha256": state.seal()})
    data = sealed.model_dump_json(indent=2).encode() + b"\n"
    if len(data) > MAX_STATE_NBYTES:
        raise CheckpointError(
            f"the progress of step {state.step} takes {format_bytes(len(data))}, at most "
            f"{format_bytes(MAX_STATE_NBYTES)} can be saved: raise batch_size or checkpoint_steps"
        )
    return data


def _decode(data: bytes, path: Path) -> CheckpointState:
    """Validate a `state.json`.

    Raises:
        CheckpointError: it is damaged, was edited, or is too new.
    """
    if len(data) > MAX_STATE_NBYTES:
        raise _damaged(path, f"is larger than {format_bytes(MAX_STATE_NBYTES)}")
    try:
        state = CheckpointState.model_validate_json(data)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        written = next((each["input"] for each in problems if each["loc"] == ("format",)), None)
        if isinstance(written, int) and written > FORMAT:
            raise CheckpointError(
                f"{path} has format {written}, and this smolcluster reads up to {FORMAT}: update it"
            ) from None
        what = "is not JSON:" if problems[0]["type"] == "json_invalid" else "has a wrong"
        raise _damaged(path, one_line(f"{what} {problem_of(error)}")) from None
    if state.sha256 != state.seal():
        raise _damaged(path, "was changed: it does not match its own SHA-256")
    if state.files.keys() != _TENSOR_FILES:
        raise _damaged(path, f"does not name {' and '.join(sorted(_TENSOR_FILES))}")
    return state


def _check_tensors(
    path: Path, stored: Mapping[str, Tensor], live: Mapping[str, Tensor], remedy: str
) -> None:
    """Raise CheckpointError unless names, shapes and types are the same; name the first that is not."""
    for name, tensor in live.items():
        if name not in stored:
            raise CheckpointError(f"{path} lacks {name}, {_describe(tensor)}; {remedy}")
        if (tensor.shape, tensor.dtype) != (stored[name].shape, stored[name].dtype):
            raise CheckpointError(
                f"{path} holds {name} as {_describe(stored[name])}, here it is "
                f"{_describe(tensor)}; {remedy}"
            )
    for name, tensor in stored.items():
        if name not in live:
            raise CheckpointError(
                one_line(f"{path} holds {name}, {_describe(tensor)}, unknown here; {remedy}")
            )


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def _sha256(path: Path, on_read: Callable[[int], None] = lambda _: None) -> str:
    """`on_read` is called with the number of bytes as they are read."""
    digest, memory = hashlib.sha256(), memoryview(bytearray(HASHED_NBYTES))
    with path.open("rb", buffering=0) as file:
        while num := file.readinto(memory):
            digest.update(memory[:num])
            on_read(num)
    return digest.hexdigest()


def _flush(path: Path, on_flushed: Callable[[int], None]) -> None:
    """Flush a large file but for its end; `on_flushed` is called with the number of bytes meanwhile.

    `fsync` would take minutes where the system has much in its memory that the disk takes slowly, and tell
    nobody how far it is.
    """
    last = path.stat().st_size - FLUSHED_NBYTES
    with path.open("r+b") as file:
        for start in range(0, last, FLUSHED_NBYTES):
            try:
                memory = mmap.mmap(file.fileno(), FLUSHED_NBYTES, offset=start)
            except OSError:
                return  # some network and FUSE file systems map no files
            with memory:
                memory.flush()
            on_flushed(FLUSHED_NBYTES)


def _sync(path: Path) -> None:
    """See to it that a file, or a folder's list of names, survives a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if not _full_sync(descriptor):
            os.fsync(descriptor)
    except OSError as error:
        # Some network and FUSE file systems cannot flush a folder; the files in it are flushed.
        if not (path.is_dir() and error.errno in _NO_FOLDER_SYNC):
            raise
    finally:
        os.close(descriptor)


def _full_sync(descriptor: int) -> bool:
    """macOS: empty the drive's own cache too, which fsync does not do there; False where it cannot."""
    command = getattr(fcntl, "F_FULLFSYNC", None)
    if command is None:
        return False
    try:
        fcntl.fcntl(descriptor, command)
    except OSError:
        return False
    return True


def _delete(path: Path) -> None:
    """Remove a folder, file or link as far as possible; the next sweep tries again."""
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} {what}; {_USE_ANOTHER}")


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    remedy = _REMEDIES.get(_errno(error) or 0, _USE_ANOTHER)
    return CheckpointError(f"{path} cannot be read ({_reason(error)}); {remedy}")


def _cannot_write(what: str, error: Exception) -> CheckpointError:
    remedy = _REMEDIES.get(_errno(error) or 0, "look at the disk")
    return CheckpointError(f"cannot write {what}: {_reason(error)}; {remedy}")


def _errno(error: BaseException | None) -> int | None:
    """The system's number of an error, which safetensors tells in words only."""
    if isinstance(error, OSError):
        return error.errno
    match = _OS_ERROR.search(str(error))
    return int(match[1]) if match else None


def is_out_of_space(error: Exception) -> bool:
    """Whether that is why a checkpoint is not saved."""
    cause = error.__cause__ if isinstance(error, CheckpointError) else error
    return _errno(cause) in FULL


def _reason(error: Exception) -> str:
    number = _errno(error)
    return one_line(str(error)) if number is None else os.strerror(number)
