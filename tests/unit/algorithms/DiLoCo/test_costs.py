"""What DiLoCo predicts of itself."""

import math

import pytest

from smolcluster.algorithms.DiLoCo import costs
from smolcluster.algorithms.DiLoCo.costs import candidates, predict, step_nbytes
from smolcluster.algorithms.planning import simulation
from smolcluster.algorithms.planning.costs import Job, Site, Worker
from smolcluster.configs.resolve import load_settings
from smolcluster.configs.schema import Settings

JOB = Job(1_000_000, num_samples=1_000_000)


def settings_of(*overrides: str) -> Settings:
    codecs = "codec_up=int8", "codec_down=int8"
    own = "mode=sync", "sync_fraction=0", "batch_size=10", *codecs, *overrides
    return load_settings("diloco", "digits", None, own, {}, local=True, local_workers=2)


def test_a_round_lasts_until_all_that_was_handed_out_has_arrived() -> None:
    """20 batches: after 0.4 s away, one takes 0.1 s for one and the other 0.3 s."""
    nbytes = JOB.encoded_nbytes("int8")
    rate = nbytes / 0.2
    site = Site(
        tuple(Worker(name, step_s, 0.0, rate, rate) for name, step_s in (("a", 0.1), ("b", 0.3))),
        {},
    )
    forecast = predict(site, JOB, settings_of("local_steps=10"))
    round_s = 0.4 + 20 / (1 / 0.1 + 1 / 0.3)
    assert forecast.samples_per_s == pytest.approx(200 / round_s, rel=1e-2)
    assert forecast.received_bytes_s == pytest.approx(2 * nbytes / round_s, rel=1e-2)


@pytest.mark.parametrize(("local_steps", "round_s"), [(10, 10 * 2 / (1 / 0.1 + 1 / 0.3)), (2, 0.8)])
def test_streaming_hides_what_the_links_carry(local_steps: int, round_s: float) -> None:
    """0.8 s each way, at once: a round of 10 batches a worker takes longer to compute, one of 2 less long."""
    rate = JOB.encoded_nbytes("int8") / 0.8
    site = Site(
        tuple(Worker(name, step_s, 0.0, rate, rate) for name, step_s in (("a", 0.1), ("b", 0.3))),
        {},
    )
    forecast = predict(site, JOB, settings_of("mode=streaming", f"local_steps={local_steps}"))
    assert forecast.samples_per_s == pytest.approx(10 * 2 * local_steps / round_s, rel=5e-2)


def test_very_long_rounds_are_predicted_as_others_are() -> None:
    """In closed form: so many batches a round are more than a simulation has patience for."""
    site = Site(tuple(Worker(name, 0.1, 0.0, 1e6, 1e6) for name in "ab"), {})
    many, more = (predict(site, JOB, settings_of(f"local_steps={each}")) for each in (200, 4000))
    assert many.samples_per_s < more.samples_per_s < 200
    assert many.samples_per_s == pytest.approx(more.samples_per_s, rel=0.2)
    assert many.received_bytes_s == pytest.approx(20 * more.received_bytes_s, rel=0.2)


def test_a_synchronous_beginning_costs_what_its_exchanges_do_or_there_is_none() -> None:
    """Two workers of 0.1 s a batch; a synchronous step takes 0.1 s more, or 20 s."""
    for away_s, share in ((0.1, 0.1), (20.0, 0.0)):
        rate = JOB.encoded_nbytes("int8") / (away_s / 2)
        site = Site(tuple(Worker(name, 0.1, 0.0, rate, rate) for name in "ab"), {})
        own = "local_steps=20", "mode=streaming"
        plain, begun = (
            predict(site, JOB, settings_of(*own, f"sync_fraction={each}")).samples_per_s
            for each in (0, 0.1)
        )
        batch_s = share * (0.1 + away_s) / 2 + (1 - share) * 10 / plain
        assert begun == pytest.approx(10 / batch_s, rel=2e-2)


def test_gradients_of_the_beginning_are_no_sparser_than_int4(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Links carry four batches' gradients in the time of one batch; the whole run is the beginning."""
    monkeypatch.setattr(costs, "MOST_WAITING", math.inf)
    rate = 4 * JOB.encoded_nbytes("int4") / 0.1
    site = Site(tuple(Worker(name, 0.1, 0.0, rate, rate) for name in "ab"), {})
    sparse, dense = (
        predict(site, JOB, settings_of(f"codec_up={codec}", "sync_fraction=1")).samples_per_s
        for codec in ("topk", "int4")
    )
    assert sparse == pytest.approx(dense, rel=1e-6)


def far_away(mode: str) -> float:
    """Samples a second of two workers of 100, one of which needs 4 s for its change each way."""
    rate = JOB.encoded_nbytes("int8") / 0.2
    site = Site(
        tuple(Worker(name, 0.1, 0.0, way, way) for name, way in (("a", rate), ("b", rate / 20))), {}
    )
    return predict(site, JOB, settings_of(f"mode={mode}", "local_steps=10")).samples_per_s


def test_a_slow_link_holds_up_others_unless_they_do_not_wait() -> None:
    assert far_away("async") == pytest.approx(200, rel=0.05)
    assert far_away("sync") < 100


def test_chosen_steps_keep_workers_computing() -> None:
    site = Site(tuple(Worker(name, 0.1, 0.0, 1e6, 1e6) for name in "ab"), {})
    assert 0.03 < predict(site, JOB, settings_of()).lost < 0.06


@pytest.mark.parametrize("mode", ["streaming", "async"])
@pytest.mark.parametrize("step_s", [0.1, 0.002])
def test_chosen_steps_grow_until_they_hide_the_exchange(
    mode: str, step_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 s for the whole each way; with short steps in closed form. However many the server can handle."""
    monkeypatch.setattr(costs, "most_steps_s", lambda _: math.inf)
    monkeypatch.setattr(simulation, "MOST_EVENTS", 3000)
    rate = JOB.encoded_nbytes("int8") / 4
    site = Site(tuple(Worker(name, step_s, 0.0, rate, rate) for name in "ab"), {})
    forecast = predict(site, JOB, settings_of(f"mode={mode}"))
    assert int(forecast.chosen.split()[-1]) >= 4 / step_s
    assert forecast.lost < 0.05


def test_a_step_s_bytes_are_its_part_of_the_round_s() -> None:
    assert (
        step_nbytes(JOB, settings_of("local_steps=10")) == (JOB.encoded_nbytes("int8") // 10,) * 2
    )


def test_local_steps_that_are_left_open_are_told() -> None:
    site = Site(tuple(Worker(name, 0.1, 0.0, 1e6, 1e6) for name in "ab"), {})
    assert predict(site, JOB, settings_of()).chosen.startswith("local_steps of about ")
    assert not predict(site, JOB, settings_of("local_steps=10")).chosen
    codecs = [each["codec_up"] for each in candidates(site, JOB, settings_of())]
    assert codecs == ["fp32", "int8", "int4"], "what loses least comes first"
