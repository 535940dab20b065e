"""The view of a log as text, like `clusterkit status`."""

from __future__ import annotations

from clusterkit.common.text_plot import count, duration, shares, size, sparkline
from clusterkit.runs.log.metrics import number
from clusterkit.runs.log.view import LogView

SHOWN_RESTARTS = 3
_TRENDS = (("task_reward", ".3f"), ("rollout/reward", ".3f"), ("no_eos_ratio", ".3f"), ("avg_seq_len", ".0f"))
_NUMBERS = (("importance_weight", ".6f"), ("actor_clip_ratio", ".2e"), ("ppo_approx_kl", ".2e"), ("actor_loss", ".2e"))


def log_lines(view: LogView) -> list[str]:
    """Return one line per fact, with a label."""
    history = view.history
    wrote = f", {view.dialect}" if view.dialect else ""
    rows = [("log", f"{view.name} ({size(view.size)}{wrote})"), ("state", _state(view)), ("step", _step(view))]
    rows += [("note", note) for note in view.notes]
    if view.traceback is not None:
        rows += [("traceback" if not place else " ", line) for place, line in enumerate(view.traceback.lines)]
    rows += [(name, _trend(history.stat(name), form)) for name, form in _TRENDS]
    stats = history.steps[-1]["stats"] if history.steps else {}
    rows.append(("stats", ", ".join(f"{name} {stats[name]:{form}}" for name, form in _NUMBERS if name in stats)))
    if history.step_time() is not None:
        rows.append(("speed", f"{duration(history.step_time())} a step{_tokens(view)}"))
    rows.append(("time", shares(history.time_split())))
    facts = view.as_dict()
    rows.append(("recover", _checkpoint(facts["recover"])))
    rows.append(("saved", _checkpoint(facts["save"])))
    if facts["attempts"]:
        resumed = facts["resumed_from"]
        went_on = f", the last one went on from step {resumed}" if resumed and facts["attempts"] > 1 else ""
        rows.append(("attempts", f"{facts['attempts']}{went_on}"))
    rows += [("restart", str(record["message"])) for record in history.restarts[-SHOWN_RESTARTS:]]
    if history.errors:
        rows.append(("last error", str(history.errors[-1]["message"])))
    if not view.closed:
        rows.append(("last line", f"{duration(view.silence)} ago"))
    shown = [(label, text) for label, text in rows if text]
    width = max(12, *(len(label) for label, _ in shown))
    return [f"{label:<{width}} {text}" for label, text in shown]


def _state(view: LogView) -> str:
    if view.state == "empty":
        return "empty: nothing has been written yet"
    return f"{view.state}: {view.message}" if view.message else view.state


def _step(view: LogView) -> str:
    history = view.history
    if not history.steps:
        return "no step has ended, by this log"
    last = history.steps[-1]
    text = f"{history.global_step}/{history.total_steps or '?'}"
    text += f"  (epoch {last['epoch']}/{last['epochs']}, step {last['epoch_step']}/{last['steps_per_epoch']})"
    return text + (f"  ETA {duration(view.eta)}" if view.eta is not None else "")


def _trend(values: list[float], form: str) -> str:
    if not values:
        return ""
    return f"{values[-1]:{form}}  {sparkline(values)}  (first {values[0]:{form}})"


def _tokens(view: LogView) -> str:
    last = view.history.steps[-1]
    tokens, seconds = number(last["stats"], "n_tokens"), number(last, "step_time_s")
    return f", {count(tokens / seconds)} tokens/s" if tokens and seconds else ""


def _checkpoint(facts: dict[str, object]) -> str:
    if not facts["count"]:
        return "none, by this log"
    step = f"after step {facts['global_step']}" if facts["global_step"] is not None else "after an unknown step"
    age = facts["age_s"]
    when = f"{duration(age)} ago" if isinstance(age, float) else "at an unknown time"
    return f"{step}, {when}, {facts['count']} in all"
