"""Cuts a model's flat parameters into fragments that are exchanged one by one.

Streaming DiLoCo (Douillard et al., 2501.18512) exchanges a part of the model at a time, behind computation.
The parts should take equally long on the wire, so whole tensors are packed into bins of about equal size: the
largest first, each into the lightest bin. No bin is then larger than 4/3 of the best packing's largest
(Graham 1969). Departure: the paper's fragments are transformer blocks of equal depth, here any tensors.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smolcluster.errors import ConfigError
from smolcluster.training.places import common, pieces, shifted, total

if TYPE_CHECKING:
    from torch import Tensor  # not imported by whoever only reads a configuration


@dataclass(frozen=True)
class Fragment:
    """Some tensors of a model, as places in its flat parameters; here they lie one after the other."""

    places: tuple[slice, ...]

    @property
    def numel(self) -> int:
        return total(self.places)

    def buckets(self, length: int) -> list[tuple[int, slice]]:
        """Its parts in the buckets of `length` values that the flat parameters are cut into, in order.

        Each with the bucket's number, and where its values lie in the fragment.
        """
        stops: dict[int, int] = {}
        stop = 0
        for place in self.places:
            for number in range(place.start // length, -(-place.stop // length)):
                start = max(place.start, number * length)
                stop += min(place.stop, (number + 1) * length) - start
                stops[number] = stop
        parts = itertools.pairwise((0, *stops.values()))
        return [(number, slice(*part)) for number, part in zip(stops, parts, strict=True)]

    def within(self, slice_: slice) -> "Fragment":
        """What of it lies in a slice of the flat parameters, in places counted from that slice's start."""
        here = common(self.places, [slice_])
        return Fragment(tuple(shifted(place, -slice_.start) for place in here))

    def view(self, flat: "Tensor") -> "Tensor":
        """The fragment's values of `flat`: a view if they are in one place, else a copy."""
        if len(self.places) == 1:
            return flat[self.places[0]]
        return self.gather(flat, flat.new_empty(self.numel))

    def gather(self, flat: "Tensor", out: "Tensor") -> "Tensor":
        """Copy the fragment's values of `flat` (num_params,) into `out` (numel,), and return that."""
        for place, within in pieces(self.places, slice(0, self.numel)):
            out[within] = flat[place]
        return out

    def scatter(self, values: "Tensor", flat: "Tensor") -> None:
        """Copy `values` (numel,) to the fragment's places in `flat` (num_params,)."""
        if values.numel() != self.numel:
            raise ValueError(f"{values.numel()} values for a fragment of {self.numel}")
        for place, within in pieces(self.places, slice(0, self.numel)):
            flat[place] = values[within]


def filled(layers: Sequence[tuple[str, slice]]) -> list[slice]:
    """The places of those tensors of `layers` (name and place) that have values."""
    return [place for _, place in layers if place.start < place.stop]


def cut(layers: Sequence[tuple[str, slice]], num_fragments: int) -> list[Fragment]:
    """Pack the tensors `layers` (name and place, in order) into fragments of about equal size.

    Places in a fragment, and fragments by their first place, keep the order of `layers`; neighbours are one
    place. Tensors without values are in none. The result is the same on every machine.

    Raises:
        ConfigError: there are fewer tensors than fragments.
    """
    places = filled(layers)
    if num_fragments > len(places):
        raise too_many_fragments(num_fragments, len(places))
    bins: list[list[slice]] = [[] for _ in range(num_fragments)]
    sizes = [0] * num_fragments
    by_size = sorted(places, key=lambda place: place.start - place.stop)
    for place in by_size:
        lightest = min(range(num_fragments), key=lambda number: (sizes[number], len(bins[number])))
        bins[lightest].append(place)
        sizes[lightest] += place.stop - place.start
    fragments = [Fragment(_joined(places)) for places in bins]
    return sorted(fragments, key=lambda fragment: fragment.places[0].start)


def too_many_fragments(num_fragments: int, num_tensors: int) -> ConfigError:
    return ConfigError(
        f"fragments is {num_fragments}, but the model has {num_tensors} trainable tensors, which stay "
        f"whole; set fragments to {num_tensors} or less"
    )


def _joined(places: Sequence[slice]) -> tuple[slice, ...]:
    joined: list[slice] = []
    for place in sorted(places, key=lambda place: place.start):
        if joined and joined[-1].stop == place.start:
            joined[-1] = slice(joined[-1].start, place.stop)
        else:
            joined.append(place)
    return tuple(joined)
