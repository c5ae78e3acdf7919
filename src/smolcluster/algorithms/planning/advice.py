"""Which algorithm, with which settings, or none: pure, from what each of them predicts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smolcluster.algorithms.planning.costs import Forecast

LEAST_GAIN = 1.1
"""So many times as fast as the fastest machine alone a cluster must be to be worth it."""
AS_FAST = 0.95
"""From here to the fastest settings of an algorithm those that lose less are taken."""
EXACT = 0.9
"""From here to the fastest algorithm one is taken whose result is that of one process."""


@dataclass(frozen=True)
class Option:
    """An algorithm with settings, and what it predicts for them."""

    algorithm: str
    settings: Mapping[str, Any]
    forecast: Forecast


@dataclass(frozen=True)
class Advice:
    """What to do.

    Attributes:
        options: the best of each algorithm, the fastest first.
        chosen: one of them; None: do not distribute.
        alone: the fastest machine, and what it trains alone, samples a second.
    """

    options: tuple[Option, ...]
    chosen: Option | None
    alone: tuple[str, float]

    @property
    def gain(self) -> float:
        """How many times as fast the chosen, or else the fastest, option is as the fastest machine alone."""
        best = self.chosen or self.options[0]
        return best.forecast.samples_per_s / self.alone[1]


def best_settings(options: Sequence[Option]) -> Option:
    """Of one algorithm's options, what loses least first: the first that is about as fast as any."""
    fastest = max(option.forecast.samples_per_s for option in options)
    return next(option for option in options if option.forecast.samples_per_s >= AS_FAST * fastest)


def advise(options: Iterable[Option], alone: Mapping[str, float]) -> Advice:
    """Choose among the best options of algorithms.

    Of those about as fast as any one is taken that computes what one process does. `alone`: samples a second
    of each machine alone, by name.
    """
    ordered = sorted(options, key=lambda option: -option.forecast.samples_per_s)
    machine = max(alone, key=lambda name: alone[name])
    fastest = ordered[0].forecast.samples_per_s
    close = [each for each in ordered if each.forecast.samples_per_s >= EXACT * fastest]
    chosen = next((each for each in close if each.forecast.is_exact), ordered[0])
    is_worth_it = chosen.forecast.samples_per_s >= LEAST_GAIN * alone[machine]
    return Advice(tuple(ordered), chosen if is_worth_it else None, (machine, alone[machine]))
