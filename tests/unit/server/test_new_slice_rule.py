"""How a rule of one's own is added for slices on several hosts: here each weight moves by the rate, whose way
is the sign of its mean gradient (signSGD, Bernstein et al., 1802.04434).
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, cast
from unittest.mock import Mock

import torch
from torch import Tensor

from harness import local_settings
from peers import opened, store_setup
from smolcluster.server.slices import by_name, place_of
from smolcluster.server.store import Counted, HeldSlice, Part, PartArrived, mean_of
from smolcluster.server.store_host import COORDINATOR, SliceHost
from smolcluster.server.store_links import NormsArrived, StoreLinks
from smolcluster.training.optimizer import bucket_norms
from smolcluster.training.replica import Replica
from smolcluster.wire.inbox import Inbox, MessageReceived
from smolcluster.wire.messages import (
    WEIGHTS,
    Accepted,
    CountedPart,
    Message,
    PartKey,
    Slice,
    TakeStep,
)
from smolcluster.wire.session import Receiver, Session
from unit.server.test_store_links import LISTENING, new_replica, open_session, patient

WORKERS = ("a" * 8, "b" * 8)


def sign_step(weights: Tensor, parts: Sequence[Counted], rate: float) -> None:
    weights.sub_(mean_of(parts).sign(), alpha=rate)


class SignSlice(HeldSlice):
    """What is held, which norms are told, and what a step does."""

    def __init__(self, weights: Tensor, *place: Any) -> None:
        super().__init__(*place)
        self._weights = weights

    def contents(self) -> Mapping[str, Tensor]:
        return {WEIGHTS: self._weights}

    def norms(self, _fragment: int, _bucket: int, values: Tensor) -> Sequence[Sequence[float]]:
        own = self._buckets[self.span.start : self.span.stop]
        start = own[0].start
        return (bucket_norms(values, [slice(b.start - start, b.stop - start) for b in own]),)

    def _step_parts(
        self, step: TakeStep, _fragment: int, _keys: Sequence[PartKey], parts: Sequence[Counted]
    ) -> None:
        sign_step(self._weights, parts, step.learning_rate or 0.0)


class SignLinks(StoreLinks[PartArrived]):
    """The server's side: what slices hold, and what is said when they step."""

    def __init__(self, replica: Replica, nodes: Sequence[str], **links: Any) -> None:
        super().__init__(replica, nodes, **links)
        weights = replica.params[place_of(replica.buckets, self.own_span)]
        self.own = SignSlice(weights, replica.buckets, self.own_span, "here")

    def _contents(self, place: slice) -> dict[str, Tensor]:
        return {WEIGHTS: self._replica.params[place]}

    def step(self, keys: Sequence[PartKey], rate: float) -> None:
        named = tuple(CountedPart(key=key, weight=1.0) for key in keys)
        self._step(TakeStep(parts=named, learning_rate=rate))


class Held(SliceHost):
    """A store: its slice, and what takes workers' messages."""

    def _new_slice(self, values: Mapping[str, Tensor]) -> SignSlice:
        return SignSlice(values[WEIGHTS], self._buckets, self._span, self._given.incarnation)

    def _receiver_for(self, session_id: int) -> Receiver:
        raise NotImplementedError  # this test's workers have no sessions


def test_a_rule_of_ones_own_steps_on_two_hosts_as_on_one() -> None:
    run, log = local_settings().run_config("test-run", "edp"), logging.getLogger("test")
    options: dict[str, Any] = {"run": run, "codec": "fp32", "incarnation": "here", "log": log}
    replica, expected = new_replica(), new_replica().params
    links = SignLinks(replica, ("mini1", "win"), cluster=patient(9.0, 9.0), **options)
    links.begin(0, Mock())
    session = open_session(links, "win", 1)
    [given] = [each for each in session.sent if isinstance(each, Slice)]
    values = torch.cat(
        [torch.frombuffer(bytearray(f.payload), dtype=torch.float32) for f in session.frames]
    )
    setup = store_setup(Held)
    answer = Accepted(bucket_bytes=replica.bucket_bytes, heartbeat_timeout_s=1.0)
    held = Held(setup, answer, Inbox(), given, by_name(given.contents, values))
    links.handle(MessageReceived(1, LISTENING))
    receiver, told = session.receiver, list[object]()
    coordinator = Mock(send_frame=lambda frame: receiver(*opened(frame)))
    coordinator.send = lambda message, payload: told.append(receiver(message, payload))

    def obey(message: Message) -> None:
        held.handle(MessageReceived(COORDINATOR, message), cast(Session, coordinator))

    session.send = obey  # type: ignore[method-assign]
    place, free = place_of(replica.buckets, links.own_span), Mock()
    generator, keys, whole = torch.Generator().manual_seed(0), list[PartKey](), []
    for number, worker in enumerate(WORKERS, 1):
        gradient = torch.randn(replica.num_params, generator=generator)
        whole.append((1.0, gradient.clone()))
        key = PartKey(instance=worker, of=number)
        keys.append(key)
        held._workers[worker] = Mock(session_id=number)
        own, theirs = (
            PartArrived(
                session_id=number,
                of=number,
                fragment=0,
                bucket=bucket,
                values=values,
                part=Part(0, values, free),
            )
            for bucket, values in ((0, gradient[place]), (given.first, gradient[place.stop :]))
        )
        assert links.take(key, own) is None, "its other part is not there"
        held.handle(theirs, cast(Session, coordinator))
        norms = told.pop()
        assert isinstance(norms, NormsArrived)
        assert links.collect(key, norms) is own
    links.step(keys, 0.1)
    sign_step(expected, whole, 0.1)
    assert links.gather(1)
    assert torch.equal(replica.params, expected)
    assert free.call_count == 2 * len(WORKERS)
