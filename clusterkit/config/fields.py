"""What the fields of a configuration accept, in words, from their annotations; for messages and `presets explain`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from trainer.config import RunConfig
from trainer.config_choice import Choice
from trainer.config_choices import CHOICES


@dataclass(frozen=True)
class Field:
    """One leaf of a configuration."""

    key: str
    help: str
    default: Any
    kind: str  # int, float, bool, str, choice, list, mapping, or any for an entry of a mapping
    optional: bool  # null is allowed
    allowed: str  # what the value must be, in words
    choices: tuple[str, ...] = ()
    item: Field | None = None  # what a list holds
    variants: Mapping[str, Field] = field(default_factory=dict)
    """The field of each task, agent, reward or engine, if its name chooses the section's fields."""

    def as_of(self, name: str) -> Field:
        """Return the field of a chosen task, agent, reward or engine, with its own default and help."""
        return self.variants.get(name, self)


@cache
def fields(model: type[BaseModel] = RunConfig) -> dict[str, Field]:
    """Return every leaf of a configuration by its dotted key, in the order of the schema."""
    return {one.key: one for one in _walk(model, "")}


def mapping_entry(key: str, known: Mapping[str, Field]) -> Field | None:
    """Return the field of an entry of a mapping, such as agent.options.depth; None for any other key."""
    for name, one in known.items():
        if one.kind == "mapping" and key.startswith(f"{name}.") and all(key.removeprefix(f"{name}.").split(".")):
            return Field(key, one.help, None, "any", optional=True, allowed="anything")
    return None


def applies(key: str, values: Mapping[str, Any]) -> bool:
    """Whether a dotted key belongs to the task, agent, reward or engine that the values (by dotted key) choose."""
    if key == "eval.final_methods":
        own = {"task": "hotpotqa", "agent": "memagent"}
        return all(values.get(CHOICES[one].setting, CHOICES[one].default) == name for one, name in own.items())
    section, _, rest = key.partition(".")
    choice = CHOICES.get(section)
    return choice is None or not choice.lacks(values.get(choice.setting, choice.default), rest.partition(".")[0])


OF_ADAPTERS = ("model.lora.alpha", "model.lora.targets", "checkpoint.merged", "weights.adapters")
"""Settings that nothing reads where model.lora.rank is 0."""


def has_effect(key: str, config: RunConfig) -> bool:
    """Whether a run reads a section, or a setting of it, such as one of the judge (by dotted key)."""
    if config.custom:  # classes of the user's own may read anything
        return True
    section = key.partition(".")[0]
    if key in OF_ADAPTERS and not config.model.lora.rank:
        return False
    read = {
        "judge": config.reward.name == "memalpha",
        "weights": config.num_servers > 0,
        "supervised": bool(config.supervised.dataset),
        "warmup": config.model.path is None and config.trainer.type != "sft",
    }
    if section in read:
        return read[section]
    return not f"{key}.".startswith("model.tiny.") or config.model.path is None


def _walk(model: type[BaseModel], prefix: str) -> Iterator[Field]:
    for name, info in model.model_fields.items():
        choice = CHOICES.get(name)
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from _walk(info.annotation, f"{prefix}{name}.")
        elif choice is not None:
            yield from _merged(choice, prefix)
        else:
            help_text = " ".join((info.description or "").split())
            yield _field(prefix + name, info.annotation, list(info.metadata), help_text, info.default)


def _merged(choice: Choice, prefix: str) -> Iterator[Field]:
    """Yield the fields of every class of a section, each once."""
    at = f"{prefix}{choice.section}."
    own = {one.key: one for one in _walk(choice.own, at)}
    ours = {name: {one.key: one for one in _walk(cls, at)} for name, cls in choice.ours.items()}
    for key in dict.fromkeys(key for found in (own, *ours.values()) for key in found):
        variants = {name: found[key] for name, found in ours.items() if key in found}
        one = own.get(key) or next(iter(variants.values()))
        chooses = key == f"{at}{choice.key}"
        yield replace(one, default=choice.default) if chooses else replace(one, variants=variants)


def _field(key: str, annotation: Any, metadata: list[Any], help_text: str, default: Any) -> Field:
    annotation, optional = _without_none(annotation)
    annotation, metadata = _without_annotated(annotation, metadata)
    origin = get_origin(annotation)
    if origin is Literal:
        choices = tuple(str(choice) for choice in get_args(annotation))
        return Field(key, help_text, default, "choice", optional, _or_null(_one_of(choices), optional), choices)
    if origin is list:
        item = _field(key, get_args(annotation)[0], [], "", None)
        such_as = "a list such as [4, 8]" if item.kind in ("int", "float") else "a list, with commas"
        return Field(key, help_text, default, "list", optional, f"{such_as}; each {item.allowed}", (), item)
    if origin is dict:
        return Field(key, help_text, default, "mapping", optional, f"a mapping; its entries: {key}.NAME=VALUE")
    kind = annotation.__name__ if isinstance(annotation, type) else "str"
    return Field(key, help_text, default, kind, optional, _or_null(_bounded(kind, metadata), optional))


def _without_none(annotation: Any) -> tuple[Any, bool]:
    if get_origin(annotation) in (Union, UnionType):
        members = [member for member in get_args(annotation) if member is not NoneType]
        return members[0], len(members) < len(get_args(annotation))
    return annotation, False


def _without_annotated(annotation: Any, metadata: list[Any]) -> tuple[Any, list[Any]]:
    if get_origin(annotation) is not Annotated:
        return annotation, metadata
    inner, *extras = get_args(annotation)
    for extra in extras:
        metadata = metadata + (list(extra.metadata) if isinstance(extra, FieldInfo) else [extra])
    return inner, metadata


def _one_of(choices: tuple[str, ...]) -> str:
    return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"


def _or_null(text: str, optional: bool) -> str:
    return f"{text}, or null" if optional else text


def setting_text(value: Any) -> str:
    """Return a value as it is typed behind KEY=."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


_NOUNS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}
_BOUNDS = {
    "ge": "at least {}",
    "gt": "above {}",
    "le": "at most {}",
    "lt": "below {}",
    "multiple_of": "a multiple of {}",
}


def _bounded(kind: str, metadata: list[Any]) -> str:
    bounds = [
        phrase.format(f"{getattr(constraint, name):g}")
        for constraint in metadata
        for name, phrase in _BOUNDS.items()
        if getattr(constraint, name, None) is not None
    ]
    if any(getattr(constraint, "pattern", None) for constraint in metadata):
        return "made of letters, digits, '.', '_' and '-'"
    return f"{_NOUNS.get(kind, kind)} {' and '.join(bounds)}".rstrip()
