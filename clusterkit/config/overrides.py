"""Parse KEY=VALUE words of the command line, and validate a RunConfig with messages that say what to type."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from clusterkit.common.suggest import nearest_keys
from clusterkit.config import aliases
from clusterkit.config.fields import Field, fields, mapping_entry
from trainer.config import RunConfig
from trainer.config_choices import refusal_of, setting_of, tag_of
from trainer.errors import UserError


def parse_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """Parse `train.total_steps=50 …` into values by dotted key.

    Keys of AReaL, verl and vime are translated (clusterkit/config/aliases.py). Of two words for one key the later one
    counts, but two translated keys must not contradict each other.
    """
    values: dict[str, Any] = {}
    beside: dict[str, str] = {}
    translated: dict[str, str] = {}
    problems: list[str] = []
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals:
            problems.append(
                f"'{argument}' is not of the form key=value, such as train.total_steps=50 (a preset is chosen "
                "with --preset NAME, a task with --task NAME)"
            )
            continue
        try:
            translation = aliases.translate(key, text)
            for ours, part in translation.settings.items():
                value = parse_value(known_field(ours), part)
                if translation.note and ours in translated and values[ours] != value:
                    problems.append(f"{argument} and {translated[ours]} are both {ours} here: leave one of them out")
                if translation.note:
                    translated[ours] = argument
                values[ours] = value
            beside |= translation.beside
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("\n".join(problems))
    return {**{key: parse_value(known_field(key), text) for key, text in beside.items()}, **values}


def known_field(key: str, model: type[BaseModel] = RunConfig) -> Field:
    """Return the field of a dotted key; UserError names the nearest ones."""
    known = fields(model)
    field = known.get(key) or mapping_entry(key, known)
    if field is not None:
        return field
    below = [name for name in known if name.startswith(f"{key}.")]
    if below:
        raise UserError(f"{key} is a section, not a value: set one of {', '.join(below)}")
    if model is RunConfig and (sentence := aliases.describe(key)):
        raise UserError(sentence)
    matches = nearest_keys(key, known)
    if matches:
        raise UserError(f"unknown key {key}: did you mean {' or '.join(matches)}?")
    shown_by = "clusterkit presets explain tiny --all" if model is RunConfig else "clusterkit eval --dry-run"
    raise UserError(f"unknown key {key}: `{shown_by}` prints all there are")


def parse_value(field: Field, text: str) -> Any:
    """Parse one value as YAML, by the kind of the field: for a text, `true` stays text."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    if field.optional and value is None:
        return None
    if field.kind in ("str", "choice"):
        # Only quotes are YAML's here; everything else (digits, `true`, a colon) belongs to the text.
        value = value if isinstance(value, str) and text[:1] in "\"'" else text
        if field.choices and value not in field.choices:
            raise bad_value(field, text)
        return value
    if field.kind == "list":
        return _parse_list(field, value)
    if field.kind == "mapping" and not isinstance(value, dict):
        raise bad_value(field, text)
    if field.kind in ("int", "float"):
        return _parse_number(field, value, text)
    return value


LEAVE_OUT = ": leave it out"


def to_config(values: dict[str, Any], advice: Callable[[str], str] = lambda _: LEAVE_OUT) -> RunConfig:
    """Validate nested values; UserError explains all that pydantic finds.

    advice: what to do about a setting of another name than the chosen one, by its dotted name.
    """
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        told = (explain(problem, advice=advice(setting_of(problem["loc"]))) for problem in error.errors())
        raise UserError("\n".join(told)) from None


def bad_value(field: Field, given: Any) -> UserError:
    """Return the error for a value that the field does not allow."""
    meaning = f"\n  {field.key}: {field.help}" if field.help else ""
    return UserError(f"{field.key}={given} is not allowed: it must be {field.allowed}{meaning}")


def _parse_number(field: Field, value: Any, text: str) -> Any:
    if value is None or isinstance(value, bool | list | dict):  # YAML's yes and no would pass for 1 and 0
        raise bad_value(field, text or "(nothing)")
    try:
        number = float(value)
    except ValueError:
        raise bad_value(field, text) from None
    if not math.isfinite(number):
        raise bad_value(field, text)
    # For YAML 1.1, 1e-4 is text.
    return number if field.kind == "float" and isinstance(value, str) else value


def _parse_list(field: Field, value: Any) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, str):  # 4,8,16 without brackets, which a shell may take for a pattern
        value = [part.strip() for part in value.split(",") if part.strip()]
    items = value if isinstance(value, list) else [value]
    try:
        return [parse_value(field.item, str(item)) for item in items] if field.item else items
    except UserError:
        raise bad_value(field, ",".join(str(item) for item in items)) from None


def explain(problem: Any, model: type[BaseModel] = RunConfig, what: str = "this run", advice: str = LEAVE_OUT) -> str:
    """Say in the settings' own words what pydantic finds wrong with one of them.

    Args:
        problem: one of ValidationError.errors().
        what: noun for it, where a setting belongs to another name than the chosen one.
        advice: what to do then.
    """
    if sentence := refusal_of(problem, what, advice):
        return sentence
    key = setting_of(problem["loc"])
    location = key.split(".")
    if problem["type"] == "extra_forbidden":
        try:
            known_field(key, model)
        except UserError as error:
            return str(error)
    if problem["type"] == "value_error":
        message = str(problem["ctx"]["error"])
        return f"{key}: {message}" if key and not message.startswith(f"{key}=") else message
    known = fields(model)
    while location and ".".join(location) not in known:  # a list's index, a union's branch
        location.pop()
    if not location:
        return f"{key}: {problem['msg']}"
    field = known[".".join(location)].as_of(tag_of(problem["loc"]))
    return str(bad_value(field, problem["input"]))
