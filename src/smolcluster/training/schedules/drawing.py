"""A pipeline's step as a table and as a picture; several steps, as measured and simulated, on one axis."""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from smolcluster.observability.curves import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    rendered,
)
from smolcluster.training.schedules.instructions import Op
from smolcluster.training.schedules.simulation import Span, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = ("lane", "op", "microbatch", "stage", "start_s", "end_s")
COLORS: Mapping[Op, str] = {
    Op.FORWARD: BLUE,
    Op.BACKWARD: ORANGE,
    Op.BACKWARD_INPUT: ORANGE,
    Op.BACKWARD_WEIGHT: GREEN,
}
MEANINGS = {
    "F forward": BLUE,
    "B, I backward, input gradients": ORANGE,
    "W weight gradients": GREEN,
    "activations sent": PURPLE,
    "gradients sent": GREY,
}
LANE_IN, MARGIN_IN, WIDTH_IN = 0.3, 1.1, 14.0
MOST_LABELLED = 600
"""Spans; with more of them their microbatches cannot be read anyway."""


class Lane(NamedTuple):
    """A rank or a link, and what it does."""

    name: str
    spans: tuple[Span, ...]
    is_link: bool = False

    def color(self, span: Span) -> str:
        if self.is_link:
            return PURPLE if span.instruction.op is Op.FORWARD else GREY
        return COLORS[span.instruction.op]


def csv_of(timeline: Timeline) -> str:
    """A row for each span: `rank 0`, or `link 0>1` from sending to receiving rank."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(COLUMNS)
    for lane in _lanes(timeline):
        for span in lane.spans:
            each = span.instruction
            times = (f"{span.start_s:.9g}", f"{span.end_s:.9g}")
            rows.writerow([lane.name, each.op.value, each.microbatch, each.stage, *times])
    return text.getvalue()


def picture_of(
    timelines: Mapping[str, Timeline], form: str = "svg", names: Sequence[str] = ()
) -> bytes:
    """One panel a timeline, under its title, all on one axis of time; `form` is svg, png or pdf.

    `names`: of the ranks; empty: they are numbered.

    Raises:
        SmolclusterError: matplotlib failed.
    """
    return rendered(lambda: _figure(timelines, names), form, "a pipeline's step")


def _lanes(timeline: Timeline, names: Sequence[str] = ()) -> Iterator[Lane]:
    """Each rank, followed by the links on which it sends."""
    for rank, spans in enumerate(timeline.ranks):
        yield Lane(names[rank] if names else f"rank {rank}", spans)
        for (sender, receiver), sent in timeline.links.items():
            if sender == rank:
                yield Lane(f"link {sender}>{receiver}", sent, is_link=True)


def _figure(timelines: Mapping[str, Timeline], names: Sequence[str]) -> "Figure":
    from matplotlib.figure import Figure  # noqa: PLC0415 - it takes a second
    from matplotlib.patches import Patch  # noqa: PLC0415

    lanes = {title: _drawn(timeline, names) for title, timeline in timelines.items()}
    heights = [len(each) for each in lanes.values()]
    size = (WIDTH_IN, sum(LANE_IN * each + MARGIN_IN for each in heights))
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    panels = figure.subplots(
        len(heights), 1, squeeze=False, sharex=True, gridspec_kw={"height_ratios": heights}
    )[:, 0]
    for axes, (title, timeline) in zip(panels, timelines.items(), strict=True):
        _draw(axes, title, timeline, lanes[title])
    panels[-1].set_xlabel("seconds", color=INK)
    drawn = {lane.color(each) for own in lanes.values() for lane in own for each in lane.spans}
    meanings = [(text, color) for text, color in MEANINGS.items() if color in drawn]
    legend = [Patch(facecolor=color, label=text) for text, color in meanings]
    figure.legend(handles=legend, loc="outside lower center", ncols=len(legend), frameon=False)
    return figure


def _drawn(timeline: Timeline, names: Sequence[str]) -> list[Lane]:
    """The lanes without links that take no time."""
    return [
        lane
        for lane in _lanes(timeline, names)
        if not lane.is_link or any(each.end_s > each.start_s for each in lane.spans)
    ]


def _draw(axes: "Axes", title: str, timeline: Timeline, lanes: Sequence[Lane]) -> None:
    is_labelled = sum(len(lane.spans) for lane in lanes) <= MOST_LABELLED
    for row, lane in enumerate(lanes):
        is_link = lane.is_link
        for span in lane.spans:
            color = lane.color(span)
            width, height = span.end_s - span.start_s, 0.5 if is_link else 0.9
            axes.barh(row, width, height, span.start_s, color=color, edgecolor="white", lw=0.5)
            if is_labelled and not is_link:
                middle, text = span.start_s + width / 2, str(span.instruction.microbatch)
                axes.text(middle, row, text, ha="center", va="center", fontsize=7, color="white")
    axes.set_yticks(range(len(lanes)), [lane.name for lane in lanes])
    axes.invert_yaxis()
    axes.set_title(
        f"{title}: {1e3 * timeline.makespan_s:.4g} ms, bubble {timeline.bubble:.1%}",
        color=INK,
        loc="left",
        parse_math=False,
    )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
