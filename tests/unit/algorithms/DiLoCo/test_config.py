"""What DiLoCo's own keys may be together."""

from itertools import accumulate, pairwise

import pytest
from pydantic import ValidationError

from harness import local_settings
from smolcluster.algorithms.DiLoCo.config import DiLoCoConfig
from smolcluster.configs.checks import check_algorithm
from smolcluster.errors import ConfigError


def test_more_pieces_than_stages_can_be_told_of_are_refused() -> None:
    """Tensors of two sizes lie in turn, and each fragment gets some of both."""
    stops = list(accumulate(size for _ in range(8) for size in (1, 10)))
    layers = [(str(stop), slice(start, stop)) for start, stop in pairwise([0, *stops])]
    DiLoCoConfig(mode="sync").check_pieces(layers, 1)
    with pytest.raises(ConfigError, match=r"pieces in 4 fragments.* lower fragments, or set mode"):
        DiLoCoConfig().check_pieces(layers, 4)


@pytest.mark.parametrize("momentum", ["null", "0"])
def test_sparse_changes_go_without_momentum(momentum: str) -> None:
    settings = local_settings("codec_up=topk", f"outer_momentum={momentum}", algorithm="diloco")
    check_algorithm(settings, "diloco")


def test_sparse_changes_with_momentum_are_refused_in_one_line() -> None:
    settings = local_settings("codec_up=topk", "outer_momentum=0.9", algorithm="diloco")
    with pytest.raises(ConfigError, match=r"^outer_momentum is 0\.9, but codec_up is topk"):
        check_algorithm(settings, "diloco")


@pytest.mark.parametrize("momentum", ["1", "1.5", "-0.1"])
def test_the_message_names_both_bounds_of_the_outer_momentum(momentum: str) -> None:
    with pytest.raises(ConfigError, match="must be a number of 0 or more and below 1, or null"):
        local_settings(f"outer_momentum={momentum}", algorithm="diloco")


def test_outer_steps_are_never_sparse() -> None:
    with pytest.raises(ValidationError, match="codec_down"):
        DiLoCoConfig.model_validate({"codec_down": "topk"})
