"""Pages out of templates: whatever came from a peer or a log is text in them."""

from pathlib import Path

import jinja2
from markupsafe import Markup

from smolcluster.runs.files import write_whole

FOLDER = Path(__file__).parent


def render(template: str, **values: object) -> bytes:
    """The page that a template of this folder makes of these values, in UTF-8."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["style"] = Markup((FOLDER / "style.css").read_text(encoding="utf-8"))  # noqa: S704
    page = environment.get_template(template).render(**values)
    return page.lstrip().encode("utf-8", "backslashreplace")


def visible(value: object) -> object:
    """Text with what has no look of its own escaped: control characters, changes of direction."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return "".join(
            char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in value
        )
    return value


def write_page(path: Path, template: str, **values: object) -> None:
    """Write the page.

    Raises:
        SmolclusterError: it cannot be written; an older one is still there.
    """
    write_whole(path, render(template, **values), durable=False)
