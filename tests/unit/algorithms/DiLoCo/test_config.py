"""What DiLoCo's own keys may be together."""

import pytest
from pydantic import ValidationError

from harness import local_settings
from smolcluster.algorithms.DiLoCo.config import DiLoCoConfig
from smolcluster.configs.resolve import check_algorithm
from smolcluster.errors import ConfigError


@pytest.mark.parametrize("momentum", [None, 0.0])
def test_sparse_changes_go_without_momentum(momentum: float | None) -> None:
    assert DiLoCoConfig(codec_up="topk", outer_momentum=momentum).uplink_codec == "topk"


def test_sparse_changes_with_momentum_are_refused_in_one_line() -> None:
    with pytest.raises(ValidationError, match=r"outer_momentum is 0\.9 with codec_up topk"):
        DiLoCoConfig(codec_up="topk", outer_momentum=0.9)


def test_outer_steps_are_never_sparse() -> None:
    with pytest.raises(ValidationError, match="codec_down"):
        DiLoCoConfig.model_validate({"codec_down": "topk"})


def test_only_asynchronous_momentum_is_delayed() -> None:
    with pytest.raises(ConfigError, match="momentum_delay is 8, but mode is streaming"):
        check_algorithm(local_settings("momentum_delay=8", algorithm="diloco"), "diloco")
    check_algorithm(local_settings("momentum_delay=8", "mode=async", algorithm="diloco"), "diloco")
