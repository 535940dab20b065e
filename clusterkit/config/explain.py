"""Explain the values of a preset: origin, default, meaning and reason of every field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from clusterkit.config.fields import Field, applies, fields
from clusterkit.config.overrides import known_field
from clusterkit.config.presets import Setting
from clusterkit.config.resolve import resolve
from trainer.checkpoint.fingerprint import UNSET
from trainer.config import flatten
from trainer.config_choices import CHOICES
from trainer.errors import UserError


@dataclass(frozen=True)
class Explanation:
    """One field as `presets explain` shows it. `origin` is "default" if nothing sets it."""

    key: str
    value: Any
    origin: str
    default: Any
    allowed: str
    meaning: str
    note: str


@dataclass(frozen=True)
class Difference:
    """One field that two presets set differently."""

    key: str
    first: Any
    second: Any


def compare(first: str, second: str, task: str | None = None) -> list[Difference]:
    """Return the fields that differ, in the order of the schema. `task`: of both; None: each preset's default."""
    one, other = (flatten(resolve(name, task).config) for name in (first, second))
    pairs = ((key, one.get(key, UNSET), other.get(key, UNSET)) for key in fields() if key in one or key in other)
    return [
        Difference(key, first_value, second_value)
        for key, first_value, second_value in pairs
        if first_value != second_value and key not in ("preset", "experiment_name")
    ]


def explain(
    preset: str, task: str | None = None, key: str | None = None, everything: bool = False
) -> list[Explanation]:
    """Explain one field, one section, the fields that a preset sets, or all that apply to it.

    Args:
        task: None for its default.
        key: a field or a section.
        everything: explain also the fields that have their default.

    Raises:
        UserError: the field is unknown, or belongs to another task, agent or reward than the preset's.
    """
    resolved = resolve(preset, task)
    values = flatten(resolved.config)
    keys = list(fields())
    if key is not None:
        keys = [name for name in keys if name.startswith(f"{key}.")] or [_applying(key, values)]
    elif not everything:
        keys = [name for name in keys if _setting(name, resolved.settings)]
    keys = [name for name in keys if applies(name, values)]
    explanations = []
    for name in keys:
        field, setting = _field(name, values), _setting(name, resolved.settings)
        origin, note = (setting.origin, setting.note) if setting else ("default", "")
        value = values[name] if setting else field.default
        explanations.append(Explanation(name, value, origin, field.default, field.allowed, field.help, note))
    return explanations


def _applying(key: str, values: dict[str, Any]) -> str:
    found = known_field(key).key
    if not applies(found, values):
        section, _, rest = found.partition(".")
        choice = CHOICES[section]
        raise UserError(choice.refusal(values[choice.setting], rest.partition(".")[0], "this preset", advice=""))
    return found


def _field(name: str, values: dict[str, Any]) -> Field:
    """Return the field of the preset's task, agent, reward or engine."""
    choice = CHOICES.get(name.partition(".")[0])
    return fields()[name].as_of(values[choice.setting]) if choice is not None else fields()[name]


def _setting(name: str, settings: dict[str, Setting]) -> Setting | None:
    """Return the setting of a field; for a mapping that of its last entry."""
    if fields()[name].kind != "mapping":
        return settings.get(name)
    return next((settings[key] for key in reversed(settings) if f"{key}.".startswith(f"{name}.")), None)
