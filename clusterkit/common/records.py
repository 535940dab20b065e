"""Frozen dataclasses that are validated where they come from outside: a file, the command line, a test.

pydantic does that, and is imported for it; what the program itself makes needs neither (a tenth of a second at start).
The methods have pydantic's names and mean the same.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any, ClassVar, Literal, Self, cast


class Limits:
    """What a field's annotation says beyond its type, in pydantic's words: ge, le, pattern, min_length."""

    def __init__(self, **limits: Any) -> None:
        self._limits = limits

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        """Let pydantic check the limits."""
        return {**handler(source), **self._limits}


class Record:
    """Base of dataclasses that are frozen, `kw_only` and without slots."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    @classmethod
    def model_validate(cls, values: Any) -> Self:
        """A record of a mapping, those within it included.

        Raises:
            pydantic.ValidationError: it is none.

        """
        record: Self = _validator(cast(Any, cls)).validate_python(values)
        return record

    def model_copy(self, *, update: Mapping[str, Any]) -> Self:
        """The same with other values, which are not validated."""
        other = copy.copy(self)
        other.__dict__.update(update)
        return other

    def model_dump(
        self,
        *,
        mode: Literal["python", "json"] = "python",
        exclude: Collection[str] = (),
        exclude_defaults: bool = False,
    ) -> dict[str, Any]:
        """Mapping of all fields, records within included; json: with lists for tuples."""
        values = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)  # type: ignore[arg-type]  # those that derive from it are
            if field.name not in exclude
        }
        if exclude_defaults:
            defaults = _defaults(cast(Any, type(self)))
            values = {name: value for name, value in values.items() if name not in defaults or value != defaults[name]}
        return {name: _plain(value, mode, exclude_defaults) for name, value in values.items()}


@cache
def _validator(kind: Any) -> Any:
    from pydantic import TypeAdapter  # noqa: PLC0415 (slow)

    return TypeAdapter(kind)


@cache
def _defaults(kind: Any) -> dict[str, Any]:
    defaults = {}
    for field in dataclasses.fields(kind):
        if field.default is not dataclasses.MISSING:
            defaults[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            defaults[field.name] = field.default_factory()
    return defaults


def _plain(value: Any, mode: Literal["python", "json"], exclude_defaults: bool) -> Any:
    if isinstance(value, Record):
        return value.model_dump(mode=mode, exclude_defaults=exclude_defaults)
    if isinstance(value, dict):
        return {key: _plain(item, mode, exclude_defaults) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [_plain(item, mode, exclude_defaults) for item in value]
        return items if mode == "json" or isinstance(value, list) else tuple(items)
    return value
