"""What a run counts."""

from smolcluster.cluster.tally import Tally


def test_applied_pushes_count_for_the_run_and_for_their_worker() -> None:
    tally = Tally()
    tally.applied(1, "pi5", num_samples=32, staleness=0)
    tally.applied(1, "pi5", num_samples=32, staleness=3)
    tally.applied(2, "win", num_samples=8, staleness=1)
    assert tally.pushes == {"applied": 3}
    pi5, win = tally.workers[1], tally.workers[2]
    assert (pi5.rank, pi5.node, pi5.samples, pi5.mean_staleness) == (0, "pi5", 64, 1.5)
    assert (win.rank, win.node, win.samples, win.mean_staleness) == (1, "win", 8, 1.0)


def test_a_worker_that_never_pushed_has_no_staleness() -> None:
    tally = Tally()
    worker = tally.worker(3, "macbook")
    assert (worker.rank, worker.samples, worker.mean_staleness) == (2, 0, 0.0)
    assert tally.pushes["applied"] == 0


def test_a_worker_id_keeps_its_counts_when_another_machine_takes_it_over() -> None:
    tally = Tally()
    tally.applied(1, "pi5", num_samples=32, staleness=0)
    tally.worker(1, "win")
    assert tally.workers[1].node == "win"
    assert tally.workers[1].samples == 32
