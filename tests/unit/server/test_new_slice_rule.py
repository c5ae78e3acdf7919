"""How a rule of one's own is added for slices on several hosts: here each weight moves by the rate, whose way
is the sign of its mean gradient (signSGD, Bernstein et al., 1802.04434).
"""

import logging
from collections.abc import Sequence
from typing import Any, cast
from unittest.mock import Mock

import torch
from torch import Tensor

from harness import local_settings
from peers import opened, store_setup
from smolcluster.server.slices import by_name, place_of
from smolcluster.server.store import Counted, mean_of
from smolcluster.server.store_host import COORDINATOR, HeldSlice, Part, PartArrived
from smolcluster.server.store_links import NormsArrived, Patience, StoreLinks
from smolcluster.training.optimizer import bucket_norms
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
from unit.server.test_store_links import LISTENING, new_replica, open_session

WORKERS = ("a" * 8, "b" * 8)


def sign_step(weights: Tensor, parts: Sequence[Counted], rate: float) -> None:
    weights.sub_(mean_of(parts).sign(), alpha=rate)


class SignLinks(StoreLinks[Tensor]):
    """The server's side: what a slice holds, and what is said when it steps."""

    def _contents(self, place: slice) -> dict[str, Tensor]:
        return {WEIGHTS: self._replica.params[place]}

    def step(self, parts: dict[PartKey, Tensor], rate: float) -> None:
        named = tuple(CountedPart(key=key, weight=1.0) for key in parts)
        self._tell_to_step(self._holders(0), TakeStep(parts=named, learning_rate=rate))
        own = self._replica.params[place_of(self._replica.buckets, self.own_span)]
        sign_step(own, [(1.0, values) for values in parts.values()], rate)


class SignSlice(HeldSlice):
    """A host's side: what takes workers' messages, which norms are told, and what a step does."""

    def _receiver_for(self, session_id: int) -> Receiver:
        raise NotImplementedError  # this test's workers have no sessions

    def _norms(self, _fragment: int, _bucket: int, values: Tensor) -> Sequence[Sequence[float]]:
        start, own = self._buckets[self._span.start].start, self._buckets[self._span.start :]
        return (bucket_norms(values, [slice(b.start - start, b.stop - start) for b in own]),)

    def _step(
        self, step: TakeStep, _fragment: int, _keys: Sequence[PartKey], parts: Sequence[Counted]
    ) -> None:
        sign_step(self._contents[WEIGHTS], parts, step.learning_rate or 0.0)


def test_a_rule_of_ones_own_steps_on_two_hosts_as_on_one() -> None:
    run, log = local_settings().run_config("test-run", "edp"), logging.getLogger("test")
    options: dict[str, Any] = {"run": run, "codec": "fp32", "incarnation": "here", "log": log}
    replica, expected = new_replica(), new_replica().params
    patience = Patience(start_s=9.0, lost_s=9.0)
    links = SignLinks(replica, ("mini1", "win"), patience=patience, **options)
    links.begin(0, Mock())
    session = open_session(links, "win", 1)
    [given] = [each for each in session.sent if isinstance(each, Slice)]
    values = torch.cat(
        [torch.frombuffer(bytearray(f.payload), dtype=torch.float32) for f in session.frames]
    )
    setup = store_setup(SignSlice)
    answer = Accepted(bucket_bytes=replica.bucket_bytes, heartbeat_timeout_s=1.0)
    held = SignSlice(setup, answer, Inbox(), given, by_name(given.contents, values))
    links.handle(MessageReceived(1, LISTENING))
    receiver, told = links._receivers[1], list[object]()
    coordinator = Mock(send_frame=lambda frame: receiver(*opened(frame)))
    coordinator.send = lambda message, payload: told.append(receiver(message, payload))

    def obey(message: Message) -> None:
        held.handle(MessageReceived(COORDINATOR, message), cast(Session, coordinator))

    session.send = obey  # type: ignore[method-assign]
    place, free = place_of(replica.buckets, links.own_span), Mock()
    generator, parts, whole = torch.Generator().manual_seed(0), dict[PartKey, Tensor](), []
    for number, worker in enumerate(WORKERS, 1):
        gradient = torch.randn(replica.num_params, generator=generator)
        whole.append((1.0, gradient.clone()))
        key = PartKey(instance=worker, of=number)
        parts[key] = gradient[place]
        held._workers[worker] = Mock(session_id=number)
        theirs = gradient[place.stop :]
        arrived = PartArrived(number, number, 0, given.first, theirs, Part(0, theirs, free))
        assert links.collect(key, parts[key]) is None, "its other part is not there"
        held.handle(arrived, cast(Session, coordinator))
        norms = told.pop()
        assert isinstance(norms, NormsArrived)
        assert links.collect(key, norms) is not None
    links.step(parts, 0.1)
    sign_step(expected, whole, 0.1)
    assert links.gather(1)
    assert torch.equal(replica.params, expected)
    assert free.call_count == len(WORKERS)
