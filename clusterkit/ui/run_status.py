"""The status of a run as text."""

from __future__ import annotations

import shlex
from typing import Any

from clusterkit.common.text_plot import count, duration, shares, size, sparkline
from clusterkit.config.fields import setting_text
from clusterkit.runs.diagnose.view import Explanation, explain
from clusterkit.runs.log.metrics import History, Record, number, score_name
from clusterkit.runs.status import UNREADABLE, Status

SHOWN_WARNINGS = 3


def status_lines(status: Status, named: str = "", again: str = "") -> list[str]:
    """Return one line per fact, with a label.

    Args:
        named: words with which a printed command means this run.
        again: the command that goes on with it; empty where it is not known.
    """
    history, run = status.history, status.run
    rows = [("run", run.name), ("state", _state(status)), ("step", _step(status))]
    if not history.steps and history.warmup:
        rows.append((warmup_label(history.warmup), warmup_text(history.warmup)))
    elif status.alive and history.is_before_first_step:
        rows.append(("start", f"measuring held-out tasks before step 1, {len(history.evals)} lines of the table done"))
    elif status.alive and history.is_closing:
        rows.append(("closing", f"measuring held-out tasks, {history.closing_text}"))
    for name in ("task_reward", "loss"):
        if values := history.stat(name):
            rows.append((name, f"{values[-1]:.3f}  {sparkline(values)}  (first {values[0]:.3f})"))
    if history.held_out:
        latest = history.held_out[-1]
        rows.append((held_out_label(latest), _evaluation(latest)))
    if history.steps:
        speed = f"{count(number(history.steps[-1], 'tokens_per_s'))} tokens/s, {duration(history.step_time())} a step"
        rows.append(("speed", speed))
        rows.append(("time", shares(history.time_split())))
        if text := engine_text(history.steps[-1].get("stats") or {}):
            rows.append(("engines", text))
    facts = status.as_dict()
    if history.learns:
        rows.append(("recover", _checkpoint(facts["recover"], no_recover_text(status))))
        rows.append(("saved", _checkpoint(facts["save"])))
    rows.append(("attempts", str(facts["attempts"])))
    if status.silence is not None:
        rows.append(("last record", f"{duration(status.silence)} ago"))
    explained = explain(status)
    rows += [("why" if not place else "", line) for place, line in enumerate(explained.lines)]
    newest = list(dict.fromkeys(reversed(history.warnings)))[:SHOWN_WARNINGS]  # attempts may repeat one
    rows += [("warning", warning) for warning in reversed(newest)]
    if status.state != UNREADABLE:
        rows.append(("config", run.config_problem()))
    rows.append(("folder", str(run.logs)))
    if status.state in ("interrupted", "killed", "failed", "new"):
        failed = status.state == "failed"
        go_on = _go_on(status, explained, again)
        rows += [("next", f"clusterkit diagnose {named}".rstrip()), ("go on", go_on)] if failed else [("next", go_on)]
    return [f"{label:<12} {text}" for label, text in rows if text]


def engine_text(stats: dict[str, Any]) -> str:
    """Return the last step's numbers about GPUs and engine servers, if it has any."""
    parts = []
    for name, form in (
        ("mfu", "MFU {:.1%}"),
        ("gpu_memory_peak_gib", "{:.0f} GiB at most"),
        ("gpu_alloc_retries", "short of GPU memory {:.0f} times"),
        ("mismatch_kl", "engine-trainer KL {:.1e}"),
        ("rollout_tokens_per_s", "{:,.0f} sampled tokens/s"),
        ("decode_roofline", "{:.0%} of the memory roofline"),
        ("cached_share", "{:.0%} of prompts cached"),
        ("staleness_mean", "{:.1f} versions old"),
        ("weights_interruption_s", "weights {:.2f} s"),
        ("judge_share", "{:.1%} of the step waited for the judge"),
        ("score_seconds", "{:.1f} s to score a trajectory"),
        ("refilled_groups", "{:.0f} groups left out"),
    ):
        value = stats.get(name)
        if name == "gpu_alloc_retries" and not value:
            continue
        if isinstance(value, int | float) and (name != "mismatch_kl" or "staleness_mean" in stats):
            parts.append(form.format(value))
            possible = stats.get("shareable_share")
            if name == "cached_share" and isinstance(possible, int | float):
                parts[-1] += f" ({possible:.0%} could be)"
    return ", ".join(parts)


def is_supervised(record: Record) -> bool:
    """Whether a record of the time before the first step is one of a supervised start."""
    return record.get("phase") == "supervised"


def warmup_label(record: Record) -> str:
    """Return what comes before the first step: a warm-up or a supervised start."""
    return "start" if is_supervised(record) else "warm-up"


def warmup_text(record: Record, *, counted: bool = True) -> str:
    """Return the state of the warm-up, or of the supervised start, in one line.

    Args:
        counted: with the step and the time that is left, which a bar beside it may show already.
    """
    if not counted:
        record = {key: value for key, value in record.items() if key not in ("step", "steps", "remaining_s")}
    supervised = is_supervised(record)
    if not supervised and record.get("cached"):
        return "read from the cache"
    made, planned = record.get("step"), record.get("steps", "?")
    if supervised:
        parts = ["supervised start" + (f": step {made} of {planned}" if made is not None else "")]
    else:
        parts = [str(record.get("phase", "")) + (f" step {made}/{planned}" if made is not None else "")]
    loss, accuracy = number(record, "loss"), None if supervised else number(record, "accuracy")
    if loss is not None:
        parts.append(f"loss {loss:.3f}")
    if accuracy is not None:
        parts.append(f"accuracy {accuracy:.1%}")
    speed = number(record, "tokens_per_s")
    if speed:
        parts.append(f"{count(speed)} tokens/s")
    if remaining := number(record, "remaining_s"):  # 0 at its last step
        parts.append(f"about {duration(remaining)} left of it")
    if supervised:
        kept = record.get("recover_step")
        parts.append(f"recover checkpoint after step {kept}" if kept else "no recover checkpoint yet")
    return ", ".join(parts)


def no_recover_text(status: Status) -> str:
    """Return what a run without a recover checkpoint of its own steps goes on from: its supervised start's, if any."""
    run, warmup = status.run, status.history.warmup or {}
    if run.has_supervised_checkpoint:
        return "none of its own steps yet; its supervised start is done and kept"
    if run.keeps_supervised:
        step = warmup.get("recover_step") if is_supervised(warmup) else None
        return f"that of its supervised start{f', after step {step}' if step else ''}"
    return "none yet"


def to_go(history: History, steps_left: float | None) -> str:
    """Return the time to the end of a run: steps, and its closing evaluation, by what that took before the first step.

    Args:
        steps_left: seconds to the end of the last step; None: unknown.
    """
    told = duration(history.left(steps_left))
    return f"{told}, closing evaluation included" if steps_left is not None and history.closing_seconds else told


def measured_text(record: Record) -> str:
    """Return the score of an evaluation with its name, or the loss if the run learns from given answers."""
    loss, accuracy = number(record, "loss"), number(record, "accuracy")
    if loss is not None:
        return f"loss {loss:.3f}"
    return f"{score_name(record)} {'?' if accuracy is None else f'{accuracy:.1%}'}"


def held_out_label(record: Record) -> str:
    """Return the label of held-out scores, which names those that are no accuracy."""
    name = score_name(record)
    return "held-out" if name == "accuracy" else f"held-out {name}"


def labelled_text(record: Record) -> str:
    """Return `measured_text` for a place whose label names the score."""
    return measured_text(record).removeprefix(f"{score_name(record)} ")


def _state(status: Status) -> str:
    holder = f" ({status.holder})" if status.holder else ""
    # "interrupted after step 5" has the state.
    message = status.message.removeprefix(status.state).lstrip(": ").rstrip()
    return f"{status.state}{holder}{': ' if message else ''}{message}"


def _go_on(status: Status, explained: Explanation, again: str) -> str:
    """Return what goes on with a run that has ended: never just the command that would fail in the same way again."""
    changed = " ".join(shlex.quote(f"{change.key}={setting_text(change.proposed)}") for change in explained.changes)
    if changed:
        return f"{again or 'repeat the `clusterkit train` command with'} {changed}"
    then = again or "repeat the `clusterkit train` command"
    if status.run.restart_waits:
        return f"it was to be started again; where its command or job has ended, {then}"
    if status.state == "failed" and status.run.is_refused:
        return f"put right what the state says, as it fails again unchanged; then {then}"
    return again or "repeat the `clusterkit train` command: it goes on with this run"


def _step(status: Status) -> str:
    history = status.history
    text = f"{history.global_step}/{status.total_steps or '?'}"
    last = history.steps[-1] if history.steps else {}
    if last.get("epoch"):
        text += f"  (epoch {last['epoch']}/{last.get('epochs', '?')}, step {last.get('epoch_step', '?')}"
        text += f"/{last.get('steps_per_epoch', '?')})"
    if status.left:  # 0 at the end
        text += f"  ETA {to_go(history, status.eta)}"
    return text


def _evaluation(record: Record) -> str:
    share = "of" if score_name(record) == "accuracy" else "on"  # a share of the tasks, or a mean over them
    shown = f"{labelled_text(record)} {share} {record.get('num_tasks', '?')} tasks"
    return f"{shown} after step {record.get('global_step', '?')}"


def _checkpoint(facts: dict[str, Any], none: str = "none yet") -> str:
    if not facts["count"]:
        return none
    return f"after step {facts['global_step']}, {duration(facts['age_s'])} ago, {size(facts['bytes'])}"
