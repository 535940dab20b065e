"""The base of records that come from outside: a file, the command line, a host."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """A frozen, validated record that accepts only known fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def json_object(text: str | bytes) -> dict[str, Any] | None:
    """Return the JSON object that a text is; None where it is none."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
