"""Any number of hosts makes the same of the same changes, bit for bit, and sends workers the same."""

import math
from typing import cast
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from peers import opened
from smolcluster.algorithms.DiLoCo.exchange import (
    DeltaArrived,
    Layout,
    delta_frames,
    step_assembler,
)
from smolcluster.algorithms.DiLoCo.ledger import Request
from smolcluster.configs.schema import GradientClipping
from smolcluster.errors import ProtocolError
from smolcluster.server import store_host
from smolcluster.server.slices import arrived
from smolcluster.server.store import Part
from smolcluster.server.store_links import NormsArrived
from smolcluster.wire.messages import MAX_CHANGES, Collect, OuterStep, PartKey
from unit.algorithms.DiLoCo.hosting import Hosting, Line, StoreHost

FAST, SLOW = "a" * 8, "b" * 8
WORKERS = (FAST, SLOW)
FIRST = PartKey(instance=FAST, of=1)
ASKED = Request(1, 0, 0, ())
CODECS = [("fp32", None), ("int8", "int8"), ("int4", "int4"), ("topk", None)]


def changes_of(hosting: Hosting, fragment: int, seed: int) -> list[tuple[str, Tensor, float]]:
    generator = torch.Generator().manual_seed(seed)
    numel = hosting.layout.fragments[fragment].numel
    return [
        (worker, torch.randn(numel, generator=generator) * 0.01, weight)
        for worker, weight in zip(WORKERS, (24.0, 7.0), strict=True)
    ]


def state_of(hosting: Hosting) -> dict[str, Tensor]:
    assert hosting.links.gather(1)
    return {"weights": hosting.replica.params, **hosting.links.tensors}


def assert_same(hosting: Hosting, other: Hosting) -> None:
    ours, theirs = state_of(hosting), state_of(other)
    assert ours.keys() == theirs.keys()
    for name, values in ours.items():
        assert torch.equal(values, theirs[name]), name


@pytest.mark.parametrize("num_hosts", [2, 3])
@pytest.mark.parametrize("num_fragments", [1, 3])
@pytest.mark.parametrize(("codec_up", "codec_down"), CODECS)
def test_steps_are_the_same_on_any_number_of_hosts(
    num_hosts: int, num_fragments: int, codec_up: str, codec_down: str | None
) -> None:
    alone, spread = (
        Hosting(
            hosts,
            WORKERS,
            num_fragments=num_fragments,
            codec_up=codec_up,
            codec_down=codec_down,
        )
        for hosts in (1, num_hosts)
    )
    for number in range(4 * num_fragments):
        for each in (alone, spread):
            fragment = number % num_fragments
            each.step(fragment, *changes_of(each, fragment, number))
    assert_same(alone, spread)


@pytest.mark.parametrize("num_fragments", [1, 3])
@pytest.mark.parametrize(("codec_up", "codec_down"), CODECS[:3])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_steps_along_gradients_are_the_same_on_any_number_of_hosts(
    num_fragments: int, codec_up: str, codec_down: str | None, optimizer: str
) -> None:
    """Also when the slices have been given anew, and with outer steps after them."""
    alone, spread = (
        Hosting(
            hosts,
            WORKERS,
            num_fragments=num_fragments,
            codec_up=codec_up,
            codec_down=codec_down,
            optimizer=optimizer,
        )
        for hosts in (1, 3)
    )
    for number in range(4):
        for each in (alone, spread):
            gradients = [changes_of(each, fragment, number) for fragment in range(num_fragments)]
            assert each.step_together(gradients)
        assert_same(alone, spread)
        assert_same_moments(alone, spread)
        if number == 1:
            spread.lose(spread.stores[0])
            spread.open("win", 9)
    for each in (alone, spread):
        each.step(0, *changes_of(each, 0, 9))
    assert_same(alone, spread)


def assert_same_moments(hosting: Hosting, other: Hosting) -> None:
    ours, theirs = (each.replica.optimizer.state for each in (hosting, other))
    for name, values in ours.items():
        assert torch.equal(values, theirs[name]), name


def test_gradients_of_a_step_that_comes_to_nothing_are_kept_nowhere() -> None:
    """A store that was asked for them is lost before it tells: the others step along none of them."""
    hosting = Hosting(3, WORKERS, num_fragments=3, optimizer="adamw")
    gradients = [changes_of(hosting, number, number) for number in range(3)]
    win, pi5 = hosting.stores
    session = next(each.session for each in hosting.links._stores if each.node == "win")
    assert session is not None
    brought = [
        [hosting.bring(worker, number, values, weight) for worker, values, weight in each]
        for number, each in enumerate(gradients)
    ]
    cast(Line, session).hears = lambda _message, _payload: None
    before = state_of_own(hosting)
    assert not hosting.take_step(brought)
    assert pi5.held is not None
    assert pi5.held._slice._means
    assert torch.equal(state_of_own(hosting), before)
    hosting.lose(win)
    for each in brought:
        for change in each:
            hosting.links.drop(change)
    assert not pi5.held._slice._parts
    assert not pi5.held._slice._means
    hosting.open("win", 9)
    assert hosting.step_together([[], gradients[1], []])
    other = Hosting(3, WORKERS, num_fragments=3, optimizer="adamw")
    assert other.step_together([[], gradients[1], []])
    assert torch.equal(state_of(hosting)["weights"], state_of(other)["weights"])


def state_of_own(hosting: Hosting) -> Tensor:
    return hosting.replica.params.clone()


@pytest.mark.parametrize("codec_down", [None, "int8", "int4"])
def test_changes_that_are_applied_one_by_one_are_the_same(codec_down: str | None) -> None:
    alone, spread = (
        Hosting(hosts, WORKERS, codec_down=codec_down, is_async=True) for hosts in (1, 3)
    )
    for each in (alone, spread):
        for worker in WORKERS:
            each.links.send_whole(worker, 0)
        each.step(0, *changes_of(each, 0, 0))
        copies = {worker: Copy(each, worker) for worker in WORKERS}
        for copy in copies.values():
            copy.follow(0)
        for seed in range(1, 8):
            worker, values, weight = changes_of(each, 0, seed)[seed % 2]
            change = each.bring(worker, 0, values, weight)
            change.share = 0.5
            each.links.apply(change)
            copies[worker].follow(0)
        for copy in copies.values():
            for _ in range(8):  # what the codec loses of one way is in the next
                copy.follow(0)
        for copy in copies.values():
            torch.testing.assert_close(copy.weights, state_of(each)["weights"], rtol=0, atol=1e-6)
    assert_same(alone, spread)


def test_a_fragment_without_gradients_stays_in_a_step_of_all() -> None:
    """Though its optimizer has momentum from the step before."""
    hosting = Hosting(1, WORKERS, num_fragments=3, optimizer="adam")
    replica = hosting.replica
    for left_out in (None, 1):
        before = replica.params.clone()
        changes = [
            []
            if number == left_out
            else [
                hosting.bring(worker, number, values, weight)
                for worker, values, weight in changes_of(hosting, number, seed=number)
            ]
            for number in range(3)
        ]
        assert hosting.take_step(changes, GradientClipping())
    for number, fragment in enumerate(hosting.layout.fragments):
        is_same = torch.equal(fragment.view(replica.params), fragment.view(before))
        assert is_same == (number == 1)


@pytest.mark.parametrize(("codec_down", "num_copied"), [(None, 0), ("int8", 6)])
def test_a_step_of_all_fragments_copies_no_weights_that_nobody_needs(
    codec_down: str | None, num_copied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lossy codec needs those of before and of after."""
    hosting = Hosting(1, WORKERS, num_fragments=3, codec_down=codec_down, optimizer="adam")
    changes = [
        [
            hosting.bring(worker, number, values, weight)
            for worker, values, weight in changes_of(hosting, number, seed=number)
        ]
        for number in range(3)
    ]
    copied: list[int] = []
    gather = Layout.gather

    def counted(layout: Layout, number: int, flat: Tensor) -> Tensor:
        copied.append(number)
        return gather(layout, number, flat)

    monkeypatch.setattr(Layout, "gather", counted)
    assert hosting.take_step(changes, GradientClipping())
    assert len(copied) == num_copied


class Copy:
    """A worker's copy of the weights, which it puts together of what hosts send it."""

    def __init__(self, hosting: Hosting, worker: str) -> None:
        self._hosting, self._worker = hosting, worker
        start = Hosting(1, WORKERS).replica  # all begin with the same weights
        self.weights = start.params.clone()
        self.versions = [0] * len(hosting.layout.fragments)
        self.num_whole = 0
        """Fragments that came whole, not as what has become of those of before."""

    def follow(self, number: int) -> None:
        """Get what has become of a fragment."""
        hosting, layout = self._hosting, self._hosting.layout
        for store in hosting.stores:
            store.sent[self._worker].clear()
        own = hosting.links.send_fragment(self._worker, number, self.versions[number])
        spans = [(hosting.links.own_span, [opened(frame) for frame in own])]
        for store in hosting.stores:
            assert store.given is not None
            span = range(store.given.first, store.given.stop)
            spans.append((span, store.sent[self._worker]))
        base = layout.gather(number, self.weights)
        parts: list[Tensor] = []
        is_whole = False
        for span, said in spans:
            part = layout.part(span)
            start = sum(values.numel() for values in parts)
            values = base[start : start + part.fragments[number].numel]
            assembler = step_assembler(self._codec, part)
            for message, payload in said:
                assert isinstance(message, OuterStep)
                is_whole = message.base_version is None
                _, arrived = assembler.take(message, payload)
                if arrived is not None:
                    values = arrived if is_whole else values - arrived
            parts.append(values)
        self.num_whole += is_whole
        layout.fragments[number].scatter(torch.cat(parts), self.weights)
        self.versions[number] = hosting.links.own.versions[number]

    @property
    def _codec(self) -> str:
        return self._hosting.links._codec_down or "fp32"


@pytest.mark.parametrize("codec_down", [None, "int8", "int4"])
def test_a_worker_that_follows_has_the_weights_whoever_holds_them(codec_down: str | None) -> None:
    hosting = Hosting(3, WORKERS, num_fragments=3, codec_down=codec_down)
    prompt, late = Copy(hosting, FAST), Copy(hosting, SLOW)
    for number in range(6):
        hosting.step(number % 3, *changes_of(hosting, number % 3, number))
        prompt.follow(number % 3)
    for number in range(3):
        late.follow(number)
    weights = state_of(hosting)["weights"]
    assert torch.equal(prompt.weights, weights)
    assert torch.equal(late.weights, weights)
    assert prompt.num_whole == (0 if codec_down else 6)
    assert late.num_whole == 3, "who is two steps behind"


@pytest.mark.parametrize("num_after", [1, 2])
def test_what_one_number_of_hosts_has_saved_another_goes_on_from(num_after: int) -> None:
    """As through a checkpoint: weights, momentum, and what the codec owes."""
    whole, before, after = (
        Hosting(hosts, WORKERS, num_fragments=2, codec_down="int4") for hosts in (1, 3, num_after)
    )
    for number in range(4):
        for each in (whole, before):
            each.step(number % 2, *changes_of(each, number % 2, number))
    saved = {name: values.clone() for name, values in state_of(before).items()}
    after = Hosting(1, WORKERS, num_fragments=2, codec_down="int4")
    resumed = fill(after, saved) if num_after == 1 else goes_on(num_after, saved)
    for number in range(4, 8):
        for each in (whole, resumed):
            each.step(number % 2, *changes_of(each, number % 2, number))
    assert_same(whole, resumed)


def fill(hosting: Hosting, saved: dict[str, Tensor]) -> Hosting:
    hosting.replica.params.copy_(saved["weights"])
    for name, values in hosting.links.tensors.items():
        values.copy_(saved[name])
    hosting.links.resume(4)
    return hosting


def goes_on(num_hosts: int, saved: dict[str, Tensor]) -> Hosting:
    """Its stores come when the checkpoint has been restored."""
    hosting = Hosting(num_hosts, WORKERS, num_fragments=2, codec_down="int4")
    for store in list(hosting.stores):
        hosting.lose(store)
    fill(hosting, saved)
    hosting.links.begin(0, lambda *_: None)
    hosting.open("win", 9)
    return hosting


def test_a_store_that_is_lost_gets_its_slice_as_it_was_gathered_last() -> None:
    hosting = Hosting(3, WORKERS, num_fragments=2, codec_down="int8")
    hosting.step(0, *changes_of(hosting, 0, 1))
    gathered = state_of(hosting)["weights"].clone()
    hosting.step(0, *changes_of(hosting, 0, 2))
    hosting.step(1, *changes_of(hosting, 1, 3))  # of which win holds nothing
    win = hosting.stores[0]
    assert win.held is not None
    span = hosting.links._stores[0].span
    hosting.lose(win)
    assert (hosting.num_lost, hosting.links.is_ready) == (1, False)
    [(node, num_steps, share)] = hosting.undone
    assert (node, num_steps) == ("win", 1)
    assert share == pytest.approx(256 / 610)
    hosting.open("win", 9)
    held = hosting.stores[-1].held
    assert held is not None
    assert held._slice.versions == list(hosting.links.own.versions)
    weights = state_of(hosting)["weights"]
    place = slice(256 * span.start, 256 * span.stop)
    assert torch.equal(weights[place], gathered[place])
    assert not torch.equal(weights, gathered), "the others keep what they have learnt since"


def test_the_norm_of_a_change_is_that_of_all_its_parts() -> None:
    hosting = Hosting(3, WORKERS)
    [(worker, values, _), *_] = changes_of(hosting, 0, 0)
    change = hosting.bring(worker, 0, values)
    assert change.norm == pytest.approx(float(values.norm()))
    assert change.weights_norm == pytest.approx(float(hosting.replica.params.norm()))
    hosting.links.drop(change)
    values[600] = 1e30  # its square is no float32
    assert hosting.bring(worker, 0, values).norm == pytest.approx(1e30)


def test_a_part_that_is_not_finite_makes_no_finite_norm() -> None:
    hosting = Hosting(3, WORKERS)
    receiver, key = hosting.stores[0].receiver, FIRST
    values = torch.zeros(256)
    own = DeltaArrived(
        session_id=0,
        of=1,
        fragment=0,
        bucket=0,
        values=values,
        part=Part(0, values, Mock()),
        buffers={},
    )
    assert hosting.links.whole(ASKED, key, own) is None
    assert hosting.links.whole(ASKED, key, NormsArrived(2, key, 0, 2, ((1.0,), (1.0,)))) is None
    part = receiver(*arrived(key, 0, 1, ((math.nan,), (1.0,))))
    assert isinstance(part, NormsArrived)
    whole = hosting.links.whole(ASKED, key, part)
    assert whole is not None
    assert math.isnan(whole.norm)


def test_what_is_dropped_is_kept_nowhere() -> None:
    hosting = Hosting(3, WORKERS)
    hosting.links.drop(hosting.bring(FAST, 0, changes_of(hosting, 0, 0)[0][1]))
    assert all(store.held is not None and not store.held._slice._parts for store in hosting.stores)


def test_a_store_is_not_believed_a_bucket_that_it_does_not_hold() -> None:
    hosting = Hosting(3, WORKERS)
    receiver = hosting.stores[0].receiver
    with pytest.raises(ProtocolError, match="bucket 0 of fragment 0, which it has not"):
        receiver(*arrived(FIRST, 0, 0, ((1.0,), (1.0,))))
    with pytest.raises(ProtocolError, match="one norm a bucket"):
        receiver(*arrived(FIRST, 0, 1, ((1.0,), (1.0,), (1.0,))))


def send_to(store: StoreHost, hosting: Hosting, request: int, values: Tensor) -> None:
    """FAST sends a store what that holds of a change."""
    encoder = hosting.encoders[FAST]
    encoded = encoder.encode(0, values)
    collect = Collect(request=request, fragment=0, wait=False)
    frames = delta_frames(hosting.layout, collect, encoded, encoder.codec)
    for home, frame in zip(hosting.layout.homes(0), frames, strict=True):
        if hosting.host_of(home) is store:
            store.deliver(FAST, *opened(frame))


def test_what_a_lost_store_leaves_in_parts_is_kept_by_no_other() -> None:
    hosting = Hosting(3, WORKERS)
    win, pi5 = hosting.stores
    assert pi5.held is not None
    send_to(pi5, hosting, 1, changes_of(hosting, 0, 0)[0][1])
    [part] = hosting.events
    assert isinstance(part, NormsArrived)
    assert hosting.links.whole(ASKED, FIRST, part) is None
    assert pi5.held._slice._parts
    hosting.lose(win)
    assert not pi5.held._slice._parts


def test_what_a_store_has_told_before_it_was_lost_is_not_heard() -> None:
    """Decided on, it would be a change that the store has not: it would end its session again."""
    hosting = Hosting(2, WORKERS)
    parts = [NormsArrived(number, FIRST, 0, 1, ((1.0,), (1.0,))) for number in (1, 9)]
    assert [hosting.links.hear(part) for part in parts] == [True, False]
    hosting.lose(hosting.stores[0])
    hosting.open("win", 9)
    assert [hosting.links.hear(part) for part in parts] == [False, True]


def test_a_change_that_is_sent_to_a_store_twice_counts_once() -> None:
    hosting = Hosting(2, WORKERS)
    (store,) = hosting.stores
    values = changes_of(hosting, 0, 0)[0][1]
    change = hosting.bring(FAST, 0, values, 1.0)
    send_to(store, hosting, hosting.num_requests, 2 * values)
    norms = [each for each in hosting.events if isinstance(each, NormsArrived)]
    for part in norms:
        hosting.links.drop_part(part)  # nobody waits for it
    hosting.links.step(0, [change])
    alone = Hosting(1, WORKERS)
    alone.step(0, (FAST, values, 1.0))
    assert_same(hosting, alone)


def test_one_host_takes_more_changes_than_a_message_to_stores_may_name() -> None:
    workers, ones = [f"{number:08x}" for number in range(MAX_CHANGES + 1)], torch.ones(610)
    hosting = Hosting(1, workers)
    hosting.links.step(0, [hosting.bring(worker, 0, ones) for worker in workers])
    assert hosting.links.version == 1


def test_a_store_lets_all_fragments_wait_for_a_slow_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its single bucket three fragments have a part, and each is a frame of its own."""
    listen = Mock(return_value=Mock(ports=()))
    monkeypatch.setattr(store_host.StoreSetup, "listen", listen)
    last = Hosting(3, WORKERS, num_fragments=4).stores[-1].held
    assert last is not None
    last.listen(())
    queued = store_host.COPIES_QUEUED * 3 + store_host.EXTRA_QUEUED
    assert listen.call_args.kwargs["max_queued"] == queued
