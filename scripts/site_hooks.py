"""Hooks of mkdocs.yml: what the documents link to outside of their folder is on the site too, or on GitHub.

README.md is the first page, CONTRIBUTING.md a page, the pictures of images/ are copied. Links to other files
of the project lead to `repo_url`; where that is not set only their text is left.
"""

import html
import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

PROJECT = Path(__file__).resolve().parents[1]
DOCS = PROJECT / "src" / "smolcluster" / "docs"
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}
"""Files of the project that are pages, and their names on the site."""
LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s:]+)\)")
BAR = re.compile(r"`([^`\n]*\\\|[^`\n]*)`")
CODE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(PROJECT / name)))
    for picture in sorted((PROJECT / "images").iterdir()):
        files.append(File.generated(config, f"images/{picture.name}", abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead the links of a page, but for code, to where their files are on the site."""
    del files
    folder = Path(page.file.abs_src_path or "").parent
    here = PurePosixPath(page.file.src_uri).parent

    def led(found: re.Match[str]) -> str:
        file, mark, heading = found["target"].partition("#")
        if not file:
            return found[0]
        place = place_of((folder / file).resolve())
        if place is not None:
            target = os.path.relpath(place, here) + mark + heading
        elif config.repo_url:
            path = (folder / file).resolve().relative_to(PROJECT)
            kind = "tree" if (PROJECT / path).is_dir() else "blob"
            target = f"{config.repo_url.rstrip('/')}/{kind}/main/{path.as_posix()}{mark}{heading}"
        else:
            return found["text"]
        return f"{found['picture']}[{found['text']}]({target})"

    parts = CODE.split(markdown)
    return "".join(
        part if CODE.match(part) else BAR.sub(barred, LINK.sub(led, part)) for part in parts
    )


def barred(found: re.Match[str]) -> str:
    """Code with a bar in a table, which GitHub wants as `\\|` and Python-Markdown shows as that."""
    return f"<code>{html.escape(found[1]).replace(chr(92) + '|', '&#124;')}</code>"


def place_of(file: Path) -> str | None:
    """Where a file of the project is on the site; None: it is not."""
    if file.is_relative_to(DOCS):
        return file.relative_to(DOCS).as_posix()
    path = file.relative_to(PROJECT).as_posix()
    return PAGES.get(path, path if path.startswith("images/") else None)
