"""What DiLoCo's own keys may be together."""

import pytest
from pydantic import ValidationError

from smolcluster.algorithms.DiLoCo.config import DiLoCoConfig


@pytest.mark.parametrize("momentum", [None, 0.0])
def test_sparse_changes_go_without_momentum(momentum: float | None) -> None:
    assert DiLoCoConfig(codec_up="topk", outer_momentum=momentum).uplink_codec == "topk"


def test_sparse_changes_with_momentum_are_refused_in_one_line() -> None:
    with pytest.raises(ValidationError, match=r"outer_momentum is 0\.9 with codec_up topk"):
        DiLoCoConfig(codec_up="topk", outer_momentum=0.9)


def test_outer_steps_are_never_sparse() -> None:
    with pytest.raises(ValidationError, match="codec_down"):
        DiLoCoConfig.model_validate({"codec_down": "topk"})
