from collections.abc import Sequence

import pytest

from smolcluster.observability.curves import svg_of
from smolcluster.observability.report import render
from smolcluster.observability.view.curves import Curves


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages have an empty picture in place of curves, which take a second to draw."""

    def stand_in(runs: Sequence[Curves]) -> str:
        return "<svg></svg>" if any(curves.series for curves in runs) else ""

    monkeypatch.setattr(render, "svg_of", stand_in)


@pytest.fixture
def with_curves(undrawn: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "svg_of", svg_of)
