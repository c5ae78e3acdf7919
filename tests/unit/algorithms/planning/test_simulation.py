"""Time passes as it must, and links are shared as they are."""

import pytest

from smolcluster.algorithms.planning.simulation import Done, Flow, Process, Simulation, Sleep
from unit.algorithms.planning.sites import site


def test_flows_share_a_link_until_one_has_ended() -> None:
    simulation, ended = Simulation(site(100, 100, limit=100)), {}

    def send(place: int, nbytes: float) -> Process:
        yield Flow(place, "up", nbytes)
        ended[place] = simulation.now

    simulation.start(send(0, 100))
    simulation.start(send(1, 300))
    simulation.run(10)
    assert ended == pytest.approx({0: 2.0, 1: 4.0})


def test_a_slow_link_leaves_the_rest_to_others_and_directions_are_apart() -> None:
    simulation, ended = Simulation(site(10, 200, limit=100)), {}

    def send(name: str, flow: Flow) -> Process:
        yield flow
        ended[name] = simulation.now

    simulation.start(send("slow", Flow(0, "up", 10)))
    simulation.start(send("fast", Flow(1, "up", 90)))
    simulation.start(send("down", Flow(1, "down", 100)))
    simulation.run(10)
    assert ended == pytest.approx({"slow": 1.0, "fast": 1.0, "down": 1.0})


def test_who_waits_for_another_goes_on_with_it() -> None:
    simulation, done, said = Simulation(site(1)), Done(), list[tuple[str, float]]()

    def waits() -> Process:
        yield done
        said.append(("waited", simulation.now))
        yield done
        said.append(("at once", simulation.now))

    def works() -> Process:
        yield Sleep(3)
        simulation.finish(done)

    simulation.start(waits())
    simulation.start(works())
    simulation.run(10)
    assert said == [("waited", 3), ("at once", 3)]


def test_a_server_does_one_thing_after_the_other() -> None:
    simulation, ended = Simulation(site(1)), list[float]()

    def ask() -> Process:
        yield simulation.serve(2)
        ended.append(simulation.now)

    for _ in range(3):
        simulation.start(ask())
    simulation.run(10)
    assert ended == [2, 4, 6]


def test_it_ends_however_much_happens() -> None:
    simulation = Simulation(site(1))

    def hurries() -> Process:
        while True:
            yield Sleep(1e-6)

    simulation.start(hurries())
    simulation.run(1e9)
    assert 0 < simulation.now < 1
