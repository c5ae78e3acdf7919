"""A pipeline's stages, of what is known of each worker: numbers by name, as a status keeps them."""

from collections.abc import Mapping, Sequence
from typing import Self

from pydantic import Field

from smolcluster.runs.model_file import Strict
from smolcluster.utils.units import format_duration, format_megabytes

LAYERS, TIMES, TO = "layers", "op_s", "to"
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
            sends={
                int(name.removeprefix(f"{TO}/")): value
                for name, value in stats.items()
                if name.startswith(f"{TO}/")
            },
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
        """`1.2 MB/s to 2`: workers are counted from 1, as everywhere."""
        return ", ".join(
            f"{format_megabytes(each)} MB/s to {rank + 1}" for rank, each in self.sends.items()
        )


def numbers_of(
    layers: Mapping[int, Sequence[int]],
    op_s: Mapping[str, float],
    bubble: float,
    sends: Mapping[int, float],
) -> dict[str, float]:
    """A stage as numbers by name, as `StageView.of` reads them; `layers`: start and end, by its number."""
    numbers = {"bubble": bubble}
    for stage, (start, end) in layers.items():
        numbers |= {f"{LAYERS}/{stage}/start": start, f"{LAYERS}/{stage}/end": end}
    numbers |= {f"{TIMES}/{name}": seconds for name, seconds in op_s.items()}
    return numbers | {f"{TO}/{rank}": each for rank, each in sends.items()}
