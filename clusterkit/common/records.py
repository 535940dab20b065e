"""The base of records that come from outside: a file, the command line, a host."""

from __future__ import annotations

import json
from sys import intern
from typing import Any

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """A frozen, validated record that accepts only known fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def json_object(text: str | bytes) -> dict[str, Any] | None:
    """Return the JSON object that a text is; None where it is none."""
    try:
        value = json.loads(text, object_pairs_hook=_interned)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _interned(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object whose names are shared with all others: half of the memory of a long run's records."""
    return {intern(name): value for name, value in pairs}
