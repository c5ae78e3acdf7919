"""A user's own data as `Samples`: map-style datasets, streams, and the DataLoaders around them.

A DataLoader says which samples make an epoch, in which order, how many make a batch, and how a batch is made
of them. Its `shuffle=True` is our permutation; its own samplers keep their order, drawn anew each epoch under
a seed made of the run's and the epoch. What is drawn at random as a sample is gathered depends on the run's
seed, the epoch and the sample's place in it: it is the same in one process and on any cluster.
"""

import copy
import itertools
import operator
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import AbstractContextManager
from functools import cached_property, partial
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    default_collate,
)

from smolcluster.data.dataset import Batch, Permuted, Place, Samples, check_indices
from smolcluster.data.drawing import DRAWING, Drawing, OfThread
from smolcluster.data.permutation import epoch_permutation
from smolcluster.data.processes import begin_to_read
from smolcluster.errors import ConfigError, DataError
from smolcluster.utils.isolated_rng import isolated_rng
from smolcluster.utils.seed import derive_seed
from smolcluster.utils.user_code import user_code

Collate = Callable[[list[Any]], Batch]
Drawn = TypeVar("Drawn")
COUNT_PATIENCE_S = 30.0
"""How long a stream or a sampler is counted; one that is endless must not be counted for ever."""
SAY_EVERY_S = 5.0


@runtime_checkable
class MapDataset(Protocol):
    """A map-style dataset, as `torch.utils.data.Dataset` means it."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


Data = MapDataset | Iterable[Any] | Samples
"""What a workload is trained on; a DataLoader is an iterable."""


def samples_of(
    data: Data,
    collate: Collate | None = None,
    samples_per_epoch: int | None = None,
) -> Samples:
    """A user's data as a split. `samples_per_epoch` is the length of a stream that has none.

    Raises:
        ConfigError: it is no data, an iterator, or a DataLoader that says nothing of its batches.
    """
    match data:
        case Permuted():
            return data  # type: ignore[return-value]
        case str() | bytes() | Mapping():
            pass  # what it holds are not samples
        case DataLoader():
            return _of_loader(data, collate, samples_per_epoch)
        case _ if not _is_stream(data) and isinstance(data, MapDataset):
            return MapSamples(data, collate)
        case Iterator() if not isinstance(data, IterableDataset):
            raise ConfigError(
                f"the data are a {type(data).__qualname__}, which can be gone through only once, not "
                "once an epoch; give an IterableDataset, or an object whose __iter__ makes a new iterator"
            )
        case Iterable():
            return StreamSamples(data, collate, samples_per_epoch)
    raise ConfigError(
        f"the data are a {type(data).__qualname__}, which is neither a dataset with __getitem__ and __len__, "
        "nor an iterable, nor a DataLoader"
    )


def every_index(samples: Samples) -> Tensor:
    """The indices of a split's samples, (num_samples,): those that its own sampler names, else from 0 on."""
    if isinstance(samples, MapSamples) and samples.has_own_order:
        return samples.order(0, 0)
    return torch.arange(samples.num_samples)


def _is_stream(data: object) -> bool:
    return isinstance(data, IterableDataset) or not hasattr(data, "__getitem__")


def _of_loader(
    loader: DataLoader[Any], collate: Collate | None, samples_per_epoch: int | None
) -> Samples:
    batch_size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    if batch_size is None:
        raise ConfigError(
            "the DataLoader has no batch_size, so that nothing says what a batch is made of; give it one"
        )
    collate = collate or loader.collate_fn
    data: Any = loader.dataset
    if _is_stream(data):
        return StreamSamples(data, collate, samples_per_epoch, loader, batch_size)
    return MapSamples(data, collate, loader, batch_size)


class LoadedSamples(Permuted, ABC):
    """A user's samples, which `collate` makes a batch of; None: PyTorch's `default_collate`."""

    def __init__(
        self,
        drawer: object,
        collate: Collate | None,
        loader: DataLoader[Any] | None,
        batch_size: int | None,
    ) -> None:
        """`drawer`: what makes the samples, at random perhaps."""
        self.collate = collate or default_collate
        self.loader = loader
        self.batch_size = batch_size
        self.drawing, self._collating = Drawing(drawer), Drawing(self.collate)

    @abstractmethod
    def load(self, indices: Tensor, place: Place | None = None) -> list[Any]:
        """The samples of these indices (n,), one by one."""

    def batch(self, indices: Tensor, place: Place | None = None) -> Batch:
        return self.collated(self.load(indices, place), place)

    def collated(self, samples: list[Any], place: Place | None) -> Batch:
        """The batch of samples that begin at `place`; None: that are held out."""
        seed, *where = place or Place(0, 0, 0)
        try:
            with self._collating.under(derive_seed(seed, "collate", *where)):
                batch = self.collate(samples)
        except (TypeError, RuntimeError) as error:
            if self.collate is not default_collate:
                raise
            raise DataError(
                f"samples cannot be made a batch of: {error}; give a collate function"
            ) from error
        self._collating.look_again()
        return batch


class MapSamples(LoadedSamples):
    """A map-style dataset."""

    def __init__(
        self,
        dataset: MapDataset,
        collate: Collate | None = None,
        loader: DataLoader[Any] | None = None,
        batch_size: int | None = None,
    ) -> None:
        """`loader`, if there is one, says which samples make an epoch, and in which order."""
        super().__init__(dataset, collate, loader, batch_size)
        self.dataset = dataset
        self._epoch: int | None = None
        """That the dataset was told last."""

    @cached_property
    def num_samples(self) -> int:
        return _some(len(self.order(0, 0)))

    @property
    def has_own_order(self) -> bool:
        """Whether the loader says more of the order than that it is shuffled."""
        return self.loader is not None and not _only_shuffles(_sampler_of(self.loader))

    def order(self, epoch: int, seed: int) -> Tensor:
        """As the loader's sampler has it; a permutation of ours where that only shuffles, or there is none.

        Raises:
            DataError: an epoch has not as many samples as the others.
            ConfigError: the sampler has no end, or names samples by what is no whole number.
            UserCodeError: dataset or sampler raised an exception.
        """
        if self.loader is None or not self.has_own_order:
            with user_code("data"):
                num_samples = len(self.dataset)
            order = epoch_permutation(seed, epoch, num_samples)
        else:
            seed = derive_seed(seed, "sampler", epoch)
            with user_code("sampler"):
                of_batches = self.batch_size if self.loader.batch_size is None else None
                drawn = _drawn(_sampler_of(self.loader), seed, epoch, of_batches)
            order = torch.tensor(drawn, dtype=torch.int64)
            check_indices(order, len(self.dataset))
            order = order.to(torch.int32)
        if self.loader is not None and self.loader.drop_last and self.batch_size:
            order = order[: len(order) // self.batch_size * self.batch_size]
        if epoch and len(order) != self.num_samples:
            raise DataError(
                f"epoch {epoch + 1} of the DataLoader's sampler has {len(order)} samples, the first one "
                f"{self.num_samples}; every epoch must have as many"
            )
        return order

    def begin(self, indices: Tensor, place: Place | None) -> None:
        """See that there are such samples, and tell the dataset its epoch."""
        if place is not None and place.epoch != self._epoch:
            self._epoch = place.epoch
            set_epoch(self.dataset, place.epoch)
            self.drawing.begin_epoch()
        check_indices(indices, len(self.dataset))

    def load(self, indices: Tensor, place: Place | None = None) -> list[Any]:
        self.begin(indices, place)
        samples = []
        for number, index in enumerate(indices.tolist()):
            seed = derive_seed(0, "held out", index) if place is None else place.draw(number)
            samples.append(self.sample(index, partial(self.drawing.under, seed)))
        return samples

    def sample(self, index: int, seeded: Callable[[], AbstractContextManager[None]]) -> Any:
        """The sample of an index, made where `seeded` has seeded the generators.

        It is made once more if generators have been made with it, which nobody had seeded.
        """
        with seeded():
            sample = self.dataset[index]
        if not self.drawing.look_again():
            return sample
        with seeded():
            return self.dataset[index]


class StreamSamples(LoadedSamples):
    """Samples that can only be read in order, epoch by epoch, by one process of the run."""

    def __init__(
        self,
        stream: Iterable[Any],
        collate: Collate | None = None,
        samples_per_epoch: int | None = None,
        loader: DataLoader[Any] | None = None,
        batch_size: int | None = None,
    ) -> None:
        """`loader` reads the stream in processes, if it has any."""
        super().__init__(stream, collate, loader, batch_size)
        self.stream = stream
        self.samples_per_epoch = samples_per_epoch
        self._counted: int | None = None
        self._reading: tuple[int, Iterator[Any]] | None = None
        self._next = 0
        """The place in the epoch of the sample that is read next."""

    @property
    def num_samples(self) -> int:
        """Its length, `samples_per_epoch`, or what one pass counts."""
        return self.count()

    def count(self, say: Callable[[str], None] = lambda _: None) -> int:
        """`num_samples`; where it has to be counted, `say` is told every few seconds that it is.

        Raises:
            ConfigError: the stream has not ended after `COUNT_PATIENCE_S`.
            DataError: it has no samples.
        """
        if self._counted is None:
            counted = self._count(say)
            if self.loader is not None and self.loader.drop_last and self.batch_size:
                counted -= counted % self.batch_size
            self._counted = _some(counted)
        return self._counted

    def _count(self, say: Callable[[str], None]) -> int:
        if self.samples_per_epoch is not None:
            return self.samples_per_epoch
        with user_code("data"):
            if isinstance(self.stream, Sized):
                return len(self.stream)
            remedy = (
                "give Workload(samples_per_epoch=...), the samples of an epoch; of validation data, a part "
                "that ends"
            )
            every = _ending(self._begin(Place(0, 0, 0)), "the stream", remedy, say)
            return sum(1 for _ in every)

    def order(self, epoch: int, seed: int) -> Tensor:  # noqa: ARG002 - the stream has its own
        return torch.arange(self.num_samples, dtype=torch.int32)

    def load(self, indices: Tensor, place: Place | None = None) -> list[Any]:
        """The samples at these places of an epoch (n,), which grow; what lies before them is passed over."""
        place = place or Place(0, 0, 0)
        return [self._read(index, place) for index in indices.tolist()]

    def _read(self, index: int, place: Place) -> Any:
        if self._reading is None or self._reading[0] != place.epoch or index < self._next:
            self._reading, self._next = (place.epoch, self._begin(place)), 0
        for sample in self._reading[1]:
            self._next += 1
            if self._next > index:
                return sample
        self._reading = None
        if not self._next:
            raise DataError(
                f"the training data give no sample in epoch {place.epoch + 1}: each epoch begins with a call "
                "of __iter__, which must begin anew and not go on"
            )
        raise DataError(
            f"the training data ended after {self._next} samples of epoch {place.epoch + 1}, an epoch has "
            f"{self.num_samples}; correct samples_per_epoch, or the length that the dataset says"
        )

    def _begin(self, place: Place) -> Iterator[Any]:
        """Read an epoch from its beginning."""
        source: Iterable[Any] = self.stream
        if self.loader is not None and self.loader.num_workers:
            source = _one_by_one(self.loader)
        seed = derive_seed(place.seed, "stream", place.epoch)
        set_epoch(self.stream, place.epoch)
        self.drawing.begin_epoch()
        draws = OfThread(seed)
        with draws, self.drawing.of_process(seed):
            iterator = iter(source)
        self.drawing.look_again()  # it may have made some for this epoch
        for number in itertools.count():
            with draws, self.drawing.of_process(derive_seed(seed, number)):
                try:
                    sample = next(iterator)
                except StopIteration:
                    return
            self.drawing.look_again()
            yield sample


def _ending(
    drawn: Iterable[Drawn], what: str, remedy: str, say: Callable[[str], None] = lambda _: None
) -> Iterator[Drawn]:
    """All of `drawn`, which somebody counts, unless it goes on for longer than he has patience.

    Raises:
        ConfigError: it does.
    """
    began = said = time.monotonic()
    for number, each in enumerate(drawn, 1):
        yield each
        now = time.monotonic()
        if now - began > COUNT_PATIENCE_S:
            raise ConfigError(
                f"{what} has not ended after {number:,} samples, which took {now - began:.0f} s to count: it "
                f"is endless, or too long to be counted first; {remedy}"
            )
        if now - said > SAY_EVERY_S:
            said = now
            say(f"{what} does not say its length: counting its samples, {number:,} so far")


def _some(num_samples: int) -> int:
    """The number, if it is one to train on."""
    if num_samples < 1:
        raise ConfigError(
            "the data hold no samples: see that the dataset finds its files, that a loader with drop_last "
            "has a whole batch, and that validation data are left out or hold some"
        )
    return num_samples


def _sampler_of(loader: DataLoader[Any]) -> Iterable[Any]:
    own = loader.batch_sampler
    return loader.sampler if own is None or loader.batch_size is not None else own


def _only_shuffles(sampler: Iterable[Any]) -> bool:
    """Whether it takes every sample once, in an order that means nothing."""
    if type(sampler) is not RandomSampler:
        return False
    return not sampler.replacement and sampler.num_samples == len(sampler.data_source)


def _drawn(sampler: Iterable[Any], seed: int, epoch: int, of_batches: int | None) -> list[int]:
    """A sampler's indices in an epoch; those of a batch sampler one batch after the other.

    `of_batches`: how many samples a batch sampler says that its batches have; None: it is none.

    Raises:
        ConfigError: it has no end, gives what is no index, or batches of another size before the last.
    """
    sampler = _begun(sampler, seed, epoch)
    if getattr(sampler, "generator", False) is None:
        sampler = copy.copy(sampler)
        sampler.generator = torch.Generator().manual_seed(seed)  # type: ignore[attr-defined]
    with DRAWING, isolated_rng(seed=seed):
        every = _ending(
            sampler, f"the sampler {type(sampler).__qualname__}", "let it end after each epoch"
        )
        if of_batches is None:
            return [_index(key, sampler) for key in every]
        batches = [list(each) if isinstance(each, Iterable) else [each] for each in every]
    if others := {len(each) for each in batches[:-1]} - {of_batches}:
        raise ConfigError(
            f"the DataLoader's {type(sampler).__qualname__} gives batches of {min(others)} samples among "
            f"those of {of_batches}, but a run cuts an epoch's samples into equal batches: let all but the "
            "last have batch_size samples, or give the DataLoader the same order as a sampler"
        )
    return [_index(key, sampler) for each in batches for key in each]


def _begun(sampler: Any, seed: int, epoch: int) -> Any:
    """The sampler, told its epoch, with new generators in place of its own; so are those it draws from.

    A generator goes on from one drawing to the next, and no two processes have drawn equally often.
    """
    set_epoch(sampler, epoch)
    own = {
        name: _anew(each, seed, epoch) for name, each in getattr(sampler, "__dict__", {}).items()
    }
    changed = {name: each for name, each in own.items() if each is not vars(sampler)[name]}
    if changed:
        sampler = copy.copy(sampler)
        vars(sampler).update(changed)
    return sampler


def _anew(value: Any, seed: int, epoch: int) -> Any:
    match value:
        case torch.Generator():
            return torch.Generator(value.device).manual_seed(seed)
        case np.random.Generator():
            return np.random.default_rng(seed)
        case np.random.RandomState():
            return np.random.RandomState(seed % 2**32)
        case random.Random():
            return random.Random(seed)  # noqa: S311 - of an order
        case Sampler():
            return _begun(value, seed, epoch)
    return value


def _index(key: Any, sampler: Iterable[Any]) -> int:
    """A sample's number, also of NumPy or a tensor of one number."""
    try:
        return operator.index(key)
    except (TypeError, RuntimeError):  # the latter of tensors
        raise ConfigError(
            f"the DataLoader's {type(sampler).__qualname__} names a sample {key!r:.60}, must be a whole "
            "number: a run counts samples and hands out their numbers; let the dataset, or collate, choose "
            "the rest (such as the size of an image)"
        ) from None


def set_epoch(data: object, epoch: int) -> None:
    """Tell a dataset or sampler its epoch, if it wants to know."""
    if callable(tell := getattr(data, "set_epoch", None)):
        tell(epoch)


def _one_by_one(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The same stream in the same processes, without batches."""
    return DataLoader(
        loader.dataset,
        batch_size=None,
        collate_fn=_as_it_is,
        num_workers=loader.num_workers,
        prefetch_factor=loader.prefetch_factor,
        worker_init_fn=partial(begin_to_read, loader.worker_init_fn),
        multiprocessing_context=loader.multiprocessing_context,
        timeout=loader.timeout,
    )


def _as_it_is(sample: Any) -> Any:
    return sample
