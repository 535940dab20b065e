"""Parse messages of AReaL's logs into records like those of metrics.jsonl, in time linear in their length.

Three dialects: v0.2 (a dict of statistics, then the step's line), v0.3 (tables of statistics, one per minibatch, then
the step's line) and Lite/1.x (the step's line, then its tables). Our trainer writes v0.2's lines; ours.py has others.
"""

from __future__ import annotations

import re
from typing import Any

from clusterkit.runs.log.lines import Message
from clusterkit.runs.log.metrics import Record

_NUMBER = r"[-+]?(?:\d{1,20}(?:\.\d{0,25})?(?:[eE][-+]?\d{1,4})?|inf|nan)"
_EPOCH = re.compile(r"Epoch (\d{1,9})/(\d{1,9}) step (\d{1,9})/(\d{1,9}) \(global step (\d{1,12})\) finishes\.")
_EPOCH_LITE = re.compile(r"Epoch (\d{1,9})/(\d{1,9}) Step (\d{1,9})/(\d{1,9}) Train step (\d{1,12})/(\d{1,12}) done\.")
_SECONDS = re.compile(rf"execution time: \*?({_NUMBER})\*?s")
_PARTS = {
    "tokens": re.compile(rf"#tokens per batch is ({_NUMBER})\."),
    "total_time_s": re.compile(rf"Total time consumption: ({_NUMBER})"),
    "remaining_s": re.compile(rf"Estimated remaining time: ({_NUMBER})"),
    "tflops_per_gpu": re.compile(rf"TFLOP/s per GPU: ({_NUMBER})"),
}
_RETURNS = re.compile(r"RPC name (\S{1,80}) returns ?(?:\((\d{1,6})/(\d{1,6})\))?")
_STATS = re.compile(r"Stats \((\d{1,6})/(\d{1,6})\):")
_PAIR = re.compile(rf"""['"]([^'"]{{1,200}})['"]: (?:[\w.]{{1,30}}\()?({_NUMBER})(?=[,)}}])""")
_POINT = re.compile(r"(?:Will recover from: |Recovering from )StepInfo\(.{0,200}?global_step=(\d{1,12})")
_PREVIOUS = re.compile(r"Recovering from previous run\. .{0,100}?Global Step: (\d{1,12})")
_START = re.compile(r"Training will start from: .{0,100}?global step (\d{1,12})")
_ERROR = re.compile(r"Recovering from error (.*) after \S{1,20} seconds\. Recover count: (\d{1,6})", re.DOTALL)
_SAVED = re.compile(r"Model (\S{1,60}) saved at (\S{1,4000}?)\.? Time consumption: (?:(\d{1,12}\.?\d{0,9}))?")
_SAVED_STEP = re.compile(r"globalstep(\d{1,12})")
_RPC_TIME = re.compile(rf"Model rpc (\S{{1,80}}) finished\. Run time ({_NUMBER}) ?s")

_NAMES = {
    "advantages": "advantage",
    "approx_kl": "ppo_approx_kl",
    "clip_ratio": "actor_clip_ratio",
    "kl_rewards": "kl_reward",
    "no_eos_ratios": "no_eos_ratio",
    "prompt_len": "avg_prompt_len",
    "seq_len": "avg_seq_len",
}
"""Names of v0.3 and Lite for numbers of v0.2."""
_ACTOR_NAMES = {**_NAMES, "loss": "actor_loss"}
"""A loss outside an actor's scope is another loss, such as that of supervised training."""
_ACTOR = re.compile(r"(?:[^/]{0,80}_)?actor/")
"""The scope, chosen by the training script: v0.3 and 1.x use `ppo_actor/`, Lite's examples mostly `grpo_actor/`."""

SHOWN_MESSAGE = 500


def parse(message: Message) -> Record | None:
    """Return the record of a message, or None. Its `kind` is one of metrics.jsonl's or progress.py's."""
    text = message.text
    for begin, fields in _PLAIN.items():
        if text.startswith(begin):
            return {"time": message.time, **fields}
    for begin, read in _READERS:
        if text.startswith(begin):
            found = read(message)
            return None if found is None else {"time": message.time, **found}
    return None


def table_values(row: str) -> dict[str, float]:
    """Return names and numbers of one table row: `│ name │ 1.2e-01 │ name │ …`. A torn row has fewer."""
    cells = [cell.strip() for cell in row.split("│")[1:-1]]
    values = {}
    for name, value in zip(cells[::2], cells[1::2], strict=False):
        if name and len(name) <= 200 and (known := number(value)) is not None:
            values[name] = known
    return values


def number(text: str) -> float | None:
    """Parse a number as Python prints it, or return None."""
    return float(text) if len(text) <= 50 and re.fullmatch(_NUMBER, text) else None


def canonical(values: dict[str, float]) -> dict[str, float]:
    """Rename statistics to v0.2's names: `ppo_actor/task_reward/avg` to `task_reward`; `/min` and `/max` stay.

    A number that v0.2 lacks keeps its name, such as `rollout/reward` (the mean over what was sampled meanwhile, not
    over the batch). So do the numbers of several actors.
    """
    scopes = {match[0] for name in values if (match := _ACTOR.match(name))}
    scope = scopes.pop() if len(scopes) == 1 else ""
    named: dict[str, float] = {}
    for name, value in values.items():
        by_actor = bool(scope) and name.startswith(scope)
        short = name.removeprefix(scope).removeprefix("update/") if by_actor else name
        short = short.removesuffix("/avg")
        named.setdefault((_ACTOR_NAMES if by_actor else _NAMES).get(short, short), value)
    return named


def _step(message: Message) -> dict[str, Any] | None:
    text = message.text
    if match := _EPOCH.match(text):
        epoch, epochs, step, steps, overall = map(int, match.groups())
        fields: dict[str, Any] = _position(epoch, epochs, step, steps, overall, epochs * steps)
        fields["step_time_s"] = _float(_SECONDS.search(text, match.end(), match.end() + 400))
        for name, pattern in _PARTS.items():
            value = _float(pattern.search(text, match.end(), match.end() + 400))
            if value is not None:
                fields[name] = value
        return fields
    if match := _EPOCH_LITE.match(text):
        return {**_position(*map(int, match.groups())), "step_time_s": None, "dialect": "lite"}
    return None


def _position(epoch: int, epochs: int, step: int, steps: int, overall: int, total: int) -> dict[str, Any]:
    position = {"kind": "step", "epoch": epoch, "epochs": epochs, "epoch_step": step, "steps_per_epoch": steps}
    return {**position, "global_step": overall, "total_steps": total}


def _returned(message: Message) -> dict[str, Any] | None:
    """Parse statistics in the message itself, or the head of a table that follows."""
    match = _RETURNS.match(message.text)
    if match is None or "train" not in match[1].lower() or match[1].startswith("critic"):
        return None
    rest = message.text[match.end() :].strip()
    if not rest:
        part, parts = int(match[2] or 1), int(match[3] or 1)
        return {"kind": "table", "dialect": "v0.3", "part": part, "parts": parts}
    if not rest.startswith("{") or not rest.endswith("}"):
        return None  # torn, or something else
    values = {pair[1]: float(pair[2]) for pair in _PAIR.finditer(rest)}
    return {"kind": "stats", "dialect": "v0.2", "part": 1, "parts": 1, "values": values} if values else None


def _stats_head(message: Message) -> dict[str, Any] | None:
    match = _STATS.match(message.text)
    return match and {"kind": "table", "dialect": "lite", "part": int(match[1]), "parts": int(match[2])}


def _recover_point(message: Message) -> dict[str, Any] | None:
    """Parse the step that a restart would resume from (AReaL, after each dump) or does resume from (our trainer)."""
    match = _POINT.match(message.text)
    return match and {"kind": "recover_point", "global_step": int(match[1])}


def _resumed(message: Message) -> dict[str, Any] | None:
    text = message.text
    if match := _ERROR.match(text):
        return {"kind": "restart", "message": match[1][:SHOWN_MESSAGE], "count": int(match[2])}
    if match := _POINT.match(text):  # Lite counts from 0: the next step's number is that of the steps done
        return {"kind": "resume", "resume_step": int(match[1])}
    if match := _PREVIOUS.match(text) or _START.match(text):  # counts from 1 and names the next step
        return {"kind": "resume", "resume_step": max(int(match[1]) - 1, 0)}
    return None


def _saved(message: Message) -> dict[str, Any] | None:
    match = _SAVED.match(message.text)
    if match is None:
        return None
    step = _SAVED_STEP.search(match[2])
    seconds, global_step = float(match[3]) if match[3] else None, int(step[1]) if step else None
    return {"kind": "save", "model": match[1], "path": match[2], "seconds": seconds, "global_step": global_step}


def _rpc_time(message: Message) -> dict[str, Any] | None:
    match = _RPC_TIME.match(message.text)
    return match and {"kind": "rpc", "name": match[1], "seconds": float(match[2])}


def _float(match: re.Match[str] | None) -> float | None:
    return float(match[1]) if match else None


_READERS = (
    ("Epoch ", _step),
    ("RPC name ", _returned),
    ("Stats (", _stats_head),
    ("Will recover from: ", _recover_point),
    ("Recovering from ", _resumed),
    ("Training will start from: ", _resumed),
    ("Model rpc ", _rpc_time),
    ("Model ", _saved),
)
_PLAIN: dict[str, dict[str, Any]] = {
    "Dumped recover info": {"kind": "recover"},
    "Saved recover checkpoint to ": {"kind": "recover", "dialect": "lite"},
    "Invalid recover checkpoint": {"kind": "resume", "resume_step": None},  # AReaL then begins from scratch
    "Experiment Completes": {"kind": "finish", "status": "completed"},
    "Training completes": {"kind": "finish", "status": "completed"},
}
