"""The best order of machines and cut of layers for a pipeline: exact for few machines, a search beyond.

A pipeline of stages and links takes about `Σ path + (m - 1) · max pace` for m microbatches, where links count
as stages of their own. For a limit on the pace the least `Σ path` is found by dynamic programming, from the
last layer to the first; the best limit by branch and bound: all cuts whose pace lies in an interval take at
least the path found for its upper end plus `m - 1` times its lower end.
"""

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MOST_EXACT = 9
"""Machines; each one more doubles time and memory."""
TOLERANCE = 1e-7
"""Relative: cuts that are closer to the best than this are not looked for."""
WORTH_A_LOOK = 0.01
"""The same where not all orders of machines can be tried."""
MOST_CHANGES = 60
"""Of an order of machines, where not all can be tried."""
NARROW = 1e-3
"""An interval of paces, relative to its upper end, that is no longer halved."""


@dataclass(frozen=True)
class Cut:
    """Machines in the order of their layers.

    Attributes:
        machines: indices; machine `machines[n]` has the layers from `starts[n]` up to the next start.
        path_s: of one microbatch through all stages and links, there and back.
        pace_s: of the slowest stage or link.
    """

    machines: tuple[int, ...]
    starts: tuple[int, ...]
    path_s: float
    pace_s: float

    def objective(self, num_microbatches: int) -> float:
        return self.path_s + (num_microbatches - 1) * self.pace_s


@dataclass(frozen=True)
class Tables:
    """What a search needs, as arrays over machines j, k, first layers a, and ends i.

    Attributes:
        stage_s: `(j, a, i)`, `i` in 0..L: seconds of layers a to i; infinite unless a < i.
        fixed_bytes: `(a, i)`: what these layers hold all the time.
        held_bytes: `(a, i)`: what they hold of a microbatch from its forward to its backward.
        graph_bytes: `(a, i)`: what they hold besides of a microbatch that is in its backward.
        memory_bytes: `(j,)`.
        link_path_s: `(j, k, i)`: from machine j to k and back at the boundary before layer i.
        link_pace_s: the same, of the busier direction.
        held: microbatches that a stage holds, and of these in their backward, by the number of stages
            from it to the last, from 1 on.
        sizes: the numbers of stages allowed.
    """

    stage_s: Floats
    fixed_bytes: Floats
    held_bytes: Floats
    graph_bytes: Floats
    memory_bytes: Floats
    link_path_s: Floats
    link_pace_s: Floats
    held: tuple[tuple[int, int], ...]
    sizes: frozenset[int]

    @property
    def num_machines(self) -> int:
        return len(self.memory_bytes)

    @property
    def num_layers(self) -> int:
        return int(self.stage_s.shape[1])

    def stages_below(self, limit_s: float, stages_from_end: int) -> Floats:
        """`stage_s` with infinity where a stage is too slow, or does not fit in its machine's memory."""
        num_held, num_graphs = self.held[stages_from_end - 1]
        needed = self.fixed_bytes + num_held * self.held_bytes + num_graphs * self.graph_bytes
        fits = needed[None] <= self.memory_bytes[:, None, None]
        return np.where(fits & (self.stage_s < limit_s), self.stage_s, inf)

    def links_below(self, limit_s: float) -> Floats:
        return np.where(self.link_pace_s < limit_s, self.link_path_s, inf)

    def cut(self, machines: Sequence[int], starts: Sequence[int]) -> Cut:
        """With its path and pace; it need not fit in memory."""
        ends = (*starts[1:], self.num_layers)
        stages = [
            float(self.stage_s[machine, start, end])
            for machine, start, end in zip(machines, starts, ends, strict=True)
        ]
        crossings = list(zip(machines[:-1], machines[1:], starts[1:], strict=True))
        path = sum(stages) + sum(float(self.link_path_s[each]) for each in crossings)
        pace = max(stages + [float(self.link_pace_s[each]) for each in crossings])
        return Cut(tuple(machines), tuple(starts), path, pace)


Solve = Callable[[float], Cut | None]
"""The cut of the shortest path among those whose pace is below a limit in seconds."""


def search(tables: Tables, num_microbatches: int) -> list[Cut]:
    """The best cut first, then others that were found; empty: nothing fits in memory."""
    if tables.num_machines <= MOST_EXACT:
        return best_cuts(lambda limit_s: shortest_path(tables, limit_s), num_microbatches)
    return _search_orders(tables, num_microbatches)


def best_cuts(
    solve: Solve, num_microbatches: int, known: float = inf, least_path_s: float = 0.0
) -> list[Cut]:
    """Cuts by objective, the best first.

    Only what is better than the objective `known` is looked for, and by `WORTH_A_LOOK` if it is finite; no
    path is shorter than `least_path_s`.
    """
    weight = num_microbatches - 1
    first = solve((known - least_path_s) / weight if weight else inf)
    if first is None:
        return []
    found = [first]
    best = min(known, first.objective(num_microbatches))
    # (lower bound, tie, least pace, the cut of the shortest path, pace below which it is the shortest)
    tie = itertools.count()
    open_ = [(first.path_s, next(tie), 0.0, first.path_s, first.pace_s)]
    while open_ and weight:
        bound, _, low, path, high = heapq.heappop(open_)
        if bound >= best * (1 - (TOLERANCE if known == inf else WORTH_A_LOOK)):
            break
        high = min(high, (best - path) / weight)
        limit = high if high - low <= NARROW * high else (low + high) / 2
        cut = solve(limit)
        if cut is not None:
            found.append(cut)
            best = min(best, cut.objective(num_microbatches))
            heapq.heappush(
                open_, (cut.path_s + weight * low, next(tie), low, cut.path_s, cut.pace_s)
            )
        if limit < high:
            heapq.heappush(open_, (path + weight * limit, next(tie), limit, path, high))
    return sorted(found, key=lambda each: each.objective(num_microbatches))


# --- exact: over all subsets and orders


def shortest_path(tables: Tables, limit_s: float) -> Cut | None:
    """Over all subsets of the machines and all orders of them.

    `reached[S, j, a]`: the least path of layers a to the end on exactly the machines of the set S, the first
    of them j. Time grows with `2^n n L²`, in numpy.
    """
    num, layers = tables.num_machines, tables.num_layers
    links = tables.links_below(limit_s)
    reached = np.full((1 << num, num, layers + 1), inf)
    by_size: list[list[int]] = [[] for _ in range(num + 1)]
    for members in range(1 << num):
        by_size[members.bit_count()].append(members)
    most = min(max(tables.sizes), layers, num)
    for size in range(1, most + 1):
        stages = tables.stages_below(limit_s, size)
        for machine in range(num):
            sets = np.array([each for each in by_size[size] if each >> machine & 1])
            rest = _after(reached, links, sets ^ (1 << machine), machine, size)
            reached[sets, machine, :layers] = np.min(stages[machine] + rest[:, None, :], axis=2)
    return _traced(tables, reached, links, limit_s, by_size)


def _after(reached: Floats, links: Floats, sets: NDArray[Any], machine: int, size: int) -> Floats:
    """`(set, i)`: the least path from machine's link before layer i to the end on a set of others."""
    if size == 1:
        rest = np.full((len(sets), reached.shape[2]), inf)
        rest[:, -1] = 0.0
        return rest
    nearest: Floats = np.min(reached[sets] + links[machine], axis=1)
    return nearest


def _traced(
    tables: Tables, reached: Floats, links: Floats, limit_s: float, by_size: list[list[int]]
) -> Cut | None:
    """The cut whose path is the least that was reached for all layers."""
    whole = reached[:, :, 0].copy()
    for size, sets in enumerate(by_size):
        if size not in tables.sizes:
            whole[sets] = inf
    members, machine = (int(each) for each in np.unravel_index(np.argmin(whole), whole.shape))
    if whole[members, machine] == inf:
        return None
    machines, starts, start = [machine], [0], 0
    while True:
        size = members.bit_count()
        members ^= 1 << machine
        rest = _after(reached, links, np.array([members]), machine, size)[0]
        start = int(np.argmin(tables.stages_below(limit_s, size)[machine, start] + rest))
        if not members:
            return tables.cut(machines, starts)
        machine = int(np.argmin(reached[members, :, start] + links[machine, :, start]))
        machines.append(machine)
        starts.append(start)


# --- beyond: orders tried one by one, each cut exactly


def _search_orders(tables: Tables, num_microbatches: int) -> list[Cut]:
    """Chains of nearest neighbours; in the best of them two machines are exchanged, or one is moved."""
    found: list[Cut] = []
    layers = range(tables.num_layers)
    least_path_s = sum(float(tables.stage_s[:, each, each + 1].min()) for each in layers)

    def attempt(order: Sequence[int]) -> bool:
        """Whether it is better than all before."""
        best = found[0].objective(num_microbatches) if found else inf
        cuts = best_cuts(
            lambda limit_s: shortest_in_order(tables, order, limit_s),
            num_microbatches,
            best,
            least_path_s,
        )
        is_better = bool(cuts) and cuts[0].objective(num_microbatches) < best * (1 - TOLERANCE)
        found[:] = sorted([*found, *cuts], key=lambda each: each.objective(num_microbatches))
        return is_better

    orders = list(dict.fromkeys(_chains(tables)))
    order = orders[0]
    for each in orders:
        if attempt(each):
            order = each
    left, untried = MOST_CHANGES, _neighbours(order)
    while left and (changed := next(untried, None)):
        left -= 1
        if attempt(changed):
            untried = _neighbours(changed)
    return found


def _chains(tables: Tables) -> Iterator[tuple[int, ...]]:
    """From each machine on always the one that is the nearest, and of equals the fastest."""
    distance = tables.link_path_s.mean(axis=2)
    speed = tables.stage_s[:, 0, -1]
    for first in range(tables.num_machines):
        chain, left = [first], set(range(tables.num_machines)) - {first}
        while left:
            last = chain[-1]
            chain.append(min(left, key=lambda each: (distance[last, each], speed[each])))
            left.remove(chain[-1])
        yield tuple(chain)


def _neighbours(order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for one, other in itertools.combinations(range(len(order)), 2):
        swapped = list(order)
        swapped[one], swapped[other] = order[other], order[one]
        yield tuple(swapped)
    for source, target in itertools.permutations(range(len(order)), 2):
        if abs(source - target) > 1:  # else it is a swap
            moved = list(order)
            moved.insert(target, moved.pop(source))
            yield tuple(moved)


def shortest_in_order(tables: Tables, order: Sequence[int], limit_s: float) -> Cut | None:
    """Over all cuts on some of these machines in this order.

    `reached[c, n, a]`: the least path of layers a to the end on c machines, the first of them `order[n]`.
    """
    num, layers = len(order), tables.num_layers
    most = min(max(tables.sizes), layers, num)
    links = tables.links_below(limit_s)[np.ix_(order, order)]
    stages = np.stack(
        [tables.stages_below(limit_s, size)[list(order)] for size in range(1, most + 1)]
    )
    reached = np.full((most + 1, num, layers + 1), inf)
    for place in range(num - 1, -1, -1):
        rest = np.full((most, layers + 1), inf)
        rest[0, -1] = 0.0
        if place + 1 < num:
            later = reached[1:most, place + 1 :] + links[place, None, place + 1 :]
            rest[1:] = np.min(later, axis=1)
        reached[1:, place, :layers] = np.min(stages[:, place] + rest[:, None, :], axis=2)
    sizes = [size for size in range(1, most + 1) if size in tables.sizes]
    size, place = min(itertools.product(sizes, range(num)), key=lambda each: reached[*each, 0])
    if reached[size, place, 0] == inf:
        return None
    places, starts = [place], [0]
    while size > 1:
        later = reached[size - 1] + links[place]
        later[: place + 1] = inf
        total = stages[size - 1, place, starts[-1]] + later
        place, start = (int(each) for each in np.unravel_index(np.argmin(total), total.shape))
        places.append(place)
        starts.append(start)
        size -= 1
    return tables.cut([order[each] for each in places], starts)
