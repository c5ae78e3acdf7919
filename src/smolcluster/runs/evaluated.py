"""A workload's own metrics, which files have as `val_…`, by the names that people read."""

from collections.abc import Mapping

LOSS, PREFIX = "val_loss", "val_"


def metrics_in(values: Mapping[str, object]) -> dict[str, float]:
    """The metrics among an evaluation's values, by name without prefix; those not measured are left out."""
    return {
        key.removeprefix(PREFIX): float(value)
        for key, value in values.items()
        if key.startswith(PREFIX) and key != LOSS and isinstance(value, int | float)
    }


def told(metrics: Mapping[str, float]) -> list[str]:
    """Each metric in words, for a line: `acc 0.978`, `perplexity 21.5`, `hits 0.41`."""
    return [
        f"acc {value:.3f}" if name == "accuracy" else f"{name} {value:.4g}"
        for name, value in metrics.items()
    ]


def cell(name: str, value: float) -> str:
    """A metric's value where its name stands beside it."""
    return f"{value:.1%}" if name == "accuracy" else f"{value:.4g}"
