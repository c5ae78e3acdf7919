"""Pages out of templates: whatever came from a peer or a log is text in them."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from smolcluster.errors import SmolclusterError
from smolcluster.observability.curves import svg_of
from smolcluster.observability.view.curves import Curves
from smolcluster.runs.files import write_whole
from smolcluster.utils.units import format_loss

FOLDER = Path(__file__).parent
MAX_ROWS = 200
"""Of a table: the first and the last ones are shown of more."""
UNKNOWN = "–"


def write_page(path: Path, template: str, **values: object) -> None:
    """Write the page that a template of this folder makes of these values.

    Raises:
        SmolclusterError: it cannot be written; an older one is still there.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"cut": cut, "moment": moment}
    page = environment.get_template(template).render(**values)
    write_whole(path, page.lstrip().encode("utf-8", "backslashreplace"), durable=False)


def visible(value: object) -> object:
    """Text with what has no look of its own escaped: control characters, changes of direction."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return "".join(
            char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in value
        )
    return value


def cut(rows: Sequence[Sequence[str]], at_most: int = MAX_ROWS) -> list[Sequence[str]]:
    """The first and the last rows of a table, and in place of the others how many they are."""
    left_out = len(rows) - at_most
    if left_out <= 0:
        return list(rows)
    row = ["…", f"{left_out:,} more", *[""] * (len(rows[0]) - 2)]
    return [*rows[: at_most // 2], row, *rows[-(at_most // 2) :]]


def moment(seconds: float, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """Seconds since 1970 as a date and a time, UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime(form)


def drawn(runs: Sequence[Curves]) -> tuple[Markup, list[str]]:
    """The curves of runs on the same axes, and why there are none."""
    try:
        return Markup(svg_of(runs)), []  # noqa: S704 - matplotlib escapes what is in it
    except SmolclusterError as error:
        return Markup(), [str(error)]


def or_unknown(text: Callable[[Any], str], value: Any) -> str:
    return UNKNOWN if value is None else text(value)


def loss(value: float | None) -> str:
    return or_unknown(format_loss, value)
