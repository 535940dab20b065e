"""Frozen records of what comes from outside: a file, the command line, a host."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """Base of what comes from outside: frozen, checked, and of known fields only."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def json_object(text: str | bytes) -> dict[str, Any] | None:
    """Return the JSON object that a text is; None where it is none."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
