"""A project's folder for other machines, made of the package that is installed here without a checkout."""

import json
import shutil
from importlib.metadata import distribution
from pathlib import Path
from tempfile import TemporaryDirectory

from smolcluster.errors import LaunchError
from smolcluster.launch.plan import PACKAGE
from smolcluster.launch.project import read_project
from smolcluster.utils.folders import user_cache

NAME = "smolcluster"


def installed_project() -> Path:
    """The folder, in the user's cache: the package as it is installed, and a `pyproject.toml` that fits it.

    Raises:
        LaunchError: it cannot be written.
    """
    cache = user_cache()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=cache, prefix="project-draft-") as scratch:
            draft = Path(scratch) / NAME
            left_out = shutil.ignore_patterns("__pycache__", "*.py[co]")
            shutil.copytree(PACKAGE, draft / "src" / NAME, ignore=left_out)
            (draft / "pyproject.toml").write_text(pyproject(), encoding="utf-8")
            place = cache / f"project-{read_project(draft).version}"
            try:
                draft.rename(place)
            except OSError:  # an earlier launch, or one beside this one, has made it
                if not place.is_dir():
                    raise
    except OSError as error:
        raise LaunchError(
            f"{cache} cannot be written ({error.strerror or error}), where what is sent to other machines is "
            "put together: set XDG_CACHE_HOME to another folder"
        ) from error
    return place


def pyproject() -> str:
    """The `pyproject.toml` of a project of this package: its version, requirements, commands and plug-ins."""
    installed = distribution(NAME)
    needs = [need for need in installed.requires or [] if "extra ==" not in need]
    groups: dict[str, list[str]] = {}
    for point in installed.entry_points:
        table = "scripts" if point.group == "console_scripts" else f'entry-points."{point.group}"'
        groups.setdefault(table, []).append(f"{point.name} = {_text(point.value)}")
    return "\n".join(
        [
            "[build-system]",
            'requires = ["hatchling>=1.27"]',
            'build-backend = "hatchling.build"',
            "[project]",
            f"name = {_text(NAME)}",
            f"version = {_text(installed.version)}",
            f"requires-python = {_text(installed.metadata['Requires-Python'])}",
            "dependencies = [",
            *(f"  {_text(need)}," for need in needs),
            "]",
            *(line for table, lines in groups.items() for line in (f"[project.{table}]", *lines)),
            "[tool.hatch.build.targets.wheel]",
            f'packages = ["src/{NAME}"]',
            "",
        ]
    )


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)  # as TOML has it
