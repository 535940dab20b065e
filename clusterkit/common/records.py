"""Frozen records of what comes from outside: a file, the command line, a host."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """Base of what comes from outside: frozen, checked, and of known fields only."""

    model_config = ConfigDict(frozen=True, extra="forbid")
