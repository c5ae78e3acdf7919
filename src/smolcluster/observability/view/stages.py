"""A pipeline's stages, of what is known of each worker: numbers by name, as a status keeps them."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Self

from pydantic import Field

from smolcluster.runs.model_file import Strict
from smolcluster.utils.units import format_duration, format_megabytes

LAYERS, TIMES, TO, CAPACITY = "layers", "op_s", "to", "capacity"
WORDS = {
    "forward": "forward",
    "backward": "backward",
    "backward_input": "input gradient",
    "backward_weight": "weight gradient",
}
"""What a stage computes, as `op_s/…`, in the order in which it is told."""


class StageView(Strict):
    """One worker's part in the newest step of a pipeline."""

    layers: list[tuple[int, int]] = Field(
        description="Its ranges [start, end), in the layers' order."
    )
    op_s: dict[str, float] = Field(
        description="Seconds of the step by what was computed: forward, backward, or gradients of inputs "
        "(backward_input) and of weights (backward_weight) apart."
    )
    bubble: float = Field(description="The share of the step in which it computed nothing, 0 to 1.")
    sends: dict[int, float] = Field(
        description="Bytes a second that it sent to each of its neighbours, by their ranks."
    )
    capacities: dict[int, float] = Field(
        {}, description="Bytes a second that its links were measured to carry, likewise."
    )

    @classmethod
    def of(cls, stats: Mapping[str, float]) -> Self | None:
        """What the numbers of a worker say; None: it is no stage."""
        ends = {name for name in stats if name.startswith(f"{LAYERS}/") and name.endswith("/end")}
        numbers = sorted(int(name.split("/")[1]) for name in ends)
        if not numbers:
            return None
        layers = [
            (int(stats[f"{LAYERS}/{each}/start"]), int(stats[f"{LAYERS}/{each}/end"]))
            for each in numbers
        ]
        return cls(
            layers=layers,
            op_s={name: stats[f"{TIMES}/{name}"] for name in WORDS if f"{TIMES}/{name}" in stats},
            bubble=stats["bubble"],
            sends=_by_rank(stats, TO),
            capacities=_by_rank(stats, CAPACITY),
        )

    @property
    def ranges(self) -> str:
        """`0-5, 18`."""
        return ", ".join(
            f"{start}-{end - 1}" if end - start > 1 else f"{start}" for start, end in self.layers
        )

    @property
    def times(self) -> str:
        """`forward 120 ms, backward 240 ms`."""
        return ", ".join(
            f"{WORDS[name]} {format_duration(each)}" for name, each in self.op_s.items()
        )

    @property
    def rates(self) -> str:
        """`1.2 of 12 MB/s to 2`, where that was measured: workers are counted from 1, as everywhere."""

        def told(rank: int, used: float) -> str:
            capacity = self.capacities.get(rank)
            of = "" if capacity is None else f" of {format_megabytes(capacity)}"
            return f"{format_megabytes(used)}{of} MB/s to {rank + 1}"

        return ", ".join(told(rank, used) for rank, used in self.sends.items())


def _by_rank(stats: Mapping[str, float], kind: str) -> dict[int, float]:
    return {
        int(name.removeprefix(f"{kind}/")): value
        for name, value in stats.items()
        if name.startswith(f"{kind}/")
    }


def numbers_of(
    layers: Mapping[int, Sequence[int]],
    op_s: Mapping[str, float],
    bubble: float,
    sends: Mapping[int, float],
    capacities: Mapping[int, float] = MappingProxyType({}),
) -> dict[str, float]:
    """A stage as numbers by name, as `StageView.of` reads them; `layers`: start and end, by its number."""
    return {
        "bubble": bubble,
        **{f"{LAYERS}/{stage}/start": start for stage, (start, _) in layers.items()},
        **{f"{LAYERS}/{stage}/end": end for stage, (_, end) in layers.items()},
        **{f"{TIMES}/{name}": seconds for name, seconds in op_s.items()},
        **{f"{TO}/{rank}": each for rank, each in sends.items()},
        **{f"{CAPACITY}/{rank}": each for rank, each in capacities.items()},
    }
