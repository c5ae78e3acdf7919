"""A pipeline's stages as numbers, and in words."""

from smolcluster.observability.view.stages import StageView, numbers_of

OP_S = {"backward_weight": 0.05, "forward": 0.1, "backward_input": 0.03}


def test_what_was_told_as_numbers_is_found_again() -> None:
    numbers = numbers_of({0: (0, 6), 11: (21, 24), 2: (12, 15)}, OP_S, 0.25, {1: 2e6, 3: 1500.0})
    stage = StageView.of({"share/wait": 0.2, "gpu/power_w": 3.0} | numbers)
    assert stage is not None
    assert stage.layers == [(0, 6), (12, 15), (21, 24)]
    assert stage.op_s == OP_S
    assert (stage.bubble, stage.sends) == (0.25, {1: 2e6, 3: 1500.0})


def test_in_words_layers_are_told_with_the_last_one_and_workers_from_1() -> None:
    stage = StageView.of(numbers_of({0: (0, 6), 2: (12, 13)}, OP_S, 0.25, {1: 2e6}))
    assert stage is not None
    assert stage.ranges == "0-5, 12"
    assert stage.times == "forward 0.1 s, input gradient 30 ms, weight gradient 50 ms"
    assert stage.rates == "2 MB/s to 2"


def test_who_has_no_layers_is_no_stage() -> None:
    assert StageView.of({"share/wait": 0.2, "drift": 0.1}) is None


def test_what_a_link_can_carry_is_told_beside_what_is_sent() -> None:
    numbers = numbers_of({0: (0, 6)}, OP_S, 0.25, {1: 2e6, 2: 1e6}, {1: 12.5e6})
    stage = StageView.of(numbers)
    assert stage is not None
    assert stage.rates == "2 of 12 MB/s to 2, 1 MB/s to 3"
