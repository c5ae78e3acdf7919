"""Places in a model's flat weights: ranges of elements, and what of one lies in another. Pure."""

from collections.abc import Iterable, Sequence


def total(places: Iterable[slice]) -> int:
    """Elements of all these places."""
    return sum(place.stop - place.start for place in places)


def pieces(places: Sequence[slice], part: slice) -> list[tuple[slice, slice]]:
    """Where a part of the values of `places`, laid one after the other, lies in the flat tensor.

    Each piece: its place in the flat tensor, and within `part`.
    """
    found, start = [], 0
    for place in places:
        stop = start + place.stop - place.start
        here, within = meeting(slice(start, stop), part)
        if here.start < here.stop:
            found.append((shifted(here, place.start), within))
        start = stop
    return found


def meeting(one: slice, other: slice) -> tuple[slice, slice]:
    """What two ranges have in common, counted from the start of each; empty where that is nothing."""
    first = max(one.start, other.start)
    stop = max(first, min(one.stop, other.stop))
    return shifted(slice(first, stop), -one.start), shifted(slice(first, stop), -other.start)


def common(places: Iterable[slice], others: Sequence[slice]) -> list[slice]:
    """What of `places` lies in `others`, in the order of both."""
    both = (
        slice(max(one.start, other.start), min(one.stop, other.stop))
        for one in places
        for other in others
    )
    return [each for each in both if each.start < each.stop]


def without(places: Sequence[slice], others: Iterable[slice]) -> list[slice]:
    """What of `places` lies in none of `others`, in order."""
    left = list(places)
    for other in others:
        cut = [
            (
                slice(each.start, min(each.stop, other.start)),
                slice(max(each.start, other.stop), each.stop),
            )
            for each in left
        ]
        left = [each for both in cut for each in both if each.start < each.stop]
    return left


def shifted(place: slice, by: int) -> slice:
    return slice(place.start + by, place.stop + by)
