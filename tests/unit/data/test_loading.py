"""A user's own data: which samples make an epoch, in which order, and what chance does to them."""

import itertools
import random
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from torch import Tensor, distributions, nn
from torch.nn import functional
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from smolcluster.data import drawing, loading, processes
from smolcluster.data.dataset import Place
from smolcluster.data.drawing import NUM_WATCHED
from smolcluster.data.loading import (
    LoadedSamples,
    MapSamples,
    StreamSamples,
    every_index,
    samples_of,
)
from smolcluster.data.permutation import epoch_permutation
from smolcluster.data.prefetch import Prefetch
from smolcluster.data.processes import Work, end_processes, start_processes
from smolcluster.errors import ConfigError, DataError, UserCodeError
from smolcluster.utils.isolated_rng import isolated_python, python_state
from waiting import DEADLINE_S, eventually

SEED = 7


class Numbers:
    """The numbers from 0, each with one drawn at random."""

    def __init__(self, length: int = 10) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, torch.rand(2) + torch.empty(2).uniform_() + torch.randn_like(torch.empty(2))


class Stream(IterableDataset[Any]):
    def __init__(self, length: int = 10) -> None:
        self.length = length
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.length):
            yield number, torch.rand(2)


class EveryOther(Sampler[int]):
    """Begins with the epoch's number."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.epoch % 2, 10, 2))


class Guessing(Sampler[int]):
    """Draws from everything that there is."""

    def __iter__(self) -> Iterator[int]:
        yield from (
            random.choice(range(10)),  # noqa: S311
            int(np.random.randint(10)),
            int(torch.randint(10, ())),
        )

    def __len__(self) -> int:
        return 3


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(), batch_size=3, **options)  # type: ignore[arg-type]


@contextmanager
def loading_ahead(dataset: Any, **options: Any) -> Iterator[Prefetch]:
    samples = samples_of(DataLoader(dataset, batch_size=2, **options))
    assert isinstance(samples, LoadedSamples)
    with closing(Prefetch(samples)) as prefetch:
        yield prefetch


def orders(data: Any, seed: int = SEED) -> list[list[int]]:
    samples = samples_of(data)
    return [samples.order(epoch, seed).tolist() for epoch in range(3)]


def permutations() -> list[list[int]]:
    return [epoch_permutation(SEED, epoch, 10).tolist() for epoch in range(3)]


def test_our_permutation_shuffles_what_has_no_order_of_its_own() -> None:
    assert orders(Numbers()) == orders(loader(shuffle=True)) == permutations()


def test_a_loader_that_does_not_shuffle_keeps_the_datasets_order() -> None:
    assert orders(loader()) == [list(range(10))] * 3
    assert orders(loader(sampler=SequentialSampler(range(10)))) == [list(range(10))] * 3


def test_drop_last_leaves_out_what_fills_no_batch() -> None:
    assert orders(loader(drop_last=True)) == [list(range(9))] * 3
    assert orders(loader(drop_last=True, shuffle=True)) == [each[:9] for each in permutations()]
    stream = DataLoader(Stream(), batch_size=3, drop_last=True)
    assert orders(stream) == [list(range(9))] * 3
    assert samples_of(stream, samples_per_epoch=8).num_samples == 6


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: WeightedRandomSampler([1.0] * 9 + [50.0], 8),
        lambda: SubsetRandomSampler(range(2, 8)),
        lambda: RandomSampler(range(10), replacement=True, num_samples=6),
        Guessing,
    ],
)
def test_a_sampler_draws_under_a_seed_of_run_and_epoch(sampler: Any) -> None:
    torch.manual_seed(1)
    first, expected = orders(loader(sampler=sampler())), torch.rand(3)
    torch.manual_seed(1)
    assert orders(loader(sampler=sampler())) == first
    assert torch.equal(torch.rand(3), expected), "the process's generator is left alone"
    assert len({tuple(each) for each in first}) > 1, "every epoch has an order of its own"
    assert orders(loader(sampler=sampler()), seed=8) != first


@pytest.mark.parametrize("is_of_batches", [False, True])
def test_a_sampler_is_told_the_epoch(is_of_batches: bool) -> None:
    data = loader(sampler=EveryOther())
    if is_of_batches:
        batches = BatchSampler(EveryOther(), batch_size=2, drop_last=False)
        data = DataLoader(Numbers(), batch_sampler=batches)  # type: ignore[arg-type]
    assert samples_of(data).num_samples == 5
    assert orders(data) == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9], [0, 2, 4, 6, 8]]


def test_a_batch_sampler_gives_order_and_size() -> None:
    batches = BatchSampler(EveryOther(), batch_size=2, drop_last=False)
    samples = samples_of(DataLoader(Numbers(), batch_sampler=batches))  # type: ignore[arg-type]
    assert samples.order(0, SEED).tolist() == [0, 2, 4, 6, 8]
    assert isinstance(samples, MapSamples)
    assert samples.batch_size == 2


class Batches(BatchSampler):
    """Gives each batch as `kind` makes it."""

    kind: Any = tuple

    def __iter__(self) -> Iterator[Any]:
        return map(self.kind, super().__iter__())


def test_a_batch_sampler_of_buckets_is_refused_unless_only_its_last_batch_is_smaller() -> None:
    def batches(*given: list[int]) -> Any:
        class Buckets(Sampler[list[int]]):
            batch_size = 2

            def __iter__(self) -> Iterator[list[int]]:
                return iter(given)

        return DataLoader(Numbers(), batch_sampler=Buckets())  # type: ignore[arg-type]

    assert orders(batches([0, 1], [2, 3], [4]))[0] == [0, 1, 2, 3, 4]
    with pytest.raises(ConfigError, match="Buckets gives batches of 1 samples among those of 2"):
        orders(batches([0, 1], [2], [3, 4], [5]))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dataset_is_told_of_each_epoch(num_workers: int) -> None:
    class Curriculum(Numbers):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __getitem__(self, index: int) -> Any:
            return index + 100 * self.epoch

    with loading_ahead(Curriculum(), num_workers=num_workers) as prefetch:
        read = [prefetch.batch(torch.tensor([3, 4]), Place(SEED, epoch, 0)) for epoch in range(3)]
    assert [each.tolist() for each in read] == [[3, 4], [103, 104], [203, 204]]


@pytest.mark.parametrize("kind", [tuple, np.array, torch.tensor, iter])
def test_a_batch_sampler_may_give_its_batches_in_any_container(kind: Any) -> None:
    batches = Batches(EveryOther(), batch_size=2, drop_last=False)
    batches.kind = kind
    assert orders(DataLoader(Numbers(), batch_sampler=batches))[0] == [0, 2, 4, 6, 8]  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [np.int64, torch.tensor])
def test_a_sampler_may_give_numbers_of_any_kind(kind: Any) -> None:
    assert orders(loader(sampler=[kind(each) for each in (3, 1)]))[0] == [3, 1]


@pytest.mark.parametrize("key", [(8, 0), "name", 1.5, torch.tensor([1, 2])])
def test_samples_named_by_what_is_no_number_are_refused_with_the_samplers_name(key: Any) -> None:
    with pytest.raises(ConfigError, match=r"list names a sample .*, must be a whole number"):
        _ = samples_of(loader(sampler=[key])).num_samples


@pytest.mark.parametrize(
    "generator",
    [torch.Generator(), random.Random(1), np.random.default_rng()],  # noqa: S311
)
def test_a_samplers_own_generator_does_not_remember_how_often_it_was_drawn_from(
    generator: Any,
) -> None:
    class Own(Sampler[int]):
        def __init__(self) -> None:
            self.generator = self.own = generator

        def __iter__(self) -> Iterator[int]:
            if isinstance(self.own, torch.Generator):
                return iter(torch.randperm(10, generator=self.own).tolist())
            places = list(range(10))
            self.own.shuffle(places)
            return iter(places)

    data: Any = DataLoader(Numbers(), batch_sampler=BatchSampler(Own(), 2, drop_last=False))  # type: ignore[arg-type]
    first = orders(data)
    assert (orders(data), len({tuple(each) for each in first})) == (first, 3)


def test_a_dataset_with_generators_of_its_own_leaves_the_process_s_to_others() -> None:
    own = drawing.Drawing([random.Random(1)])  # noqa: S311
    for seed in range(NUM_WATCHED):
        with own.of_process(seed):
            pass
    with isolated_python(3):
        expected = random.random(), random.random()  # noqa: S311
    with isolated_python(3):
        first = random.random()  # noqa: S311
        with own.of_process(0):  # in which a model may draw in another thread
            second = random.random()  # noqa: S311
    assert (first, second) == expected


def test_an_exception_of_a_sampler_is_the_users() -> None:
    class Fails(EveryOther):
        def __iter__(self) -> Iterator[int]:
            raise KeyError("lengths.json")

    with pytest.raises(UserCodeError, match=r"lengths\.json"):
        _ = samples_of(loader(sampler=Fails())).num_samples


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        while True:
            yield 0


class EndlessSampler(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield 0


def test_what_has_no_end_is_refused_and_told_of_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count()
    monkeypatch.setattr(loading, "time", SimpleNamespace(monotonic=lambda: float(next(seconds))))
    monkeypatch.setattr(loading, "COUNT_PATIENCE_S", 20.0)
    monkeypatch.setattr(loading, "SAY_EVERY_S", 1.0)
    said: list[str] = []
    with pytest.raises(ConfigError, match="samples_per_epoch"):
        StreamSamples(Endless()).count(said.append)
    assert "counting its samples" in said[0]
    with pytest.raises(ConfigError, match="the sampler EndlessSampler has not ended"):
        _ = samples_of(loader(sampler=EndlessSampler())).num_samples


def test_an_epoch_of_another_length_is_refused() -> None:
    class Growing(EveryOther):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3 + self.epoch))

    samples = samples_of(loader(sampler=Growing()))
    with pytest.raises(DataError, match="epoch 2 of the DataLoader's sampler has 4 samples"):
        samples.order(1, SEED)


def test_what_is_drawn_for_a_sample_depends_on_its_place_alone() -> None:
    samples = MapSamples(Numbers())
    _, drawn = samples.batch(torch.tensor([4, 2, 9]), Place(SEED, 1, 5))
    torch.manual_seed(3)
    _, again = samples.batch(torch.tensor([2, 9]), Place(SEED, 1, 6))
    assert torch.equal(drawn[1:], again)
    assert not torch.equal(drawn, samples.batch(torch.tensor([4, 2, 9]), Place(SEED, 2, 5))[1])
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    samples.batch(torch.tensor([4, 2, 9]), Place(SEED, 1, 5))
    assert torch.equal(torch.rand(1), expected), "the process's generator is left alone"


@pytest.mark.parametrize(
    "draw",
    [
        nn.Dropout(0.5),
        lambda values: functional.alpha_dropout(values, 0.5, training=True),
        lambda values: functional.rrelu(-values, training=True),
        functional.gumbel_softmax,
        lambda values: values * distributions.Beta(0.4, 0.4).sample(),
        lambda values: values * distributions.Gamma(2.0, 2.0).sample(),
        lambda values: values * torch.binomial(torch.full((4,), 9.0), torch.full((4,), 0.5)),
        lambda values: nn.init.normal_(values.clone()),
        lambda values: nn.Linear(4, 4)(values).detach(),
    ],
    ids=["dropout", "alpha", "rrelu", "gumbel", "beta", "gamma", "binomial", "normal", "linear"],
)
def test_what_is_drawn_within_functions_of_pytorch_depends_on_its_place_alone(draw: Any) -> None:
    class Drawn(Numbers):
        def __getitem__(self, index: int) -> Any:
            return torch.cat([draw(torch.ones(4)) for _ in range(8)])

    def drawn(first: int) -> Tensor:
        batch: Tensor = samples.batch(torch.tensor([first, 3]), Place(SEED, 0, first))
        return batch

    samples = MapSamples(Drawn(), lambda rows: draw(torch.stack(rows)[:, :4]))
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    found = drawn(1)
    assert torch.equal(torch.rand(1), expected), "the process's generator is left alone"
    assert torch.equal(found, drawn(1))
    assert not torch.equal(found, drawn(2))


@pytest.mark.parametrize(
    "draw",
    [
        lambda _: torch.rand(2, device="cuda"),
        torch.rand_like,
        Tensor.uniform_,
        nn.init.normal_,
        lambda values: torch.randperm(4, out=values.long()),
        lambda values: functional.rrelu(values, training=True),
    ],
    ids=["rand", "like", "uniform", "normal", "out", "rrelu"],
)
def test_what_is_drawn_on_an_accelerator_comes_from_one_generator_of_it(
    draw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch computes shapes alone for an accelerator that is not there."""
    from torch._subclasses import FakeTensorMode

    kinds: list[str] = []

    class Noted(torch.Generator):
        def __new__(cls, device: str = "cpu") -> Self:
            kinds.append(device)
            return super().__new__(cls)

    monkeypatch.setattr(torch, "Generator", Noted)
    with FakeTensorMode(), drawing.OfThread(SEED):
        for _ in range(2):
            assert draw(torch.ones(4, device="cuda")).device.type == "cuda"
    assert kinds == ["cuda"]


def test_a_loaders_collate_makes_the_batch() -> None:
    data = loader(collate_fn=partial(sorted, key=lambda sample: sample[0]))
    batch = samples_of(data).batch(torch.tensor([4, 2]))
    assert [number for number, _ in batch] == [2, 4]


def test_samples_that_cannot_be_stacked_are_refused() -> None:
    ragged = [torch.zeros(2), torch.zeros(3)]
    with pytest.raises(DataError, match="cannot be made a batch of: stack expects"):
        samples_of(ragged).batch(torch.tensor([0, 1]))


@pytest.mark.parametrize("data", [5, None, "numbers.txt", {"a": 1}])
def test_what_is_no_data_is_refused(data: Any) -> None:
    with pytest.raises(ConfigError, match=f"a {type(data).__name__}"):
        samples_of(data)


def test_a_loader_without_batches_is_refused() -> None:
    with pytest.raises(ConfigError, match="no batch_size"):
        samples_of(DataLoader(Numbers(), batch_size=None))  # type: ignore[arg-type]


@pytest.mark.parametrize("data", [[], DataLoader(Numbers(0)), Stream(0)])  # type: ignore[arg-type]
def test_no_samples_are_refused(data: Any) -> None:
    with pytest.raises(ConfigError, match="no samples"):
        _ = samples_of(data).num_samples


@pytest.mark.parametrize(
    ("data", "indices"),
    [
        (Numbers(3), [0, 1, 2]),
        (loader(shuffle=True), list(range(10))),
        (loader(sampler=EveryOther()), [0, 2, 4, 6, 8]),
        (Stream(3), [0, 1, 2]),
    ],
)
def test_what_is_evaluated_is_what_the_sampler_names(data: Any, indices: list[int]) -> None:
    assert every_index(samples_of(data)).tolist() == indices


# Streams


def read(samples: StreamSamples, epoch: int, *places: int) -> list[int]:
    return [int(number) for number, _ in samples.load(torch.tensor(places), Place(SEED, epoch, 0))]


def test_a_stream_is_counted_once_where_nobody_says_its_length() -> None:
    stream = Stream()
    samples = samples_of(stream)
    assert (samples.num_samples, samples.num_samples, len(stream.epochs)) == (10, 10, 1)
    assert samples_of(Stream(), samples_per_epoch=4).num_samples == 4
    assert orders(Stream(3)) == [[0, 1, 2]] * 3


def test_a_stream_is_read_in_order_and_begun_again_each_epoch() -> None:
    stream = Stream()
    samples = StreamSamples(stream, samples_per_epoch=6)
    assert read(samples, 0, 0, 1, 2) == [0, 1, 2]
    assert read(samples, 0, 4, 5) == [4, 5], "what is not wanted is passed over"
    assert read(samples, 1, 0) == [0]
    assert read(samples, 0, 1) == [1], "what lies behind is read again"
    assert stream.epochs == [0, 1, 0]


def test_a_stream_draws_under_a_seed_of_run_and_epoch() -> None:
    def drawn(epoch: int) -> Tensor:
        batch = StreamSamples(Stream()).batch(torch.arange(4), Place(SEED, epoch, 0))
        return batch[1]  # type: ignore[no-any-return]

    torch.manual_seed(1)
    first = drawn(0)
    assert torch.equal(first, drawn(0))
    assert not torch.equal(first, drawn(1))


class Shuffling(IterableDataset[Any]):
    """Draws from a buffer, as streams are shuffled."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __iter__(self) -> Iterator[Any]:
        buffer = self.generator.permutation(5)
        for number in range(5, 40):
            place = random.randrange(5)  # noqa: S311
            yield buffer[place], float(np.random.random())
            buffer[place] = number


class ShufflingAnew(Shuffling):
    """Makes its generator as an epoch begins."""

    def __iter__(self) -> Iterator[Any]:
        self.own = np.random.default_rng()
        return ((number, self.own.random()) for number in range(35))


@pytest.mark.parametrize("stream", [Shuffling, ShufflingAnew])
def test_a_stream_that_is_shuffled_by_random_is_the_same_where_it_is_read_again(
    stream: type[Shuffling],
) -> None:
    """Such as by a resumed run, which passes over the samples that were applied."""
    place, samples = Place(SEED, 1, 0), StreamSamples(stream(), samples_per_epoch=35)
    samples.load(torch.arange(35), Place(SEED, 0, 0))
    whole = samples.load(torch.arange(35), place)
    again = StreamSamples(stream(), samples_per_epoch=35)
    assert again.load(torch.tensor([0]), place) == whole[:1]
    rest = again.load(torch.arange(20, 35), place)
    assert rest == whole[20:]
    assert len(set(whole)) == 35


def test_a_stream_that_ends_too_soon_says_so() -> None:
    samples = StreamSamples(Stream(4), samples_per_epoch=6)
    with pytest.raises(DataError, match="ended after 4 samples of epoch 1, an epoch has 6"):
        read(samples, 0, 3, 4)


def test_a_stream_that_does_not_begin_anew_is_told_so() -> None:
    class Once(IterableDataset[Any]):
        left = iter(range(6))

        def __iter__(self) -> Iterator[int]:
            return self.left

    samples = samples_of(Once())
    assert isinstance(samples, StreamSamples)
    assert samples.num_samples == 6
    with pytest.raises(DataError, match=r"no sample in epoch 1: .*begin anew"):
        read(samples, 0, 0)


def test_what_can_be_gone_through_only_once_is_refused() -> None:
    with pytest.raises(ConfigError, match="a generator, which can be gone through only once"):
        samples_of((number for number in range(5)), samples_per_epoch=5)


# What people have


def test_a_hugging_face_dataset_is_a_map_style_one() -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": [[1.0, 2.0], [3.0, 4.0]], "label": [0, 1]})
    batch = samples_of(rows.with_format("torch")).batch(torch.tensor([1, 0]))
    assert batch["x"].tolist() == [[3.0, 4.0], [1.0, 2.0]]
    assert batch["label"].tolist() == [1, 0]


def test_a_hugging_face_stream_is_read_in_its_order() -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": [5, 6, 7]}).to_iterable_dataset()
    samples = samples_of(rows)
    assert isinstance(samples, StreamSamples)
    assert samples.num_samples == 3
    assert samples.batch(torch.tensor([1, 2]), Place(SEED, 0, 1))["x"].tolist() == [6, 7]


def test_a_folder_of_images(tmp_path: Path) -> None:
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    for number in range(4):
        folder = tmp_path / f"class{number % 2}"
        folder.mkdir(exist_ok=True)
        Image.new("RGB", (8, 8), (40 * number, 0, 0)).save(folder / f"{number}.png")
    augment = transforms.Compose([transforms.RandomCrop(4), transforms.ToTensor()])
    samples = samples_of(ImageFolder(str(tmp_path), augment))
    images, labels = samples.batch(torch.arange(4), Place(SEED, 0, 0))
    assert (images.shape, labels.tolist()) == ((4, 3, 4, 4), [0, 0, 1, 1])


# Ahead


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_is_loaded_ahead_is_what_is_loaded_at_once(num_workers: int) -> None:
    with loading_ahead(Numbers(), num_workers=num_workers) as prefetch:
        indices, place = torch.tensor([4, 2, 9, 0, 1]), Place(SEED, 1, 5)
        prefetch.want(indices[1:4], place._replace(start=6))
        ahead = prefetch.batch(indices, place)
    at_once = MapSamples(Numbers()).batch(indices, place)
    assert [each.tolist() for each in ahead] == [each.tolist() for each in at_once]


def test_the_generator_of_who_computes_is_left_alone_while_samples_are_loaded() -> None:
    prefetch = Prefetch(MapSamples(Numbers(1000)))
    torch.manual_seed(3)
    expected = torch.rand(100)
    torch.manual_seed(3)
    prefetch.want(torch.arange(1000), Place(SEED, 0, 0))
    drawn = [torch.rand(1) for _ in range(100)]
    prefetch.load(torch.arange(1000), Place(SEED, 0, 0))
    prefetch.close()
    assert torch.equal(torch.cat(drawn), expected)


def test_what_was_wanted_in_vain_is_forgotten() -> None:
    prefetch = Prefetch(MapSamples(Numbers(100)))
    prefetch.want(torch.arange(40), Place(SEED, 0, 0))
    samples = prefetch.load(torch.arange(30, 50), Place(SEED, 0, 30))
    prefetch.close()
    assert [number for number, _ in samples] == list(range(30, 50))
    assert not prefetch._loading


class Dying(Numbers):
    def __getitem__(self, index: int) -> Any:
        import os

        os._exit(9)


def test_a_process_that_has_died_is_told_to_who_takes_the_samples() -> None:
    with loading_ahead(Dying(), num_workers=2) as prefetch:
        for start in (0, 4):
            prefetch.want(torch.arange(4), Place(SEED, 0, start))
            with pytest.raises(
                DataError, match=r"one of the DataLoader's processes \(2\) has died"
            ):
                prefetch.load(torch.arange(4), Place(SEED, 0, start))


def test_processes_that_cannot_be_started_are_told_to_who_takes_the_samples() -> None:
    with loading_ahead(
        [lambda: None] * 8, num_workers=1, multiprocessing_context="spawn"
    ) as prefetch:
        prefetch.want(torch.arange(4), Place(SEED, 0, 0))
        with pytest.raises(DataError, match=r"processes cannot be started: .*pickle"):
            prefetch.load(torch.arange(4), Place(SEED, 0, 0))


def test_a_process_of_a_fork_server_loads() -> None:
    rows = TensorDataset(torch.arange(100))
    with loading_ahead(rows, num_workers=1, multiprocessing_context="forkserver") as prefetch:
        for start in range(0, 100, 50):
            (numbers,) = prefetch.batch(torch.arange(start, start + 50), Place(SEED, 0, start))
            assert numbers.tolist() == list(range(start, start + 50))


class Stuck(Numbers):
    def __getitem__(self, index: int) -> Any:
        time.sleep(600)


def test_processes_end_when_they_are_closed_whatever_they_do() -> None:
    with loading_ahead(Stuck(), num_workers=1) as prefetch:
        prefetch.want(torch.arange(4), Place(SEED, 0, 0))
        assert prefetch._processes is not None
        loading = list(prefetch._processes._processes)
        assert loading
    eventually(lambda: not any(map(psutil.pid_exists, loading)))


def test_a_process_that_has_just_been_forked_ends_though_its_parent_handles_sigterm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processes, "_begin", stay)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        executor = start_processes(
            DataLoader(Numbers(), num_workers=1),  # type: ignore[arg-type]
            Work(Numbers(), partial(getattr, Numbers()), partial(getattr, Numbers()), SEED),
        )
        executor.submit(time.sleep, 600)
        (loading,) = executor._processes
        end_processes(executor)
        eventually(lambda: not psutil.pid_exists(loading))
    finally:
        signal.signal(signal.SIGTERM, before)


def stay(*_: Any) -> None:
    time.sleep(600)


class Noise:
    """A transform that keeps generators of its own."""

    def __init__(self) -> None:
        self.numpys, self.olds = np.random.default_rng(0), np.random.RandomState(0)
        self.by_name: dict[str, Any] = {"torch": torch.Generator(), "python": random.Random(0)}  # noqa: S311

    def __call__(self) -> tuple[float, ...]:
        drawn = torch.rand((), generator=self.by_name["torch"])
        own = (self.numpys.random(), self.olds.random(), self.by_name["python"].random())
        return (*own, drawn.item())


class Drawing(Numbers):
    """Draws from every generator that there is, but for its first samples."""

    def __init__(self, length: int = 10) -> None:
        super().__init__(length)
        self.transforms = [Noise(), Noise()]

    def __getitem__(self, index: int) -> Any:
        if index < 3:
            return index, index, index
        drawn = random.random(), float(np.random.random()), float(torch.rand(()))  # noqa: S311
        return (*drawn, *(each() for each in self.transforms))


class DrawingLate(Drawing):
    """Makes its generators when it first draws from them."""

    def __init__(self, length: int = 10) -> None:
        super().__init__(length)
        self.transforms = []

    def __getitem__(self, index: int) -> Any:
        if index >= 3 and not self.transforms:
            self.transforms = [Noise(), Noise()]
        return super().__getitem__(index)


class DrawingByEpoch(Drawing):
    """Makes new generators for each epoch."""

    def set_epoch(self, _epoch: int) -> None:
        self.transforms = [Noise(), Noise()]


def noisy(samples: list[Any]) -> list[Any]:
    return [*samples, (random.random(), float(np.random.random()), float(torch.rand(())))]  # noqa: S311


@pytest.mark.parametrize("dataset", [Drawing, DrawingLate, DrawingByEpoch])
def test_what_is_drawn_depends_on_the_samples_place_alone(dataset: type[Drawing]) -> None:
    """Whoever loads them, and whatever it has loaded before."""

    def batch(num_workers: int, start: int) -> list[Any]:
        loader: DataLoader[Any] = DataLoader(
            dataset(40),  # type: ignore[arg-type]
            num_workers=num_workers,
            collate_fn=noisy,
        )
        samples = samples_of(loader)
        assert isinstance(samples, LoadedSamples)
        with closing(Prefetch(samples)) as prefetch:
            prefetch.load(torch.arange(start), Place(SEED, 0, 0))
            drawn: list[Any] = prefetch.batch(torch.arange(start, 40), Place(SEED, 1, start))
        return drawn

    first = batch(2, 0)
    assert len(set(first)) == 41
    assert all(len({*own, *others}) == 8 for *_, own, others in first[3:-1]), "no two draw alike"
    for num_workers in (0, 1):
        assert batch(num_workers, 0) == first
        assert batch(num_workers, 3)[:-1] == first[3:-1]


def test_what_is_held_out_is_drawn_alike_at_each_evaluation() -> None:
    """First and last stage of a pipeline gather it both."""
    samples = MapSamples(Drawing(40), noisy)
    first = samples.batch(torch.arange(40))
    assert len(set(first)) == 41
    assert samples.batch(torch.arange(40)) == first
    assert MapSamples(Drawing(40), noisy).batch(torch.arange(20, 40))[:-1] == first[20:-1]


def test_what_draws_from_generators_of_the_process_leaves_them_alone() -> None:
    state = python_state()
    MapSamples(Drawing()).load(torch.arange(10), Place(SEED, 0, 0))
    assert python_state() == state


def test_generators_of_the_process_are_left_to_who_computes_once_samples_have_drawn_nothing() -> (
    None
):
    """Its model may draw from them while the next samples are loaded."""

    class Looking(Numbers):
        def __getitem__(self, _index: int) -> Any:
            return random.getstate() == own

    own = random.getstate()
    found = MapSamples(Looking(20)).load(torch.arange(20), Place(SEED, 0, 0))
    assert found == [False] * NUM_WATCHED + [True] * (20 - NUM_WATCHED)


class OfItsProcess(Numbers):
    """Says which process loads, and what that drew as it began."""

    drawn: Any = None

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        return info.id, info.num_workers, OfItsProcess.drawn


def draw_at_the_beginning(number: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert info.id == number
    OfItsProcess.drawn = (random.random(), float(np.random.random()), float(torch.rand(())))  # noqa: S311


def test_every_process_knows_its_number_and_draws_what_is_its_own() -> None:
    with loading_ahead(
        OfItsProcess(1000), num_workers=2, worker_init_fn=draw_at_the_beginning
    ) as prefetch:
        found = set(prefetch.load(torch.arange(1000), Place(SEED, 0, 0)))
    assert {each[:2] for each in found} <= {(0, 2), (1, 2)}
    for drawn in zip(*(each[2] for each in found), strict=True):
        assert len(set(drawn)) == len(found)


def refuse_to_begin(number: int) -> None:
    raise ValueError(f"process {number} cannot begin")


def test_a_worker_init_that_fails_is_told() -> None:
    with (
        loading_ahead(Numbers(), num_workers=1, worker_init_fn=refuse_to_begin) as prefetch,
        pytest.raises(UserCodeError, match=r"worker_init_fn.*process 0 cannot begin"),
    ):
        prefetch.load(torch.arange(4), Place(SEED, 0, 0))


class Shared(IterableDataset[Any]):
    """A stream whose processes share its samples."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None, "it is read in processes"
        return iter(range(info.id, 8, info.num_workers))


def test_a_stream_is_read_by_the_loaders_processes() -> None:
    samples = samples_of(DataLoader(Shared(), batch_size=4, num_workers=2))
    assert isinstance(samples, StreamSamples)
    assert samples.num_samples == 8
    with closing(Prefetch(samples)) as prefetch:
        found = prefetch.batch(torch.arange(8), Place(SEED, 0, 0))
    assert found.tolist() == list(range(8))


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    return ours, theirs


@pytest.mark.parametrize("connected", [tcp_pair, socket.socketpair], ids=["TCP", "Unix"])
def test_a_process_that_loads_holds_no_connection_open(connected: Any) -> None:
    ours, theirs = connected()
    with theirs, loading_ahead(Numbers(), num_workers=1) as prefetch:
        prefetch.load(torch.arange(3), Place(SEED, 0, 0))
        ours.close()
        theirs.settimeout(DEADLINE_S)
        assert theirs.recv(1) == b"", "the end is seen while the process lives"
