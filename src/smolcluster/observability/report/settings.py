"""Settings of a run: which of them are not the defaults, and which differ between runs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from smolcluster.configs.keys import show
from smolcluster.configs.resolve import Settings


@dataclass(frozen=True)
class Setting:
    """A setting that is not its default; `default` is empty where there is none."""

    key: str
    value: str
    default: str


def changed_settings(settings: Settings) -> list[Setting]:
    """What is not as it would be without a word from the user."""
    sections = (settings.train, settings.cluster, settings.node)
    return [setting for section in sections for setting in _changed(section, None, "")]


def _changed(section: BaseModel, default: BaseModel | None, above: str) -> Iterator[Setting]:
    """Compare with `default`; where there is none of this kind, with the fields' own defaults."""
    for name, field in type(section).model_fields.items():
        key, value = f"{above}{name}", getattr(section, name)
        if default is not None:
            usual = getattr(default, name)
        else:
            usual = None if field.is_required() else field.get_default(call_default_factory=True)
        if isinstance(value, BaseModel):
            is_alike = type(value) is type(usual)
            if not is_alike and "type" in type(value).model_fields:
                yield Setting(f"{key}.type", _type_of(value), _type_of(usual))
            yield from _changed(value, usual if is_alike else None, f"{key}.")
        elif value != usual:
            is_free = default is None and field.is_required()
            yield Setting(key, _shown(value), "" if is_free else _shown(usual))


def _type_of(section: object) -> str:
    return str(getattr(section, "type", ""))


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


def all_settings(settings: Settings) -> dict[str, str]:
    """Every setting by its key, but for those of single machines."""
    return {
        key: value
        for section in (settings.train, settings.cluster)
        for key, value in _leaves(section, "")
        if key != "nodes"
    }


def _leaves(section: BaseModel, above: str) -> Iterator[tuple[str, str]]:
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from _leaves(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", _shown(value)


def differing(settings: Sequence[Settings | None]) -> dict[str, list[str]]:
    """The settings that are not the same in all runs, by key; empty where one does not apply."""
    known = [{} if each is None else all_settings(each) for each in settings]
    keys = dict.fromkeys(key for each in known for key in each)
    rows = {key: [each.get(key, "") for each in known] for key in keys}
    have = [place for place, each in enumerate(settings) if each is not None]
    return {key: row for key, row in rows.items() if len({row[place] for place in have}) > 1}
