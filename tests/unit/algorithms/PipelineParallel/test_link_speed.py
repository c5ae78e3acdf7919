"""What a link carries: which pairs are measured at the same time, and one over loopback."""

import pytest

from peers import DEADLINE_S
from pipelines import at_once, linked
from smolcluster.algorithms.PipelineParallel import link_speed
from smolcluster.algorithms.PipelineParallel.link_speed import UNMEASURED, Survey, measure_link
from smolcluster.algorithms.planning.layers import Link

FAST = Link(1e8, 1e-3)


def test_all_pairs_of_different_machines_are_measured_once_and_nobody_is_in_two() -> None:
    survey, hosts, rounds = Survey(), {"a": "1", "b": "2", "c": "3", "d": "3"}, []
    while pairs := survey.begin(hosts):
        rounds.append(pairs)
        for pair in pairs:
            for each in pair:
                assert survey.asked
                survey.take(each, FAST)
        assert not survey.asked
    assert all(len({end for pair in each for end in pair}) == 2 * len(each) for each in rounds)
    assert sorted(pair for each in rounds for pair in each) == [
        *(("a", "b"), ("a", "c"), ("a", "d"), ("b", "c"), ("b", "d")),
    ]
    assert len(survey.links) == 10, "both ways"


def test_who_comes_later_is_measured_and_nobody_else_again() -> None:
    survey = Survey({("a", "b"): FAST, ("b", "a"): FAST})
    assert not survey.begin({"a": "1", "b": "2"})
    assert survey.begin({"a": "1", "b": "2", "c": "3"}) == [("a", "c")]
    assert survey.asked == {"a": "c", "c": "a"}


def test_who_does_not_answer_is_taken_for_slow() -> None:
    survey = Survey()
    survey.begin({"a": "1", "b": "2"})
    survey.take("a", FAST)
    survey.take("x", FAST)
    assert survey.give_up() == {"b": "a"}
    assert survey.links == {("a", "b"): FAST, ("b", "a"): UNMEASURED}
    assert not survey.begin({"a": "1", "b": "2"})


def test_links_to_a_process_that_is_gone_are_waited_for_no_more() -> None:
    survey = Survey()
    survey.begin({"a": "1", "b": "2"})
    survey.take("a", FAST)
    survey.lose("c")
    assert survey.asked == {"b": "a"}
    survey.lose("a")
    assert not survey.asked


@pytest.mark.parametrize("enough_s", [0.0, 60.0], ids=["slow", "fast"])
def test_two_processes_measure_what_each_sends_the_other(
    enough_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_speed, "ENOUGH_S", enough_s)
    with linked(2) as made:

        def measured(rank: int) -> Link:
            return measure_link(made[rank].links, made[rank].route([made[1 - rank].known], (0, 1)))

        for each in at_once(measured, 2):
            assert 0 < each.latency_s < DEADLINE_S
            assert 1e3 < each.bytes_s < 1e12
