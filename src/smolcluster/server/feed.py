"""The batches that the server sends along with the work: loaded and laid out beside the deciding thread.

What has been handed out is kept until it is applied, so that whoever takes over a lost lease gets the same
samples, also of a stream that cannot be read twice.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from smolcluster.data.dataset import Batch, Place
from smolcluster.data.permutation import EpochOrders, Range
from smolcluster.data.pytree import encode
from smolcluster.server.assignment import ServedBatch
from smolcluster.training.build import TrainingContext
from smolcluster.utils.background import Background
from smolcluster.utils.cadence import is_power_of_two
from smolcluster.utils.units import format_duration
from smolcluster.utils.user_code import user_code
from smolcluster.wire.inbox import Call, Inbox, fail

MAX_PIECE_NBYTES = 1 << 20
SLOW_S = 5.0
"""A batch that takes longer to be loaded is told of."""
Deliver = Callable[[ServedBatch | None], None]


class Feed:
    """Delivers batches to the deciding thread, which alone may call it."""

    def __init__(
        self,
        training: TrainingContext,
        inbox: Inbox,
        log: logging.Logger,
        *,
        num_ahead: int,
        num_epochs: int,
    ) -> None:
        """`num_ahead`: samples that are loaded beyond the last ones asked for."""
        self._samples = training.workload.train
        self._data = training.workload.name
        self._log = log
        self._num_slow = 0
        self._seed = training.seed
        self._piece_nbytes = min(training.replica.bucket_bytes, MAX_PIECE_NBYTES)
        self._inbox = inbox
        self._num_ahead = num_ahead
        self._num_epochs = num_epochs
        self._orders = EpochOrders(training.order)
        self._ready: dict[Range, ServedBatch] = {}
        self._waiting: dict[Range, list[Deliver]] = {}
        self._prefetch = training.prefetch
        self._thread = Background("feed", partial(torch.set_num_threads, 1))
        self._slow: threading.Timer | None = None
        """Tells of the load that goes on, when it takes long."""

    def deliver(self, samples: Range, indices: Tensor, deliver: Deliver) -> None:
        """Call `deliver` with the batch of these samples, in the deciding thread, when it is there."""
        if samples in self._ready:
            deliver(self._ready[samples])
        elif samples in self._waiting:
            self._waiting[samples].append(deliver)
        else:
            self._waiting[samples] = [deliver]
            self._thread.submit(partial(self._prepare, samples, indices))

    def applied(self, samples: Range) -> None:
        """The samples will not be asked for again."""
        self._ready.pop(samples, None)
        self._waiting.pop(samples, None)

    def close(self) -> None:
        if self._slow is not None:
            self._slow.cancel()
        if self._prefetch is not None:
            self._prefetch.close()
        self._thread.close()

    def _prepare(self, samples: Range, indices: Tensor) -> None:
        slow = self._slow = threading.Timer(SLOW_S, self._tell_of_slow_load, (samples,))
        slow.daemon = True
        slow.start()
        try:
            batch = ServedBatch(encode(self._load(samples, indices)), self._piece_nbytes)
        except Exception as error:
            self._inbox.put(Call(partial(fail, error)))
        else:
            self._inbox.put(Call(partial(self._arrived, samples, batch)))
        finally:
            slow.cancel()

    def _tell_of_slow_load(self, samples: Range) -> None:
        """Say that a load takes long while it does."""
        self._num_slow += 1
        if is_power_of_two(self._num_slow):
            self._log.warning(
                "the data of %s are slow: the server has been loading %d samples for %s, and a worker "
                "waits; more num_workers of its DataLoader, or dataset.source: local, load them faster",
                self._data,
                samples.num_samples,
                format_duration(SLOW_S),
            )

    def _load(self, samples: Range, indices: Tensor) -> Batch:
        place = Place(self._seed, samples.epoch, samples.start)
        if self._prefetch is None:
            return self._samples.to_send(indices, place)
        self._prefetch.forget_before(place)
        self._prefetch.want(indices, place)
        self._want_ahead(replace(samples, start=samples.stop), self._num_ahead)
        return self._prefetch.batch(indices, place)

    def _want_ahead(self, after: Range, num_samples: int) -> None:
        """Begin to load so many samples, over the end of the epoch if there are too few left in it."""
        order = self._orders[after.epoch]
        wanted = order[after.start : after.start + num_samples]
        if self._prefetch is not None:
            self._prefetch.want(wanted, Place(self._seed, after.epoch, after.start))
        num_left = min(num_samples - len(wanted), len(order))
        if num_left > 0 and after.epoch + 1 < self._num_epochs:
            self._want_ahead(Range(after.epoch + 1, 0, 0), num_left)

    def _arrived(self, samples: Range, batch: ServedBatch) -> None:
        waiting = self._waiting.pop(samples, None)
        if waiting is not None:
            self._ready[samples] = batch
            for deliver in waiting:
                deliver(batch)


class HeldOutFeed(Feed):
    """Of the samples that are held out: what is delivered is a list of batches, as they are evaluated."""

    def __init__(
        self, training: TrainingContext, inbox: Inbox, log: logging.Logger, batch_size: int
    ) -> None:
        alone = replace(training, prefetch=None)  # which is of the training data
        super().__init__(alone, inbox, log, num_ahead=0, num_epochs=0)
        self._held_out, self._batch_size = training.workload.validation, batch_size

    def _load(self, _samples: Range, indices: Tensor) -> list[Batch]:
        held_out = self._held_out
        assert held_out is not None  # noqa: S101 - whoever opens this has looked
        with user_code("data"):
            return [held_out.batch(each) for each in torch.split(indices, self._batch_size)]


class NoFeed:
    """Of a run whose workers have the data themselves."""

    def deliver(self, _samples: Range, _indices: Tensor, deliver: Deliver) -> None:
        deliver(None)

    def applied(self, _samples: Range) -> None:
        """Nothing was kept."""

    def close(self) -> None:
        """Nothing is open."""
