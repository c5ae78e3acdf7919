"""How fast two machines reach each other, before layers are dealt out: over the very sessions of neighbours.

One of the two sends a few bytes and waits for as few, several times: the shortest is the round trip. Then it
sends more, in float32 as activations are, and waits again; then it is the other one's turn. Where the two do
not reach each other the server relays, and what that carries is what is measured.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations, count, islice

import torch

from smolcluster.algorithms.PipelineParallel.links import Links, Route
from smolcluster.algorithms.planning.layers import Link
from smolcluster.training.schedules.instructions import Instruction, Op
from smolcluster.utils.units import format_bytes, format_duration

VALUE_NBYTES = 4
NUM_ROUND_TRIPS = 3
LEAST_NBYTES, MOST_NBYTES = 64 * 1024, 1024 * 1024
ENOUGH_S = 0.05
"""What carries the least bytes within this time is sent the most as well."""
CONNECT_TIMEOUT_S, SILENCE_TIMEOUT_S = 20.0, 10.0
PATIENCE_S = 60.0
"""How long the server waits for one round of pairs."""
UNMEASURED = Link(1e5, 0.1)
"""What a link is taken for that could not be measured: 100 kB/s."""


def measure_link(links: Links, route: Route) -> Link:
    """What this process sends the only neighbour of `route`, which must do the same at this time.

    The route has two stages, one of each process. Takes a second, or longer below 64 kB/s.

    Raises:
        ConnectTimeout, PeerLost: the other one was not reached, or is lost.
        AuthError, Rejected: it does not let this process in.
    """
    route = replace(route, patience_s=SILENCE_TIMEOUT_S)
    links.connect(route, CONNECT_TIMEOUT_S)
    sent, received = (Op.FORWARD, Op.BACKWARD) if route.rank == 0 else (Op.BACKWARD, Op.FORWARD)
    numbers = count(0)

    def ask(nbytes: int) -> float:
        """Seconds until so much has arrived, and the answer has come."""
        number, value = next(numbers), torch.zeros(nbytes // VALUE_NBYTES)
        started = time.perf_counter()
        links.send(Instruction(sent, number, route.rank), value)
        links.receive(Instruction(received, number, route.rank))
        return time.perf_counter() - started

    def answer() -> None:
        for number in islice(numbers, NUM_ROUND_TRIPS + 2):
            links.receive(Instruction(received, number, route.rank))
            links.send(Instruction(sent, number, route.rank), torch.zeros(1))

    if route.rank > 0:
        answer()
    round_trip_s = min(ask(VALUE_NBYTES) for _ in range(NUM_ROUND_TRIPS))
    took_s = ask(LEAST_NBYTES) - round_trip_s
    nbytes = MOST_NBYTES if took_s < ENOUGH_S else LEAST_NBYTES
    took_s = ask(nbytes) - round_trip_s
    if route.rank == 0:
        answer()
    return Link(nbytes / max(took_s, 1e-6), round_trip_s / 2)


@dataclass
class Survey:
    """The links that the server has measured, one round of pairs after the other. Pure.

    Processes are known by their instances. In a round each process has one other one at most.

    Attributes:
        asked: who measures now what it sends to whom, and has not answered yet.
    """

    links: dict[tuple[str, str], Link] = field(default_factory=dict)
    asked: dict[str, str] = field(default_factory=dict)

    def begin(self, hosts: Mapping[str, str]) -> list[tuple[str, str]]:
        """Ask the next pairs of these processes, by instance; none: all links are known.

        Processes of one host reach each other at no cost.
        """
        pairs, self.asked = [], {}
        for one, other in combinations(hosts, 2):
            is_known = (one, other) in self.links or hosts[one] == hosts[other]
            if not is_known and not self.asked.keys() & {one, other}:
                pairs.append((one, other))
                self.asked |= {one: other, other: one}
        return pairs

    def take(self, sender: str, link: Link) -> None:
        """What a process has measured of what it sends to the other one."""
        receiver = self.asked.pop(sender, None)
        if receiver is not None:
            self.links[sender, receiver] = link

    def lose(self, instance: str) -> None:
        """A process has gone: what it is asked, or somebody else about it, is asked anew."""
        if instance in self.asked or instance in self.asked.values():
            self.asked = {}

    def give_up(self) -> Mapping[str, str]:
        """Take what is still missing for slow; returns it, by sender."""
        missing, self.asked = self.asked, {}
        self.links |= dict.fromkeys(missing.items(), UNMEASURED)
        return missing


def in_words(links: Mapping[tuple[str, str], Link]) -> str:
    """One line of what was measured, by the names of sender and receiver."""
    return ", ".join(
        f"{sender} to {receiver} {format_bytes(link.bytes_s)}/s and {format_duration(link.latency_s)}"
        for (sender, receiver), link in links.items()
        if math.isfinite(link.bytes_s)
    )
