"""Plans written by hand, even cuts, and what is refused."""

import logging
from dataclasses import replace
from typing import Any

import pytest

from smolcluster.algorithms.PipelineParallel.config import PipelineConfig
from smolcluster.algorithms.PipelineParallel.dealing import Dealer
from smolcluster.algorithms.PipelineParallel.plan import StageMap, even_cut, written_cut
from smolcluster.configs.checks import check_algorithm
from smolcluster.configs.resolve import load_settings
from smolcluster.errors import ConfigError

Ranges = dict[str, list[tuple[int, int]]]


def config(**values: Any) -> PipelineConfig:
    return PipelineConfig.model_validate(values)


def test_a_written_plan_is_taken_in_the_order_of_the_layers() -> None:
    found = written_cut(24, {"pi5": [(20, 24)], "mac": [(0, 12)], "win": [(12, 20)]}, config())
    assert (found.cuts, found.ranks) == ((0, 12, 20, 24), (0, 1, 2))
    assert str(found) == "mac 0 to 11, win 12 to 19, pi5 20 to 23"
    assert found.neighbours(0) == {1, 2}, "first and last exchange what is tied"


def test_several_stages_a_machine_are_written_as_the_schedule_has_them() -> None:
    folded: Ranges = {"a": [(0, 2), (6, 8)], "b": [(2, 4), (4, 6)]}
    assert written_cut(8, folded, config(schedule="zb-v")).ranks == (0, 1, 1, 0)
    looped: Ranges = {"a": [(0, 2), (4, 6)], "b": [(2, 4), (6, 8)]}
    assert written_cut(8, looped, config(schedule="interleaved")).ranks == (0, 1, 0, 1)


@pytest.mark.parametrize(
    ("ranges", "schedule", "words"),
    [
        ({"a": [(0, 5)], "b": [(4, 8)]}, "1f1b", "has twice layers 4 to 4, at b"),
        ({"a": [(0, 3)], "b": [(4, 8)]}, "1f1b", "leaves out layers 3 to 3, at b"),
        ({"a": [(2, 8)]}, "1f1b", "leaves out layers 0 to 1, at a"),
        ({"a": [(0, 0)], "b": [(0, 8)]}, "1f1b", r"a has \[0, 0\], which is no layer"),
        ({"a": [(4, 0)], "b": [(4, 8)]}, "1f1b", r"a has \[4, 0\], which is no layer"),
        (
            {"a": [(0, 4)], "b": [(4, 9)]},
            "1f1b",
            "ends with layer 8, the model's layers are 0 to 7",
        ),
        ({"a": [(0, 4)]}, "1f1b", "ends with layer 3, the model's layers are 0 to 7"),
        ({}, "1f1b", "names no machine"),
        (
            {"a": [(0, 2), (6, 8)], "b": [(2, 6)]},
            "1f1b",
            r"machines \[0, 1, 0\], schedule 1f1b on 2 machines has them on \[0, 1\]",
        ),
        (
            {"a": [(0, 4)], "b": [(4, 8)]},
            "zb-v",
            r"machines \[0, 1\], schedule zb-v on 2 machines has them on \[0, 1, 1, 0\]",
        ),
    ],
    ids=[
        *("overlapping", "gap", "not from 0", "empty", "reversed", "too long", "too short"),
        *("no machine", "two stages of 1f1b", "one stage of zb-v"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(ranges: Ranges, schedule: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        written_cut(8, ranges, config(schedule=schedule))
    assert "\n" not in str(caught.value)


def test_an_even_cut_differs_by_one_layer_at_most() -> None:
    assert even_cut(10, ["a", "b", "c"], config()).cuts == (0, 3, 7, 10)
    with pytest.raises(ConfigError, match=r"3 layers, which cannot be 4 stages .* use fewer"):
        even_cut(3, ["a", "b"], config(schedule="zb-v"))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("schedule=1fb1", "schedule is '1fb1', must be one of gpipe.*did you mean"),
        ("microbatches=3", "does not divide the 8 samples of a step: change microbatches or"),
        ("precision=fp16", "set precision to bf16"),
        ("optimizer=Adagrad", "a pipeline takes adam, adamw, sgd"),
        ("ema_decay=0.99", "ema_decay is 0.99.*set it to null"),
    ],
)
def test_a_configuration_that_a_pipeline_cannot_take_is_refused(override: str, words: str) -> None:
    settings = load_settings("pipeline", "digits", None, ["batch_size=8", override], environ={})
    with pytest.raises(ConfigError, match=words):
        check_algorithm(settings, "pipeline")


def test_a_plan_of_an_unknown_machine_is_refused() -> None:
    settings = load_settings("pipeline", "digits", None, ["batch_size=8"], environ={})
    cluster = settings.cluster.model_copy(update={"shard_plan": {"pi6": (0, 8)}})
    with pytest.raises(
        ConfigError, match=r"names 'pi6', must be one of .*macbook; did you mean pi5"
    ):
        check_algorithm(replace(settings, cluster=cluster), "pipeline")


def test_a_cut_with_fewer_layers_for_one_machine() -> None:
    """What it gives up the smaller of its neighbours has."""
    cut = StageMap((0, 4, 9, 12), (0, 1, 2), ("a", "b", "c"))
    assert cut.relieved(0) == "{a: [0, 2], b: [2, 9], c: [9, 12]}"
    assert cut.relieved(1) == "{a: [0, 4], b: [4, 6], c: [6, 12]}"
    assert cut.relieved(2) == "{a: [0, 4], b: [4, 11], c: [11, 12]}"
    assert not StageMap((0, 1, 2), (0, 1), ("a", "b")).relieved(0), "a layer is the least"
    assert not StageMap((0, 9), (0,), ("a",)).relieved(0)
    assert not StageMap((0, 4, 8, 9), (0, 1, 0), ("a", "b")).relieved(0)


def test_a_written_plan_is_dealt_to_workers_that_are_called_as_in_the_cluster_file() -> None:
    overrides = ["shard_plan={pi5: [0, 3], win: [3, 8]}"]
    settings = load_settings("pipeline", "digits", None, overrides, {}, local=True, local_workers=2)
    cluster, own = settings.cluster, settings.of(PipelineConfig)
    dealer = Dealer(own, settings.train, cluster, 8, logging.getLogger("test"))
    for names in (["pi5", "win"], ["worker1", "worker2"], ["worker1", "win"]):
        peers: dict[str, Any] = dict.fromkeys(names)
        found = dealer.cut(peers)
        assert (list(found.map.nodes), found.map.cuts) == (names, (0, 3, 8))
