"""What processes that attach compare: also samples by their content, since a server has none of them."""

import base64
import json
import zlib

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset, random_split

from smolcluster.data.marks import chosen, marks_of
from smolcluster.errors import ProtocolError
from smolcluster.server.offering import Plan


def plan_of(split: object) -> Plan:
    samples = marks_of(split, chosen(320))
    return Plan.of(nn.Linear(1, 1), 320, is_counted=False, samples=samples)


def test_a_process_that_splits_in_its_own_way_is_told_which_sample_differs() -> None:
    data = TensorDataset(torch.linspace(-1, 1, 400)[:, None])
    torch.manual_seed(1)
    first, second = (plan_of(random_split(data, [320, 80])[0]) for _ in range(2))
    told = Plan.parse(first.text)
    assert told == first
    assert first.sample_difference(told) is None
    said = second.sample_difference(told)
    assert said is not None
    assert said.startswith("sample 0 of this process's training data is not the run's")
    assert "generator=torch.Generator()" in said
    assert second.difference(told) is None, "all else is alike"
    assert second.fingerprint == first.fingerprint


@pytest.mark.parametrize(
    "content",
    [
        [],
        {},
        [[], 320, False, "", []],
        [[["parameter", "a..b", [1], "float32"]], 320, False, "", []],
        [[["other", "a", [1], "float32"]], 320, False, "", []],
        [[["parameter", "a", [-1], "float32"]], 320, False, "", []],
        [[["parameter", "a", [1], "nn"]], 320, False, "", []],
        [[["parameter", "a", [1], "float32"]], 0, False, "", []],
        [[["parameter", "a", [2**38], "float32"]], 320, False, "", []],
        [[["parameter", "a", [1], "float32"]], 320, False, "", [["a mark"]]],
    ],
)
def test_what_is_no_plan_is_refused(content: object) -> None:
    text = base64.b64encode(zlib.compress(json.dumps(content).encode())).decode()
    with pytest.raises(ProtocolError, match="plan of what is trained"):
        Plan.parse(text)
