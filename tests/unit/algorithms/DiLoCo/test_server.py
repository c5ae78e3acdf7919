"""What DiLoCo's server goes on from, without a run."""

import time
import weakref
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from harness import local_settings
from smolcluster.algorithms.DiLoCo.exchange import DeltaArrived
from smolcluster.algorithms.DiLoCo.ledger import RoundsState
from smolcluster.algorithms.DiLoCo.outer import new_outer
from smolcluster.algorithms.DiLoCo.outer_links import new_stores
from smolcluster.algorithms.DiLoCo.peers import LEAST_PATIENCE_S, Peer
from smolcluster.algorithms.DiLoCo.rounds import Round, SyncBeginning
from smolcluster.algorithms.DiLoCo.server import Server, new_beginning
from smolcluster.errors import CheckpointError, ConfigError
from smolcluster.server.store import Part
from smolcluster.server.store_links import NormsArrived
from smolcluster.server.worker import Worker
from smolcluster.training.build import build
from smolcluster.wire.membership import Member
from smolcluster.wire.messages import PartKey


def go_on_from(num_fragments: int, **more: Any) -> Mock:
    """The stores that have taken up a checkpoint, which holds `more`."""
    rounds = RoundsState(
        version=7,
        num_fragments=num_fragments,
        outer_lr=0.7,
        outer_momentum=0.5,
        partly_applied=[],
        **more,
    )
    server: Any = SimpleNamespace(numbers=range(num_fragments), ledger=Mock(), stores=Mock())
    server.config, server.outer = SimpleNamespace(outer_lr=0.5, outer_momentum=0.5), Mock()
    server.round, server.beginning = Round(num_fragments), SyncBeginning(100, 10)
    Server.go_on_from(server, rounds)
    assert server.round.local_steps == more.get("local_steps", 1)
    assert server.beginning.is_over == ("sync_steps" not in more)
    assert server.beginning.num_steps == more.get("sync_steps", 0)
    stores: Mock = server.stores
    return stores


def test_momentum_that_is_laid_fragment_by_fragment_is_not_read_as_the_weights_are() -> None:
    with pytest.raises(CheckpointError, match="earlier version"):
        go_on_from(2)
    go_on_from(1).resume.assert_called_with(7)  # there both are one order
    go_on_from(2, momentum_order="weights").resume.assert_called_with(7)


def test_a_run_goes_on_with_its_local_steps_if_its_checkpoint_says_them() -> None:
    go_on_from(1)
    go_on_from(1, local_steps=902)


def test_a_run_goes_on_in_its_synchronous_beginning_if_its_checkpoint_says_so() -> None:
    go_on_from(1, sync_steps=7, sync_waited_s=1.5)


def test_a_bucket_that_its_store_has_lost_is_not_decided_on() -> None:
    server: Any = SimpleNamespace(peers={}, stores=Mock())
    part = NormsArrived(1, PartKey(instance="a" * 8, of=1), 0, 1, ((1.0,), (1.0,)))
    for is_there in (False, True):
        server.stores.hear.return_value = is_there
        Server.on_norms(server, part)
        assert server.stores.drop_part.called == is_there


def peer_that_owes(*, since: float) -> Peer:
    """It was last heard of then, and is sending what it has changed."""
    session = Mock(num_gone=0)
    worker: Any = SimpleNamespace(
        live_session=session, gauge=SimpleNamespace(received_bytes=0), name="worker 1"
    )
    worker.member = SimpleNamespace(session_id=1, instance="a" * 8)
    return Peer(1.0, worker=worker, progressed_at=since)


def server_of(peer: Peer) -> Any:
    server: Any = Mock(peers={peer.id: peer})
    server.config.grace = None
    server.ledger.asked.return_value = None
    server.heard = lambda it: Server.heard(server, it)
    return server


def test_who_is_late_with_a_change_takes_part_again_when_it_has_sent_all_of_it() -> None:
    """Until then it can do nothing else; but as long as its change goes on coming, it is not cut."""
    peer = peer_that_owes(since=0.0)
    peer.is_stalled = True
    server = server_of(peer)
    key, values, free = PartKey(instance="a" * 8, of=1), torch.ones(4), Mock()
    for part in (None, Part(0, values, free)):
        assert not server.send_weights.called
        came = DeltaArrived(
            session_id=1, of=1, fragment=0, bucket=0, values=values, part=part, buffers={}
        )
        before = time.monotonic()
        Server.on_part(server, peer, key, came)
        assert peer.progressed_at >= before
        assert peer.is_stalled == (part is None)
    free.assert_called_once_with()
    server.send_weights.assert_called_once_with(peer)


def test_nobody_is_late_because_the_server_was_held_up() -> None:
    """What workers have sent meanwhile is still to be taken up."""
    peer = peer_that_owes(since=100.0)
    server = server_of(peer)
    server.decided_at, came_back = 101.0, 101.0 + 2 * LEAST_PATIENCE_S
    server.was_away = partial(Server.was_away, server)
    server.decide = partial(Server.leave_late, server)
    for now in (came_back, came_back + 0.5):
        Server.decide_at(server, now)
        assert not peer.is_stalled
    for seconds in range(int(LEAST_PATIENCE_S)):
        Server.decide_at(server, came_back + seconds)
    assert peer.is_stalled


def test_of_a_worker_that_has_gone_only_who_it_was_is_kept() -> None:
    session = Mock(receiver=Mock(in_progress=False))
    worker = Worker(Member(1, 1, "ann", "a" * 8), session=session)
    server: Any = Mock(peers={1: Peer(1.0, worker=worker)}, workers={1: worker})
    gauge = weakref.ref(worker.gauge)
    Server.on_departure(server, worker)
    name = worker.name
    del worker
    assert server.workers[1].name == name
    server.reset_mock()  # it has kept what it was called with
    assert gauge() is None


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("local_steps=10",), (0.7, 0.5)),
        (("local_steps=1",), (0.7, 0.5)),
        (("local_steps=null",), (0.7, 0.5)),
        (("local_steps=1", "optimizer=muon"), (0.7, 0.6)),
        (("local_steps=1000",), (1.0, 0.0)),
        (("local_steps=1", "codec_up=topk"), (1.0, 0.0)),
        (("local_steps=1", "outer_momentum=0.3"), (0.7, 0.3)),
        (("local_steps=1", "outer_lr=0.4", "optimizer=muon"), (0.4, 0.6)),
    ],
)
def test_the_outer_step_is_that_of_the_rule_where_the_user_has_said_nothing(
    overrides: tuple[str, ...], expected: tuple[float, float]
) -> None:
    """648 batches of two workers: 324 rounds of one local step each."""
    settings = local_settings("model.hidden=8", *overrides, workers=2, algorithm="diloco")
    node, run = settings.node, settings.run_config("test-run", "diloco")
    training = build(settings.train, 1, node.dataset, torch.device("cpu"))
    context: Any = SimpleNamespace(settings=settings, run=run, training=training)
    outer = new_outer(context, total_batches=648)
    assert (outer.learning_rate, outer.momentum) == pytest.approx(expected)


def test_a_run_that_ends_after_some_steps_begins_with_its_share_of_these() -> None:
    more = "num_steps=100", "sync_fraction=0.1", "batch_size=16"
    settings = local_settings("model.hidden=8", *more, workers=2, algorithm="diloco")
    node, run = settings.node, settings.run_config("test-run", "diloco")
    training = build(settings.train, 1, node.dataset, torch.device("cpu"))
    context: Any = SimpleNamespace(settings=settings, run=run, training=training)
    beginning = new_beginning(context, total_batches=100)
    share = round(settings.train.total_samples(training.num_samples) / 10)
    beginning.begin_step(share - 16, [])
    assert not beginning.is_over
    beginning.begin_step(share, [])
    assert beginning.is_over


@pytest.mark.parametrize("codec", ["int4", "fp16", None])
def test_a_codec_of_outer_steps_that_cannot_hold_the_weights_is_refused_at_the_start(
    codec: str | None,
) -> None:
    context = Mock()
    context.settings.cluster.store_nodes = ["here"]
    context.training.replica.layers = [("weight", slice(0, 4))]
    context.training.replica.params.dtype = torch.float64
    context.run.of.return_value.codec_down = codec
    if codec is None:
        new_stores(context, Mock(), 1)
        return
    with pytest.raises(ConfigError, match=rf"^codec_down {codec} works on float32.*float64"):
        new_stores(context, Mock(), 1)


def test_moments_that_are_being_copied_for_a_checkpoint_are_not_reset_meanwhile() -> None:
    moments, copied = torch.ones(4), list[float]()
    server: Any = Mock(peers={}, version=10, beginning=SyncBeginning(100, 10))
    server.dispatcher.samples_applied, server.dispatcher.total_samples = 100, 1000
    server.saver.wait_for_copy = lambda: copied.extend(moments.tolist())
    server.replica.optimizer.reset = moments.zero_
    Server.end_beginning(server)
    assert copied == [1.0] * 4
    assert not moments.any()
