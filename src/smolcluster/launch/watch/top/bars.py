"""Pictures of numbers that fit in a line of text: bars, sparklines, and short forms of quantities."""

import math
from collections.abc import Iterable, Mapping, Sequence

from rich.text import Text

from smolcluster.utils.meter import PHASES
from smolcluster.utils.units import format_duration

BLOCKS, PLAIN_BLOCKS = "▁▂▃▄▅▆▇█", "_.-=+*%#"
FULL, REST = "█", "░"
PLAIN_FULL, PLAIN_REST = "#", "."
PHASE_STYLES: Mapping[str, str] = dict(
    zip(
        PHASES,
        ("cyan", "green", "blue", "magenta", "yellow", "bright_black", "red"),
        strict=True,
    )
)


def progress_bar(done: float, width: int, *, plain: bool) -> Text:
    """A bar of `width` columns, the part `done` (0 to 1) of it full."""
    full = round(max(0.0, min(done, 1.0)) * width)
    filled, rest = (PLAIN_FULL, PLAIN_REST) if plain else (FULL, REST)
    return Text.assemble((filled * full, "green"), (rest * (width - full), "bright_black"))


def split_bar(shares: Mapping[str, float], width: int, *, letters: bool) -> Text:
    """Where the time goes: each phase's part of `width` columns, the rest empty.

    Without colours phases are their first `letters`.
    """
    bar = Text()
    total = 0.0
    for phase in PHASES:
        share = shares.get(f"share/{phase}", 0.0)
        total = min(1.0, total + (share if 0.0 < share <= 1.0 else 0.0))
        size = round(total * width) - len(bar)
        bar.append((phase[0] if letters else FULL) * size, PHASE_STYLES[phase])
    bar.append(" " * (width - len(bar)))
    return bar


def legend(*, letters: bool) -> Text:
    """What the colours, or the letters, of `split_bar` mean."""
    parts = [
        Text.assemble((phase[0] if letters else FULL, PHASE_STYLES[phase]), " ", (phase, "dim"))
        for phase in PHASES
    ]
    return Text("  ").join(parts)


def sparkline(values: Sequence[float], *, plain: bool) -> str:
    """Values as blocks, one a column; those that are not finite are gaps."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    blocks = PLAIN_BLOCKS if plain else BLOCKS
    scale = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(
        blocks[round((value - low) * scale)] if math.isfinite(value) else " " for value in values
    )


def spread(steps: Sequence[int], values: Sequence[float], width: int) -> list[float]:
    """A value a column: the mean of those of its steps, or that of the column before; `steps` rise."""
    columns: list[list[float]] = [[] for _ in range(width)]
    first, length = steps[0], steps[-1] + 1 - steps[0]
    for step, value in zip(steps, values, strict=True):
        columns[(step - first) * width // length].append(value)
    shown: list[float] = []
    for column in columns:
        shown.append(mean(column) if column else shown[-1])
    return shown


def logarithm(value: float) -> float:
    """Its logarithm, which shows a loss that falls by powers of ten; NaN where there is none."""
    return math.log(value) if value > 0 else math.nan


def mean(values: Iterable[float]) -> float:
    """The mean of those that are finite; NaN of none."""
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def short_bytes(num_bytes: float) -> str:
    """Bytes in at most five characters: `812`, `4.1k`, `70M`, `1.2G`."""
    scaled, unit = num_bytes, ""
    for unit in ("", "k", "M", "G", "T"):
        if scaled < 999.5 or unit == "T":
            break
        scaled /= 1000
    return f"{scaled:.1f}{unit}" if unit and scaled < 9.95 else f"{scaled:.0f}{unit}"


def short_age(seconds: float) -> str:
    """A length of time in at most four characters: `4s`, `12m`, `3h`, `2d`."""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f}{unit}"
    return f"{max(0.0, seconds):.0f}s"


def short_delay(seconds: float) -> str:
    """A round trip: `0.2 ms`, `12 ms`."""
    return f"{seconds * 1e6:.0f} us" if seconds < 9.5e-5 else format_duration(seconds)
