"""Settings of a run: which of them are not the defaults, and which differ between runs."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel

from smolcluster.configs.schema import Settings
from smolcluster.utils.words import show


class Setting(NamedTuple):
    """A setting as it is, and as it would be without a word from the user; empty where it must be said."""

    key: str
    value: str
    default: str


def changed_settings(settings: Settings) -> list[Setting]:
    """What is not as it would be without a word from the user."""
    sections = (settings.train, settings.cluster, settings.node)
    every = (setting for section in sections for setting in _settings(section, None, ""))
    return [each for each in every if each.value != each.default]


def differing(settings: Sequence[Settings | None]) -> dict[str, list[str]]:
    """The settings that are not the same in all runs, by key; empty where one does not apply.

    Those of single machines are left out.
    """
    known = [{} if each is None else _of_all_machines(each) for each in settings]
    keys = dict.fromkeys(key for each in known for key in each)
    rows = {key: [each.get(key, "") for each in known] for key in keys}
    have = [place for place, each in enumerate(settings) if each is not None]
    return {key: row for key, row in rows.items() if len({row[place] for place in have}) > 1}


def _of_all_machines(settings: Settings) -> dict[str, str]:
    sections = (settings.train, settings.cluster)
    every = (setting for section in sections for setting in _settings(section, None, ""))
    return {each.key: each.value for each in every if each.key != "nodes"}


def _settings(section: BaseModel, default: object, above: str) -> Iterator[Setting]:
    """All that a section says, beside `default`; where that is of another kind, its fields' own defaults."""
    is_alike = type(default) is type(section)
    for name, field in type(section).model_fields.items():
        key, value = f"{above}{name}", getattr(section, name)
        if is_alike or (name == "type" and isinstance(default, BaseModel)):
            usual = getattr(default, name)
        else:
            usual = None if field.is_required() else field.get_default(call_default_factory=True)
        if isinstance(value, BaseModel):
            yield from _settings(value, usual, f"{key}.")
        else:
            is_free = not is_alike and field.is_required()
            yield Setting(key, _shown(value), "" if is_free else _shown(usual))


def _shown(value: object) -> str:
    """A value as in a file; of a mapping its entries."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json", exclude_defaults=True)
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_shown(item)}" for key, item in value.items()) or "none"
    if isinstance(value, str | Path):
        return str(value)
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value)) or "none"
    return show(value)
