"""Make a proposed change from a rule and the present value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clusterkit.config.fields import fields
from clusterkit.config.presets import nest
from clusterkit.runs.diagnose.logged_settings import LoggedSettings
from clusterkit.runs.diagnose.model import Change, Rule
from clusterkit.runs.trials import must_stay
from trainer.config import RunConfig, flatten
from trainer.config_agents import ChunksAgentConfig

PROMPT_TOKENS = 512
"""Tokens that a prompt's wording and the chat template may add to the limits of a row."""


@dataclass(frozen=True)
class Context:
    """What proposals depend on."""

    config: RunConfig | None = None  # of the run; None if there is only a log
    logged: LoggedSettings | None = None  # settings that the logs print
    environment: Mapping[str, str] | None = None  # variables of the trainer's processes
    learned: bool = True  # whether the run has progress to keep


def propose(rules: tuple[Rule, ...], context: Context) -> tuple[Change, ...]:
    """Return the change of each rule, without those that change nothing or break the configuration."""
    changes = [_propose(rule, context) for rule in rules]
    return tuple(change for change in changes if change is not None)


def _propose(rule: Rule, context: Context) -> Change | None:
    if rule.environment:
        now = (context.environment or {}).get(rule.environment)
        return None if now == rule.to else Change(rule.environment, "environment", now, rule.to, rule.why)
    if context.config is None:
        return _areal(rule, context) if rule.areal else None
    engine = "server" if context.config.allocation_mode else "embedded"
    if rule.engine not in ("", engine):
        return None
    if rule.key in fields():
        return _ours(rule, context.config, context.learned)
    # Without engine servers, a server's option does not help.
    return _areal(rule, context) if rule.areal and engine == "server" else None


def _ours(rule: Rule, config: RunConfig, learned: bool) -> Change | None:
    values = flatten(config)
    now = values.get(rule.key)
    if rule.key not in values or (now is None and rule.how != "to"):  # a setting of another task, agent or reward
        return None
    least = max(rule.least, longest_row(config)) if rule.key == "train.max_tokens_per_mb" else rule.least
    proposed = _next(rule, now, least)
    if proposed is None or proposed == now or not _valid({**values, rule.key: proposed}):
        return None
    return Change(rule.key, "setting", now, proposed, rule.why, new_trial=learned and must_stay(rule.key))


def _areal(rule: Rule, context: Context) -> Change | None:
    now = context.logged.get(rule.areal) if context.logged is not None else None
    if now is None and rule.how != "to":
        words = {
            "halve": "half of it",
            "double": "twice as much",
            "times": f"{rule.by:g} times as much",
            "less": f"{rule.by:g} less",
            "more": f"{rule.by:g} more",
        }
        return Change(rule.areal, "areal", None, words[rule.how], rule.why)
    proposed = _next(rule, now, rule.least)
    return None if proposed is None or proposed == now else Change(rule.areal, "areal", now, proposed, rule.why)


def _next(rule: Rule, now: Any, least: float) -> Any:
    """Return the value that a rule makes of `now`, within its bounds; None if `now` is at the bound already."""
    if rule.how == "to":
        return rule.to
    if rule.how == "next":
        return rule.steps.get(now)
    if isinstance(now, bool) or not isinstance(now, int | float):
        return None
    exact = {"halve": now / 2, "double": now * 2, "less": now - rule.by, "more": now + rule.by, "times": now * rule.by}
    value = min(max(exact[rule.how], least), rule.most)
    grows = rule.how in ("double", "more") or (rule.how == "times" and rule.by > 1)
    if (value <= now) if grows else (value >= now):
        return None
    return int(value) if isinstance(now, int) else float(f"{value:.4g}")


def longest_row(config: RunConfig) -> int:
    """Estimate the most tokens of one conversation; a micro-batch must hold at least one."""
    a = config.agent
    chunk, memory = (a.chunk_tokens, a.max_memory_tokens) if isinstance(a, ChunksAgentConfig) else (0, 0)
    update = chunk + 2 * memory + a.question_limit("update")
    final = memory + a.question_limit("final") + a.max_final_tokens
    return max(update, final) + (PROMPT_TOKENS if a.template == "memagent" else 16)


def _valid(values: dict[str, Any]) -> bool:
    try:
        RunConfig.model_validate(nest(values))
    except ValueError:
        return False
    return True
