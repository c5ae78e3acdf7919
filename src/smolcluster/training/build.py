"""From a configuration and a workload to what a process trains with."""

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from smolcluster.configs.schema import DatasetPlace, TrainConfig
from smolcluster.data.dataset import Batch, Elsewhere, Place
from smolcluster.data.loading import StreamSamples
from smolcluster.data.prefetch import Prefetch, prefetch_of
from smolcluster.data.pytree import has_a_row_a_sample, rows, sliced
from smolcluster.errors import ConfigError, DataError, NonFiniteLoss, OutOfMemory, SmolclusterError
from smolcluster.training.attributes import AttributeCheck
from smolcluster.training.buffers import kept_attributes
from smolcluster.training.builtin import load_workload
from smolcluster.training.compute import BatchLoss, Microbatch, forward_backward
from smolcluster.training.criterion import holders_of
from smolcluster.training.cutting import NUM_SAMPLES, CutCheck, Few
from smolcluster.training.evaluate import DEFAULT_BATCH_SIZE, Evaluation, evaluate, evaluation_of
from smolcluster.training.first_loss import NO_LOSSES, FirstLosses
from smolcluster.training.labels import lacks_labels
from smolcluster.training.layer_seeds import LayerSeeds, PythonSeeds, drawing_layers, may_draw
from smolcluster.training.lazy import give_shapes
from smolcluster.training.local_copy import Executor, InProcess
from smolcluster.training.modes import move
from smolcluster.training.muon import MuonOptimizer
from smolcluster.training.optimizer import LocalOptimizer
from smolcluster.training.recipe import Training
from smolcluster.training.replica import DEFAULT_BUCKET_BYTES, Replica
from smolcluster.training.stages.build import build_stage, model_layers, outline
from smolcluster.training.workload import Workload
from smolcluster.utils.device_errors import empty_cache, first_line, is_out_of_memory
from smolcluster.utils.gpu import no_gpu, watched
from smolcluster.utils.isolated_rng import isolated_rng
from smolcluster.utils.meter import Meter
from smolcluster.utils.peak_memory import PeakMemory
from smolcluster.utils.seed import derive_seed
from smolcluster.utils.user_code import user_code
from smolcluster.utils.words import a_few

NUM_BATCHES = 5
"""After so many batches, of which some may leave out a branch, a parameter is called unused."""


class UnusedParameters:
    """Names once the parameters that the loss does not depend on: no first batch gave them a gradient."""

    def __init__(self, replica: Replica, log: logging.Logger | None) -> None:
        self._log = log
        self._num_left = NUM_BATCHES
        self._without = dict.fromkeys(name for name, _ in replica.layers)
        self._hooks = [self._watch(name, replica.parameters[name]) for name in self._without]

    def _watch(self, name: str, parameter: Tensor) -> RemovableHandle:
        when_used = partial(self._used, name)
        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(when_used)  # type: ignore[no-untyped-call]
        return handle

    def _used(self, name: str, _parameter: Tensor) -> None:
        self._without.pop(name, None)

    def batch_done(self) -> None:
        """A batch has been computed; after the last one that is watched, say what was never used."""
        if self._num_left == 0:
            return
        self._num_left -= 1
        if self._num_left > 0:
            return
        for hook in self._hooks:
            hook.remove()
        names = list(self._without)
        if names and self._log is not None:
            self._log.warning(
                "%d batches gave no gradient to %s: they are trained with a gradient of zero, so that weight "
                "decay and momentum change them all the same; leave what the loss does not depend on out of "
                "the model, or set requires_grad=False",
                NUM_BATCHES,
                a_few(names),
            )


T = TypeVar("T")


class Microbatching:
    """So many samples of a batch at once; half of them once the device has run out of memory, and so on.

    Attributes:
        size: None: all that are asked for.
    """

    def __init__(
        self,
        size: int | None,
        what: str = "microbatch",
        log: logging.Logger | None = None,
        *,
        is_whole: bool = False,
    ) -> None:
        """`is_whole`: batches must not be cut, whatever the memory."""
        self.size = size
        self._is_whole = is_whole
        self._what = what
        self._log = log or logging.getLogger("smolcluster")

    def fitted(
        self,
        num_samples: int,
        compute: Callable[[int], T],
        undo: Callable[[], None] = lambda: None,
    ) -> T:
        """What `compute` returns of `num_samples` samples, so many at once; again with fewer if need be.

        `undo` puts back what a computation that ran out of memory may have changed.

        Raises:
            OutOfMemory: the device has too little memory for one sample.
        """
        while True:
            microbatch = min(self.size or num_samples, num_samples)
            try:
                return compute(microbatch)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                reason = first_line(error)
            # Only now, without the traceback, are the tensors of the attempt free.
            self._halve(microbatch, reason)
            gc.collect()
            empty_cache()
            undo()

    def _halve(self, microbatch: int, reason: str) -> None:
        if microbatch <= 1:
            raise OutOfMemory(
                f"out of memory with one sample at a time: {reason}; choose a smaller model, "
                "precision bf16 or another device"
            )
        if self._is_whole:
            raise OutOfMemory(
                f"out of memory with {microbatch} samples at once, and batch is whole: {reason}; lower "
                "batch_size, or set batch to cut"
            )
        self.size = (microbatch + 1) // 2
        self._log.warning(
            "out of memory with %d samples at once: from now on it is %d (%s): %s",
            microbatch,
            self.size,
            self._what,
            reason,
        )


@dataclass(frozen=True)
class TrainingContext:
    """What a process trains with: a workload, its data on the replica's device, and the run's seed.

    Attributes:
        microbatch: samples that are computed at once.
        eval_batch_size: samples that are evaluated at once.
        unused: watches for parameters that the loss does not depend on; None: nobody does.
        prefetch: what loads training samples ahead; None: they lie in memory, or elsewhere.
        eval_device: where the model is evaluated, there a copy; None: where the replica lies.
        cut_check: of what comes of batches that are cut; None: nobody looks.
        attributes: of what model and loss keep where nobody else has it; None: nobody looks.
        first_losses: what the model was built with, where it is compared with that of others.
        steps_alone: whether its local steps are not those that the run's own optimizer would take.
    """

    workload: Workload
    replica: Replica
    seed: int
    microbatch: Microbatching = field(default_factory=lambda: Microbatching(None))
    eval_batch_size: Microbatching = field(default_factory=lambda: Microbatching(None))
    unused: UnusedParameters | None = None
    prefetch: Prefetch | None = None
    eval_device: torch.device | None = None
    cut_check: CutCheck | None = None
    attributes: AttributeCheck | None = None
    first_losses: FirstLosses = NO_LOSSES
    steps_alone: bool = False

    @property
    def num_samples(self) -> int:
        return self.workload.train.num_samples

    @property
    def recipe(self) -> Training:
        return self.workload.training

    @property
    def optimizer(self) -> LocalOptimizer:
        """What steps this process's copy of the weights."""
        return self.replica.optimizer

    @property
    def executor(self) -> Executor:
        """What takes the steps of a `LocalCopy`, after `compute`."""
        return InProcess(self.replica, self.optimizer)

    def wait_until_ready(self, check: Callable[[], None] = lambda: None) -> None:
        """Wait until all that computes here is there; a process that computes alone is at once.

        `check` is called now and then, and may raise: others may have to come first.
        """

    def order(self, epoch: int) -> Tensor:
        """The training samples' indices in the order of an epoch, int32 (num_samples,)."""
        return self.workload.train.order(epoch, self.seed)

    def close(self) -> None:
        """Load no more samples."""
        if self.prefetch is not None:
            self.prefetch.close()

    def compute(self, indices: Tensor, epoch: int = 0, start: int = 0) -> BatchLoss:
        """The mean loss of the training samples `indices` (n,), whose gradient is in the replica then.

        What dropout leaves out depends on the seed, on `epoch`, on the place in its order where samples that
        are computed at once begin, and on the layer (`layer_seeds.py`).

        Raises:
            NonFiniteLoss: the loss or the gradient is NaN or infinite.
            UserCodeError: data, model or loss raised an exception.
            OutOfMemory: the device has too little memory for one sample.
        """
        if self.prefetch is not None:
            self.prefetch.forget_before(Place(self.seed, epoch, start))
        cut = partial(self.parts, indices, epoch, start)
        loss = self._compute(len(indices), epoch, cut)
        at_once = self.microbatch.size
        if at_once is not None and at_once < len(indices):
            few = partial(self.few, indices[:at_once], epoch, start)
            self.examine(few, loss=True, buffers=True)
        return loss

    def parts(self, indices: Tensor, epoch: int, start: int, at_once: int) -> list[Microbatch]:
        """The training samples `indices` (n,), which stand in an epoch's order from `start` on, cut."""
        parts = []
        for first in range(0, len(indices), at_once):
            piece = indices[first : first + at_once]
            place = Place(self.seed, epoch, start + first)
            parts.append(Microbatch(len(piece), partial(self.gather, piece, place), place))
        return parts

    def gather(self, indices: Tensor, place: Place) -> Batch:
        """A batch of the training samples `indices` (n,)."""
        source = self.prefetch or self.workload.train
        return source.batch(indices, place)

    def want(self, indices: Tensor, epoch: int, start: int) -> None:
        """Begin to load samples that will be computed; returns at once."""
        if self.prefetch is not None:
            self.prefetch.want(indices, Place(self.seed, epoch, start))

    def compute_batch(
        self, batch: Batch, num_samples: int, epoch: int = 0, start: int = 0
    ) -> BatchLoss:
        """As `compute`, of so many samples that somebody else has sent.

        Raises:
            DataError: they do not fit the model.
        """
        cut = partial(self.received_parts, batch, num_samples, epoch, start)
        loss = self._compute(num_samples, epoch, cut)
        at_once = self.microbatch.size
        if at_once is not None and at_once < num_samples:
            self.examine(partial(self.few_sent, batch, num_samples), loss=True, buffers=True)
        return loss

    def received_parts(
        self, batch: Batch, num_samples: int, epoch: int, start: int, at_once: int
    ) -> list[Microbatch]:
        """So many samples that somebody else has sent, cut; whole where they cannot be.

        Raises:
            DataError: they do not fit the model.
        """
        samples = self.workload.train
        if not isinstance(samples, Elsewhere):
            raise DataError("samples that this machine has itself")
        pieces = sliced(samples.received(batch), num_samples, at_once)
        size = num_samples if len(pieces) == 1 else at_once
        return [
            Microbatch.of(
                piece, min(size, num_samples - first), Place(self.seed, epoch, start + first)
            )
            for first, piece in zip(range(0, num_samples, size), pieces, strict=True)
        ]

    @cached_property
    def _drawing_layers(self) -> list[nn.Module | None]:
        """What the layers begin with that may draw at random; of a model that has no layers, nothing."""
        model = self.replica.model
        if not may_draw(model):
            return []
        try:
            with user_code("layers"):
                return drawing_layers(model, model_layers(model, self.workload))
        except SmolclusterError:
            return []  # it cannot be cut, so that nobody computes a part of it

    @cached_property
    def _python_seeds(self) -> PythonSeeds:
        return PythonSeeds()

    def _compute(
        self, num_samples: int, epoch: int, cut: Callable[[int], list[Microbatch]]
    ) -> BatchLoss:
        """`cut` gives the batch in parts of so many samples."""
        replica, buffers = self.replica, self.replica.buffers
        kept = buffers.values()
        seeds = LayerSeeds(self.seed, self.replica.device, python=self._python_seeds)

        def computed(parts: list[Microbatch]) -> BatchLoss:
            with seeds.hooked(replica.model, self._drawing_layers):
                return forward_backward(replica, self.workload.loss, parts, seeds.begin)

        def compute(at_once: int) -> BatchLoss:
            parts = cut(at_once)
            try:
                batches = (each.gather() for each in parts)
                loss = replica.doubles.attempt(partial(computed, parts), batches, undo)
            except NonFiniteLoss:  # as is a mean over no label
                labelled = [each for each in parts if not lacks_labels(each.gather())]
                if len(labelled) == len(parts):
                    raise
                undo()
                loss = computed(labelled)
            return loss

        def undo() -> None:
            buffers.find()
            buffers.put(kept)

        replica.watch.begin(epoch)
        loss = self.microbatch.fitted(num_samples, compute, undo)
        replica.watch.end()
        if self.unused is not None:
            self.unused.batch_done()
        return loss

    def examine(
        self, few: Callable[[], Few | None], *, loss: bool = False, buffers: bool = False
    ) -> None:
        """Say once what of the results depends on who computes samples, or on how a batch of them is cut.

        `few` gives samples that have been computed. `loss`: whether their batch is cut; `buffers`: whether
        the mean of what several parts add to buffers counts.
        """
        checks: list[Callable[[Few], None]] = []
        is_wanted = loss or (buffers and self.replica.buffers.has_own)
        if is_wanted and self.cut_check is not None and self.cut_check.is_due():
            look = partial(self.cut_check.look, self.replica, self.workload.loss)
            checks.append(partial(look, of_loss=loss))
        if self.attributes is not None and self.attributes.is_due():
            checks.append(self.attributes.look)
        if checks and self.replica.device.type != "meta" and (found := few()) is not None:
            for check in checks:
                check(found)

    def few(self, part: Tensor, epoch: int, start: int) -> Few | None:
        """The first samples of a part (n,) that stands in an epoch's order from `start` on.

        None: they can only be read in order.
        """
        samples = self.workload.train
        if isinstance(samples, StreamSamples):
            return None
        if len(part) == 1:
            part = self.order(epoch)[start : start + 2]
        few = part[:NUM_SAMPLES]

        def gather(places: slice, number: int) -> Batch:
            place = Place(self.seed, epoch, start)
            if self.prefetch is None:
                return samples.batch(few[places], place)
            rows = self.prefetch.load(few, place)[places]
            return self.prefetch.collated(rows, place._replace(start=number))

        return Few(len(few), gather)

    def few_sent(self, batch: Batch, num_samples: int) -> Few | None:
        """The first of so many samples that somebody else has sent; None: they cannot be cut."""
        samples = self.workload.train
        if not isinstance(samples, Elsewhere):
            return None
        received = samples.received(batch)
        if not has_a_row_a_sample(received, num_samples):
            return None
        most = min(NUM_SAMPLES, num_samples)
        return Few(most, lambda places, _: rows(received, num_samples, places))

    def rehearse(self, num_samples: int) -> bool:
        """Compute what costs as much as a batch of so many samples; False: there is none to be had here.

        The model's buffers are as before, and what model and loss count in attributes.
        """
        samples, buffers, model = self.workload.train, self.replica.buffers, self.replica.model
        if self.replica.device.type == "meta":
            return False
        with kept_attributes([*model.modules(), *holders_of(self.workload.loss)]):
            if not isinstance(samples, Elsewhere):
                self.compute(self.order(0)[:num_samples])
            elif (example := samples.example(num_samples)) is not None:
                self.compute_batch(example, num_samples)
            else:
                return False
        buffers.find()
        buffers.restore()
        self.replica.watch.forget_batches()
        return True

    def new_copy(self) -> nn.Module:
        """Another model in evaluation mode, with the replica's weights of now, or their average.

        Raises:
            UserCodeError: the model refuses to be copied, and is made by no function.
        """
        workload = self.workload
        make = None if workload.is_built else partial(_new_model, workload, self.seed)
        return self.replica.copy_model(make)

    def evaluate(
        self, model: nn.Module | None = None, before_batch: Callable[[], None] = lambda: None
    ) -> Evaluation | None:
        """Evaluate `model`, or the replica's own on its weights of now; None: nothing is held out.

        `before_batch` is called now and then, and may raise: an evaluation can take long.

        Raises:
            NonFiniteLoss: the loss is NaN or infinite.
        """
        workload = self.workload
        if workload.validation is None or self.replica.device.type == "meta":
            return None
        held_out, device = workload.validation, self.eval_device or self.replica.device
        workload.bring_losses(device)
        if model is None and device == self.replica.device:
            with self.replica.evaluating() as own:
                return self.evaluate(own, before_batch)
        evaluated = self.new_copy() if model is None else model
        move(evaluated, device)

        def compute(at_once: int) -> Evaluation:
            totals = evaluate(
                evaluated,
                held_out,
                device,
                loss=workload.loss,
                metrics=workload.metrics,
                precision=self.replica.precision,
                batch_size=at_once,
                before_batch=before_batch,
                doubles=self.replica.doubles,
            )
            return evaluation_of(totals, workload.metrics)

        size = self.eval_batch_size.size or workload.eval_batch_size or DEFAULT_BATCH_SIZE
        return self.eval_batch_size.fitted(min(size, held_out.num_samples), compute)


def build(
    train: TrainConfig,
    seed: int,
    place: DatasetPlace,
    device: torch.device,
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    microbatch: int | None = None,
    workload: Workload | None = None,
    meter: Meter | None = None,
    log: logging.Logger | None = None,
    is_outline: bool = False,
) -> TrainingContext:
    """Build the model of `workload`; None: of the one that `train` names, with data from `place`.

    The initial weights are drawn on the CPU and depend on `seed` only: all machines begin alike. An outline
    has none: its model lies on `meta`, and tells of names, shapes and types alone.

    Raises:
        ConfigError: unknown dataset or model, sizes of the model that do not fit the data, or a stream that
            does not end.
        DataError: the dataset is missing or damaged.
    """
    if workload is None:
        workload = load_workload(train, seed, place, log)
    # streams are counted while a signal still ends this process at once
    for split in (workload.train, workload.validation):
        if isinstance(split, StreamSamples):
            split.count(log.info if log is not None else lambda _: None)
    train = workload.training.applied_to(train)
    if workload.batch_size is not None:
        train = train.model_copy(update={"batch_size": workload.batch_size})
    replica = Replica(
        outline(workload) if is_outline else _new_model(workload, seed),
        workload.training.optimizer_for(train),
        weight_decay=train.weight_decay,
        device=torch.device("meta") if is_outline else device,
        bucket_bytes=bucket_bytes,
        precision=train.precision,
        is_scaled_elsewhere=workload.is_scaled_elsewhere,
        ema_decay=train.ema_decay,
        meter=meter,
    )
    replica.doubles.log = log
    if replica.meter.gpu is no_gpu:
        replica.meter.gpu = watched(device)
    replica.meter.memory = PeakMemory(device) if train.memory_profiling else None
    at_once = most_at_once(train, microbatch)
    at_most = Microbatching(at_once, "microbatch", log, is_whole=train.batch == "whole")
    eval_size = workload.eval_batch_size or at_once or train.batch_size
    evaluated = Microbatching(eval_size, "samples of an evaluation", log)
    if isinstance(replica.optimizer, MuonOptimizer) and log is not None:
        log.info("%s", replica.optimizer.split.sentence)
    if replica.resting and log is not None:
        log.info("in evaluation mode, and left in it: %s", a_few(replica.resting))
    if replica.reordered and log is not None:
        log.warning(
            "channels_last is not kept of %s: weights lie in one flat tensor, each contiguous; give the "
            "model inputs in it (x.to(memory_format=torch.channels_last)), and its convolutions compute so",
            a_few(replica.reordered),
        )
    unused = UnusedParameters(replica, log)
    prefetch = prefetch_of(workload.train)
    if not is_outline:
        workload = workload.watched()
        workload.bring_losses(device)
    workload = workload.to(device)
    built = TrainingContext(workload, replica, seed, at_most, evaluated, unused, prefetch)
    return built if log is None else _with_checks(built, log)


def _with_checks(training: TrainingContext, log: logging.Logger) -> TrainingContext:
    """The same that says what of its results depends on who computes, and on how batches are cut."""
    attributes = AttributeCheck(training.replica, training.workload.loss, log)
    return replace(training, cut_check=CutCheck(log), attributes=attributes)


def stage_replica(
    training: TrainingContext,
    train: TrainConfig,
    layers: range,
    device: torch.device,
    log: logging.Logger,
) -> Replica:
    """These layers of the model that `training` outlines, with their initial weights, on `device`."""
    workload, outlined = training.workload, training.replica
    workload.bring_losses(device)
    spec, whole = workload.training.optimizer_for(train), outlined.optimizer
    if isinstance(whole, MuonOptimizer):  # a stage's last layer need not be the model's
        spec = replace(spec, split=whole.split)
    return Replica(
        build_stage(workload, layers.start, layers.stop, training.seed, device, log=log),
        spec,
        weight_decay=train.weight_decay,
        device=device,
        bucket_bytes=outlined.bucket_bytes,
        precision=train.precision,
        meter=outlined.meter,
        is_stage=True,
    )


def _new_model(workload: Workload, seed: int) -> nn.Module:
    with isolated_rng(seed=derive_seed(seed, "weights")):
        model = workload.new_model()
        give_shapes(model, workload, seed)
        return model


def most_at_once(train: TrainConfig, microbatch: int | None) -> int | None:
    """How many samples this machine computes at once, of those of a step; None: all.

    Raises:
        ConfigError: fewer than all, where batches are to stay whole.
    """
    accumulated = train.gradient_accumulation
    if train.batch == "whole" and (microbatch is not None or accumulated > 1):
        key, value = (
            ("microbatch", microbatch)
            if microbatch is not None
            else ("gradient_accumulation", accumulated)
        )
        raise ConfigError(
            f"batch is whole, but {key} {value} cuts it: leave {key} out, or set batch to cut"
        )
    if accumulated == 1:
        return microbatch
    return min(train.batch_size, microbatch or train.batch_size)
