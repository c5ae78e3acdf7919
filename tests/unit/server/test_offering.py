"""What processes that attach compare: also samples by their content, since a server has none of them."""

import base64
import json
import zlib
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset, random_split

from smolcluster.data.marks import chosen, marks_of
from smolcluster.errors import ConfigError, ProtocolError
from smolcluster.server.offering import (
    OFFER,
    Offer,
    Offered,
    OfferUnusable,
    Plan,
    _OfferReceiver,
    offer_frames,
    values_of,
)
from smolcluster.wire.frames import check_head
from smolcluster.wire.inbox import Event
from smolcluster.wire.messages import decode


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


def test_a_model_that_no_message_describes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smolcluster.server.offering.MAX_PLAN_CHARS", 40)
    with pytest.raises(ConfigError, match=r"its 2 tensors take .* must be at most 40: freeze some"):
        Plan.of(nn.Linear(1, 1), 320, is_counted=False)


def events_of(model: nn.Module) -> list[Event]:
    """What a server makes of what it is sent of an offer of this model."""
    plan = Plan.of(model, 320, is_counted=False)
    receiver = _OfferReceiver(7)
    events = [receiver(Offer(plan=plan.text), memoryview(b""))]
    for frame in offer_frames(values_of(model, plan)):
        message = decode(frame.kind, check_head(frame.head), OFFER.kinds)
        events.append(receiver(message, memoryview(bytearray(frame.payload))))
    return [event for event in events if event is not None]


def test_no_buffer_of_a_model_is_rounded() -> None:
    model = nn.Linear(2, 3)
    model.register_buffer("flag", torch.tensor(True))
    for name, values in {
        "packed": torch.tensor([[2**31 - 1, -(2**31) + 1]], dtype=torch.int32),
        "count": torch.tensor(2**62 + 1),
        "mean": torch.full((3,), 0.1, dtype=torch.float64),
        "brief": torch.tensor([0.1, float("-inf")], dtype=torch.bfloat16),
        "nothing": torch.empty(0),
    }.items():
        model.register_buffer(name, values)
    offered = events_of(model)[-1]
    assert isinstance(offered, Offered)
    there = offered.workload.new_model().state_dict()
    assert there.keys() == model.state_dict().keys()
    for name, values in model.state_dict().items():
        assert there[name].dtype == values.dtype
        assert torch.equal(there[name], values)


def test_an_offer_that_the_server_cannot_hold_is_told_and_the_rest_of_it_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: Mock(available=2**20))
    (told,) = events_of(nn.Linear(2**19, 1))
    assert isinstance(told, OfferUnusable)
    assert "2.1 MB of memory, and this machine has 1.0 MB free" in told.reason


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
