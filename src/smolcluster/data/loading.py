"""A user's own data as `Samples`: map-style datasets, streams, and the DataLoaders around them.

A DataLoader says which samples make an epoch, in which order, how many make a batch, and how a batch is made
of them. Its `shuffle=True` is our permutation; its own samplers keep their order, drawn anew each epoch under
a seed made of the run's and the epoch. What is drawn at random as a sample is gathered depends on the run's
seed, the epoch and the sample's place in it: it is the same in one process and on any cluster.
"""

import copy
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    default_collate,
)

from smolcluster.data.dataset import Batch, Permuted, Place, Samples, check_indices
from smolcluster.data.permutation import epoch_permutation
from smolcluster.data.processes import begin_to_read
from smolcluster.errors import ConfigError, DataError
from smolcluster.utils.seed import derive_seed

Collate = Callable[[list[Any]], Batch]
_SAMPLING = threading.Lock()
"""Held while a sampler draws from the process's generators."""


@runtime_checkable
class MapDataset(Protocol):
    """A map-style dataset, as `torch.utils.data.Dataset` means it."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


Data = MapDataset | Iterable[Any] | Samples
"""What a workload is trained on; a DataLoader is an iterable."""


def samples_of(
    data: Data, collate: Collate | None = None, samples_per_epoch: int | None = None
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


class MapSamples(Permuted):
    """A map-style dataset, whose samples `collate` makes a batch of; None: PyTorch's `default_collate`."""

    def __init__(
        self,
        dataset: MapDataset,
        collate: Collate | None = None,
        loader: DataLoader[Any] | None = None,
        batch_size: int | None = None,
    ) -> None:
        """`loader`, if there is one, says which samples make an epoch, and in which order."""
        self.dataset = dataset
        self.collate = collate or default_collate
        self.loader = loader
        self.batch_size = batch_size

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
        """
        if self.loader is None or not self.has_own_order:
            order = epoch_permutation(seed, epoch, len(self.dataset))
        else:
            seed = derive_seed(seed, "sampler", epoch)
            drawn = _drawn(_sampler_of(self.loader), seed, epoch)
            order = torch.tensor(drawn, dtype=torch.int32)
        if self.loader is not None and self.loader.drop_last and self.batch_size:
            order = order[: len(order) // self.batch_size * self.batch_size]
        if epoch and len(order) != self.num_samples:
            raise DataError(
                f"epoch {epoch + 1} of the DataLoader's sampler has {len(order)} samples, the first one "
                f"{self.num_samples}; every epoch must have as many"
            )
        return order

    def load(self, indices: Tensor, place: Place | None = None) -> list[Any]:
        """The samples of these indices (n,), one by one."""
        check_indices(indices, len(self.dataset))
        samples = []
        for number, index in enumerate(indices.tolist()):
            with drawing(None if place is None else place.draw(number)):
                samples.append(self.dataset[index])
        return samples

    def batch(self, indices: Tensor, place: Place | None = None) -> Batch:
        return collated(self.load(indices, place), self.collate, place)

    def to(self, device: torch.device) -> Self:  # noqa: ARG002 - batches are moved one by one
        return self


class StreamSamples(Permuted):
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
        self.stream = stream
        self.collate = collate or default_collate
        self.samples_per_epoch = samples_per_epoch
        self.loader = loader
        self.batch_size = batch_size
        self._reading: tuple[int, Iterator[Any]] | None = None
        self._next = 0
        """The place in the epoch of the sample that is read next."""

    @cached_property
    def num_samples(self) -> int:
        """Its length, `samples_per_epoch`, or what one pass counts."""
        if self.samples_per_epoch is not None:
            return _some(self.samples_per_epoch)
        if isinstance(self.stream, Sized):
            return _some(len(self.stream))
        return _some(sum(1 for _ in self._begin(Place(0, 0, 0))))

    def order(self, epoch: int, seed: int) -> Tensor:  # noqa: ARG002 - the stream has its own
        return torch.arange(self.num_samples, dtype=torch.int32)

    def load(self, indices: Tensor, place: Place | None = None) -> list[Any]:
        """The samples at these places of an epoch (n,), which grow; what lies before them is passed over."""
        place = place or Place(0, 0, 0)
        return [self._read(index, place) for index in indices.tolist()]

    def batch(self, indices: Tensor, place: Place | None = None) -> Batch:
        return collated(self.load(indices, place), self.collate, place)

    def to(self, device: torch.device) -> Self:  # noqa: ARG002 - batches are moved one by one
        return self

    def _read(self, index: int, place: Place) -> Any:
        if self._reading is None or self._reading[0] != place.epoch or index < self._next:
            self._reading, self._next = (place.epoch, self._begin(place)), 0
        for sample in self._reading[1]:
            self._next += 1
            if self._next > index:
                return sample
        self._reading = None
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
        _set_epoch(self.stream, place.epoch)
        generator = torch.Generator().manual_seed(seed)
        with _Draws(generator), _SAMPLING:
            iterator = iter(source)
        while True:
            with _Draws(generator):
                try:
                    sample = next(iterator)
                except StopIteration:
                    return
            yield sample


def _some(num_samples: int) -> int:
    """The number, if it is one to train on."""
    if num_samples < 1:
        raise DataError("the data hold no samples: see that the dataset finds its files")
    return num_samples


def collated(samples: list[Any], collate: Collate, place: Place | None) -> Batch:
    """The batch of samples that begin at `place`."""
    seed = None if place is None else derive_seed(place.seed, "collate", place.epoch, place.start)
    try:
        with drawing(seed):
            return collate(samples)
    except (TypeError, RuntimeError) as error:
        if collate is not default_collate:
            raise
        raise DataError(
            f"samples cannot be made a batch of: {error}; give a collate function"
        ) from error


@contextmanager
def drawing(seed: int | None) -> Iterator[None]:
    """What this thread draws from PyTorch's generator meanwhile comes from one of `seed`; None: as ever."""
    if seed is None:
        yield
    else:
        with _Draws(torch.Generator().manual_seed(seed)):
            yield


class _Draws(TorchFunctionMode):
    """Draws from a generator of its own: the process's is everybody's, and another thread may compute."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator = generator

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _RANDOM and kwargs.get("generator") is None:
            kwargs = kwargs | {"generator": self._generator}
        return func(*args, **kwargs)


_RANDOM = frozenset(
    {
        *(torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal),
        *(torch.rand_like, torch.randn_like, torch.randint_like),
        *(torch.bernoulli, torch.multinomial, torch.poisson),
        *(getattr(Tensor, name) for name in ("bernoulli", "multinomial", "bernoulli_", "random_")),
        *(
            getattr(Tensor, f"{name}_")
            for name in ("uniform", "normal", "exponential", "log_normal")
        ),
        *(getattr(Tensor, f"{name}_") for name in ("cauchy", "geometric")),
    }
)


def _sampler_of(loader: DataLoader[Any]) -> Iterable[Any]:
    own = loader.batch_sampler
    return loader.sampler if own is None or loader.batch_size is not None else own


def _only_shuffles(sampler: Iterable[Any]) -> bool:
    """Whether it takes every sample once, in an order that means nothing."""
    if type(sampler) is not RandomSampler:
        return False
    return not sampler.replacement and sampler.num_samples == len(sampler.data_source)


def _drawn(sampler: Iterable[Any], seed: int, epoch: int) -> list[int]:
    """A sampler's indices in an epoch; those of a batch sampler one batch after the other."""
    _set_epoch(sampler, epoch)
    if getattr(sampler, "generator", False) is not False:
        sampler = copy.copy(sampler)
        sampler.generator = torch.Generator().manual_seed(seed)  # type: ignore[attr-defined]
    with _SAMPLING, torch.random.fork_rng(devices=[]), _python_generators(seed):
        torch.default_generator.manual_seed(seed)
        drawn = list(sampler)
    return [int(place) for each in drawn for place in (each if isinstance(each, list) else [each])]


@contextmanager
def _python_generators(seed: int) -> Iterator[None]:
    before = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


def _set_epoch(data: object, epoch: int) -> None:
    if callable(set_epoch := getattr(data, "set_epoch", None)):
        set_epoch(epoch)


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
