"""Parse the lines that only our trainer writes into main.log, beside AReaL v0.2's."""

from __future__ import annotations

import re
from statistics import mean

from clusterkit.runs.log.areal import SHOWN_MESSAGE
from clusterkit.runs.log.lines import Message
from clusterkit.runs.log.metrics import RECENT_STEPS, Record, number

_EVALUATION = re.compile(
    r"Evaluation (\S{1,40}) \(([^)]{0,100})\): (\w{1,20}) (-?\d{1,9}\.\d{1,9}) on (\d{1,9}) tasks\."
)
_INTERRUPTED = re.compile(r"interrupted after step (\d{1,12})")


def parse(message: Message) -> Record | None:
    """Return the record of a message, or None."""
    text = message.text
    if match := _EVALUATION.match(text):
        fields = {"kind": "eval", "name": match[1], "what": match[2], "score_name": match[3]}
        return {"time": message.time, **fields, "accuracy": float(match[4]), "num_tasks": int(match[5])}
    if _INTERRUPTED.match(text):
        return {"kind": "finish", "time": message.time, "status": "interrupted", "message": text[:SHOWN_MESSAGE]}
    if message.level == "ERROR":
        kind = "failure" if message.by_master else "error"
        return {"kind": kind, "time": message.time, "message": text.strip()[:SHOWN_MESSAGE]}
    if message.level == "WARNING" and message.by_master:
        return {"kind": "warning", "time": message.time, "message": text.strip()[:SHOWN_MESSAGE]}
    return None


def is_ours(step: Record) -> bool:
    """Whether our trainer wrote this step, by a number that AReaL lacks."""
    return "zero_variance_groups" in step.get("stats", ())


def planned_steps(steps: list[Record]) -> int | None:
    """Return the planned steps of a run that ends before its epochs do, or None.

    The step's line has no total, but its estimate is the number of steps to come times the mean of the recent ones.
    """
    last = steps[-1]
    remaining = number(last, "remaining_s")
    recent = [
        number(step, "step_time_s") or 0.0
        for step in steps[-RECENT_STEPS:]
        if step.get("attempt") == last.get("attempt")
    ]
    if remaining is None or not recent or mean(recent) <= 0:
        return None
    return int(last["global_step"] + round(remaining / mean(recent)))
