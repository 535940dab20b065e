"""Steps as columns: ten times as quick to write and read as JSON objects, because most numbers stay binary."""

from __future__ import annotations

from array import array
from base64 import b64decode, b64encode
from typing import Any, cast

from clusterkit.runs.log.metrics import Record

_MAY_BE_NONE = {"time", "step_time_s"}
_STATS = "stats/"


def pack(steps: list[Record]) -> dict[str, Any]:
    """Steps for JSON: a column of floats as text of base64, any other as a list with None where a step lacks it."""
    rows = [{**step, **{_STATS + name: value for name, value in step["stats"].items()}} for step in steps]
    names = dict.fromkeys(name for row in rows for name in row if name != "stats")
    columns: dict[str, Any] = {}
    for name in names:
        values = [row.get(name) for row in rows]
        binary = all(type(value) is float for value in values)
        columns[name] = b64encode(array("d", cast("list[float]", values)).tobytes()).decode() if binary else values
    return {"count": len(steps), "columns": columns}


def unpack(packed: dict[str, Any]) -> list[Record]:
    """The steps that were packed.

    Raises:
        ValueError, KeyError, TypeError: they are damaged.

    """
    steps: list[Record] = [{"stats": {}} for _ in range(packed["count"])]
    for name, column in packed["columns"].items():
        values: Any = column
        if isinstance(column, str):
            values = array("d")
            values.frombytes(b64decode(column))
        if name.startswith(_STATS):
            key = name.removeprefix(_STATS)
            for step, value in zip(steps, values, strict=True):
                if value is not None:
                    step["stats"][key] = value
        else:
            keep_none = name in _MAY_BE_NONE
            for step, value in zip(steps, values, strict=True):
                if value is not None or keep_none:
                    step[name] = value
    return steps
