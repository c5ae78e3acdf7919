"""A plan by hand beside the memory of its machines."""

import logging
from typing import Any
from unittest.mock import Mock

import pytest

from pipelines import measured_layer
from smolcluster.algorithms.PipelineParallel.automatic import automatic_cut, message_of
from smolcluster.algorithms.PipelineParallel.config import PipelineConfig
from smolcluster.algorithms.PipelineParallel.crew import Peer
from smolcluster.algorithms.PipelineParallel.dealing import Dealer, check_memory
from smolcluster.algorithms.PipelineParallel.part_copy import MOST_COPIES
from smolcluster.algorithms.PipelineParallel.plan import StageMap
from smolcluster.configs.schema import DatasetConfig, SimpleNNConfig, TrainConfig
from smolcluster.errors import ConfigError
from smolcluster.training.stages.measure import LayerSpeeds
from smolcluster.wire.membership import Member
from smolcluster.wire.messages import HostPort, Listening, MeasuredLayer

TRAIN = TrainConfig(
    batch_size=64, model=SimpleNNConfig(hidden=4), dataset=DatasetConfig(name="digits")
)
LAYER = measured_layer(activation_bytes=100, output_bytes=10, input_bytes=10)
"""With gradients and two moments 4000 bytes."""
CUT = StageMap((0, 6, 8), (0, 1), ("mini1", "pi5"))
NEEDED = 6 * 4000 + 2 * 6 * 100
"""Of mini1, which holds two microbatches."""


def reported(
    memory_bytes: int, host: str, device: str = "cpu (1 thread)", layer: MeasuredLayer = LAYER
) -> Peer:
    speeds = LayerSpeeds(layers=(layer,) * 8, memory_bytes=memory_bytes, device=device)
    listening = Listening(places=(HostPort(host=host, port=7777),))
    return Peer(Mock(), listening, message_of(speeds))


def joined(dealer: Dealer, **peers: Peer) -> None:
    """Let them be there, by their nodes."""
    for number, (node, peer) in enumerate(peers.items()):
        peer.worker = Mock(member=Member(number, number, node, node))
        dealer.peers[number] = peer


def check(
    one: Peer, other: Peer, cut: StageMap = CUT, config: PipelineConfig | None = None
) -> None:
    check_memory(cut, {"mini1": one, "pi5": other}, config or PipelineConfig(), TRAIN)


def test_a_stage_beyond_its_memory_is_refused_with_a_cut_that_fits() -> None:
    check(reported(NEEDED, "a"), reported(10**6, "b"))
    with pytest.raises(ConfigError) as refused:
        check(reported(NEEDED - 1, "a"), reported(10**6, "b"))
    assert str(refused.value) == (
        "shard_plan: layers 0 to 5 of mini1 need 0.0252 MB, the device has 0.0252 MB free: "
        "{mini1: [0, 4], pi5: [4, 8]} would fit"
    )


def test_processes_of_one_machine_need_their_memory_together() -> None:
    both = NEEDED + 2 * 4000 + 2 * 100
    check(reported(both, "a"), reported(both - 500, "a"))
    with pytest.raises(ConfigError, match="layers 0 to 5 of mini1 and layers 6 to 7 of pi5 need"):
        check(reported(both - 1, "a"), reported(both - 500, "a"))
    check(reported(NEEDED, "a", "cuda:0 (A)"), reported(NEEDED, "a", "cuda:1 (A)"))


def test_what_is_computed_again_is_not_held() -> None:
    config = PipelineConfig(activation_checkpointing="full")
    needed = 6 * 4000 + 2 * 10 + 6 * 100
    check(reported(needed, "a"), reported(10**6, "b"), config=config)
    with pytest.raises(ConfigError):
        check(reported(needed - 1, "a"), reported(10**6, "b"), config=config)


def test_several_stages_of_a_machine_count_together() -> None:
    cut = StageMap((0, 2, 4, 6, 8), (0, 1, 1, 0), ("mini1", "pi5"))
    config = PipelineConfig(schedule="zb-v")
    with pytest.raises(ConfigError, match=r"layers 0 to 1, 6 to 7 of mini1 need"):
        check(reported(4 * 4000, "a"), reported(10**6, "b"), cut, config)
    check(reported(10**5, "a"), reported(10**6, "b"), cut, config)


def test_where_one_has_not_measured_nothing_is_refused() -> None:
    check(reported(1, "a"), Peer(Mock()))


def test_a_plan_that_was_not_measured_is_compared_with_memory_before_the_first_step() -> None:
    def deal(memory_bytes: int, num_copies: int = 0, shard_plan: Any = "even") -> Any:
        dealer = Dealer(
            PipelineConfig(shard_plan=shard_plan),
            TRAIN,
            Mock(num_workers=2, node_of=str),
            8,
            logging.getLogger(),
            num_copies=num_copies,
        )
        joined(dealer, mini1=reported(10**6, "a"), pi5=reported(memory_bytes, "b"))
        return dealer.deal(is_preparing=False)

    needed = 4 * 4000 + 4 * 100
    assert deal(needed).map.cuts == (0, 4, 8)
    with pytest.raises(ConfigError, match=r"layers 4 to 7 of pi5 need .*pi5: \[5, 8\]} would fit"):
        deal(needed - 1)
    with_copies = needed + 4 * MOST_COPIES * 1000
    assert deal(with_copies, MOST_COPIES).map.cuts == (0, 4, 8)
    with pytest.raises(ConfigError, match="layers 4 to 7 of pi5 need"):
        deal(with_copies - 1, MOST_COPIES)
    by_hand = {"mini1": (0, 6), "pi5": (6, 8)}
    assert deal(2 * 4000 + 2 * 100, shard_plan=by_hand).map.cuts == (0, 6, 8)
    with pytest.raises(ConfigError, match="layers 6 to 7 of pi5 need"):
        deal(2 * 4000 + 2 * 100 - 1, shard_plan=by_hand)


def test_of_a_shared_device_less_is_counted_on_for_all_who_share_it() -> None:
    config = PipelineConfig(shard_plan="even")
    dealer = Dealer(config, TRAIN, Mock(num_workers=3), 9, logging.getLogger())
    hosts = {"mini1": "10.0.0.1", "mini2": "10.0.0.1", "pi5": "10.0.0.2"}
    joined(dealer, **{name: reported(10**6, host) for name, host in hosts.items()})
    ready = dealer.ready
    crew = Mock(peers=ready, cut=Mock(plan=Mock(stages=[Mock(memory_bytes=1000)] * 3)))
    for number, less in ((0, 2 * 900), (2, 900)):
        dealer.relieve(crew, ready[number], "too much")
        measured = ready[number].measured
        assert measured is not None
        assert measured.memory_bytes == less


def test_copies_of_a_worker_s_weights_are_planned_for() -> None:
    timed = LAYER.model_copy(update={"forward_s": 1.0, "input_s": 1.0, "weight_s": 1.0})
    memory_bytes = 4 * 4000 + 4 * 4 * 100
    machines = {name: reported(memory_bytes, name, layer=timed) for name in ("mini1", "pi5")}
    config = PipelineConfig()
    assert automatic_cut(8, machines, config, TRAIN).map.cuts == (0, 4, 8)
    with pytest.raises(ConfigError):
        automatic_cut(8, machines, config, TRAIN, num_copies=MOST_COPIES)
