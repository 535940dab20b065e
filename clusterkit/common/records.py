"""The base of records that come from outside: a file, the command line, a host."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """A frozen, validated record that accepts only known fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")
