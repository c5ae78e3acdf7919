"""Which workers can still build layers."""

from smolcluster.algorithms.PipelineParallel.coordinator import MOST_LOST, Builders

ONE, TWO = 1, 2


def lose(builders: Builders, worker_id: int, times: int) -> None:
    for _ in range(times):
        builders.lost(worker_id, "a", f"worker {worker_id}")


def test_workers_that_all_say_why_they_cannot_build_leave_none() -> None:
    builders = Builders()
    builders.failed(ONE, "a", "worker 1: no file")
    assert builders.why_none_is_left([TWO]) is None, "worker 2 has not tried"
    builders.failed(TWO, "b", "worker 2: no file")
    assert builders.why_none_is_left([]) == "worker 1: no file; worker 2: no file"


def test_a_worker_that_is_lost_without_a_word_may_come_back_twice() -> None:
    builders = Builders()
    lose(builders, ONE, MOST_LOST - 1)
    assert builders.why_none_is_left([]) is None
    assert builders.may_build(ONE, "a")
    lose(builders, ONE, 1)
    assert builders.why_none_is_left([]) == (
        "worker 1 was lost 3 times while it built its layers (out of memory?)"
    )
    assert not builders.may_build(ONE, "a")


def test_one_that_has_built_its_layers_counts_from_the_start_again() -> None:
    builders = Builders()
    lose(builders, ONE, MOST_LOST - 1)
    builders.built(ONE)
    lose(builders, ONE, 1)
    builders.failed(TWO, "b", "worker 2: no file")
    assert builders.why_none_is_left([TWO]) is None
    builders.built(TWO)
    assert builders.why_none_is_left([]) is None
    assert builders.may_build(TWO, "b")


def test_another_process_of_one_that_cannot_build_has_one_chance() -> None:
    builders = Builders()
    builders.failed(ONE, "a", "worker 1: no file")
    assert [builders.may_build(ONE, each) for each in "ab"] == [False, True]
    builders.lost(ONE, "b", "worker 1")
    assert [builders.may_build(ONE, each) for each in "abc"] == [False] * 3
    assert builders.why_not([TWO]) == "worker 1: no file"
