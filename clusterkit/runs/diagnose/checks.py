"""Checks of a run's numbers: whether it learns, saves checkpoints and makes steps.

Every check takes the history and returns a finding or None. docs/diagnose.md has the thresholds with their reasons.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import fmean, stdev
from typing import Any

from clusterkit.common.text_plot import duration
from clusterkit.runs.diagnose.changes import Context, propose
from clusterkit.runs.diagnose.model import Cause, Evidence, Rule
from clusterkit.runs.log.metrics import History, number

SOURCE = "metrics.jsonl"
RECENT = 5
LOWEST_STEPS = 3
"""Steps in a row with the lowest reward."""
FLAT_STEPS = 40
"""Fewer steps say nothing about a trend."""
SOLVED = 0.9
STILL_RISING = 0.02
"""Of the reward, over ten steps."""
COLLAPSED_SHARE = 0.1
"""Of the entropy of the first steps."""
RATIO_RANGE = (0.5, 2.0)
MOST_CLIPPED = 0.5
MOST_MISMATCH_KL = 0.01
MOST_TRUNCATED = 0.5
MOST_FAILED = 0.05
STALE_FACTOR = 3.0
STALE_SECONDS = 1800.0
LOOPING_ATTEMPTS = 3
REWARDS = ("task_reward", "final_reward", "rollout/reward")
LOSSES = ("actor_loss", "loss", "grad_norm", "ppo_approx_kl", "importance_weight", "advantage")
"""Numbers that must be finite."""
LOWER_RATE = Rule("times", key="train.learning_rate", areal="actor.optimizer.lr", by=0.3, why="smaller steps")
HIGHER_RATE = Rule("times", key="train.learning_rate", areal="actor.optimizer.lr", by=3.0, why="larger steps")
FEWER_STEPS = Rule("halve", key="train.minibatches", areal="ppo.ppo_n_minibatches", least=1, why="nearer to on-policy")

Check = Callable[[History, Context], Cause | None]


def check_numbers(history: History, context: Context) -> list[Cause]:
    """Return the findings of all checks, the worst first."""
    findings = (check(history, context) for check in CHECKS)
    return [finding for finding in findings if finding is not None]


def nan_loss(history: History, context: Context) -> Cause | None:
    """Find a loss, gradient or reward that is not a number, or optimizer steps that were skipped for that."""
    for step in history.steps[-RECENT:]:
        stats = step.get("stats") or {}
        rewards, losses = ([key for key in keys if _not_finite(stats.get(key))] for keys in (REWARDS, LOSSES))
        skipped = number(stats, "skipped_steps") or 0
        if rewards:
            # Advantages, loss and gradient follow from it: no setting of the optimizer is at fault.
            return Cause(
                "nan-loss",
                "A reward is not a number",
                "The reward function or the verifier gave NaN or an infinite number, and the loss follows from it. "
                "Weights after the first such step cannot be trusted unless the optimizer skipped it.",
                evidence=(evidence_at(step, _values(stats, [*rewards, *losses])),),
                advice=(
                    "have the reward function give 0 (or leave the task out) where it has no result: a division by 0, "
                    "the logarithm of 0, a mean of nothing",
                    "begin anew from the last good checkpoint: model.path=CHECKPOINT trial_name=NEW",
                ),
            )
        if losses or skipped:
            rules = (
                LOWER_RATE,
                Rule("to", key="model.dtype", areal="actor.dtype", to="float32", why="range and precision"),
                Rule("to", key="algorithm.dual_clip", to=3.0, why="bounds single tokens with a huge ratio"),
            )
            return Cause(
                "nan-loss",
                "The loss or its gradient is not a number",
                "The learning rate is too high, half precision overflowed, or a checkpoint is damaged. Weights after "
                "the first such step cannot be trusted unless the optimizer skipped it.",
                evidence=(evidence_at(step, _values(stats, losses) if losses else f"skipped_steps={skipped:g}"),),
                changes=propose(rules, context),
                advice=("begin anew from the last good checkpoint: model.path=CHECKPOINT trial_name=NEW",),
            )
    return None


def reward_lowest(history: History, context: Context) -> Cause | None:
    """Find a reward that stays at its lowest value: every answer is wrong."""
    rewards = finite(history, "task_reward")[-LOWEST_STEPS:]
    if len(rewards) < LOWEST_STEPS or len(set(rewards)) > 1 or rewards[0] > 0:
        return None
    last = history.steps[-1].get("stats") or {}
    truncated = number(last, "no_eos_ratio") or 0.0
    rules: tuple[Rule, ...] = ()
    cause = (
        "No answer was right. Either the model writes no answer in the form that the reward looks for, or the reward "
        "function gives the lowest value to right answers, too, or the tasks are too hard for this model."
    )
    if truncated > MOST_TRUNCATED:
        cause = f"{truncated:.0%} of the answers are cut off before their end, so they are wrong whatever they say."
        rules = (
            Rule("double", key="agent.max_final_tokens", areal="ppo.gen.max_new_tokens", why="room for the answer"),
            Rule("double", key="agent.max_memory_tokens", why="room for the memory"),
        )
    return Cause(
        "reward-lowest",
        f"The reward is {rewards[-1]:g} in every one of the last {len(rewards)} steps",
        cause,
        evidence=(evidence_at(history.steps[-1], f"task_reward={rewards[-1]:g}, no_eos_ratio={truncated:.2f}"),),
        changes=propose(rules, context),
        advice=(
            "read an answer beside the expected one: clusterkit trace --full (the texts of all: "
            "rollouts/step_N.jsonl.zst in the run's folder)",
            "where the answer is right: the reward is wrong. Look at reward.name, and run the function on that answer",
            "where the answer has another form, such as no \\boxed{}: change the prompt or the chat template, or start "
            "from a model that was tuned to follow it",
            "where the answer is wrong: take easier or shorter documents, a stronger model, or a supervised start "
            "(docs/sft-and-rollouts.md)",
        ),
    )


def reward_flat(history: History, context: Context) -> Cause | None:
    """Find a reward that does not rise over many steps, though it could."""
    rewards = finite(history, "task_reward")
    if len(rewards) < FLAT_STEPS:
        return None
    third = len(rewards) // 3
    first, last = rewards[:third], rewards[-third:]
    if fmean(last) >= SOLVED or reward_lowest(history, context) is not None:
        return None  # the task is learned, or it is reported already
    error = math.sqrt((stdev(first) ** 2 + stdev(last) ** 2) / third)
    rise = fmean(last) - fmean(first)
    if rise > 2 * error:
        return None
    span = f"{rise - 2 * error:+.4f} … {rise + 2 * error:+.4f}"
    groups = _idle_groups(history, context)
    if groups is not None and groups > SOLVED:
        cause = (
            f"In {groups:.0%} of the groups all answers got the same reward: they teach nothing. "
            "Tasks are too hard or too easy."
        )
        rules: tuple[Rule, ...] = (
            Rule("double", key="rollout.group_size", areal="group_size", most=64, why="mixed groups"),
        )
    else:
        cause = (
            "Steps are too small, the advantage is mostly noise, or what the reward measures does not depend on "
            "the policy."
        )
        rules = (
            HIGHER_RATE,
            Rule("double", key="rollout.batch_size", areal="dataset.train_bs_n_seqs", why="less noise"),
        )
    return Cause(
        "reward-flat",
        f"The reward has not risen in {len(rewards)} steps",
        cause,
        evidence=(
            evidence_at(
                history.steps[-1],
                f"first third {fmean(first):.4f}, last third {fmean(last):.4f}, a rise of {rise:+.4f} (95 %: {span})",
            ),
        ),
        changes=propose(rules, context),
    )


def entropy_collapse(history: History, context: Context) -> Cause | None:
    """Find a policy that always answers the same before it has learned the task."""
    entropies, rewards = finite(history, "entropy"), finite(history, "task_reward")
    if len(entropies) < 3 * RECENT or len(rewards) < 3 * RECENT:
        return None
    first, last = fmean(entropies[:RECENT]), fmean(entropies[-RECENT:])
    if last > COLLAPSED_SHARE * first or fmean(rewards[-RECENT:]) >= SOLVED:
        return None
    if fmean(rewards[-RECENT:]) > fmean(rewards[-3 * RECENT : -2 * RECENT]) + STILL_RISING:
        return None  # it becomes certain because it becomes right
    rules = (
        Rule("to", key="algorithm.clip_high", areal="ppo.eps_clip", to=0.28, why="lets unlikely tokens grow"),
        LOWER_RATE,
        Rule("to", key="algorithm.kl_coef", areal="ppo.kl_ctl", to=0.001, why="holds it near to where it began"),
    )
    return Cause(
        "entropy-collapse",
        "The policy's entropy collapsed",
        "It has narrowed to few answers before the task was learned; samples of a group no longer differ, so "
        "nothing more is learned.",
        evidence=(
            evidence_at(
                history.steps[-1], f"entropy {first:.4g} → {last:.4g}, task_reward {fmean(rewards[-RECENT:]):.3f}"
            ),
        ),
        changes=propose(rules, context),
        advice=("begin anew from a checkpoint before it fell: model.path=CHECKPOINT trial_name=NEW",),
    )


def ratio_drift(history: History, context: Context) -> Cause | None:
    """Find a policy that is too far from the one that sampled."""
    clipped = finite(history, "actor_clip_ratio")[-RECENT:]
    ratios = finite(history, "importance_weight")[-RECENT:]
    low, high = RATIO_RANGE
    bad_ratio = bool(ratios) and not low <= fmean(ratios) <= high
    if not bad_ratio and not (clipped and fmean(clipped) > MOST_CLIPPED):
        return None
    shown = [
        f"importance_weight {fmean(ratios):.3g}" if ratios else "",
        f"actor_clip_ratio {fmean(clipped):.2f}" if clipped else "",
    ]
    return Cause(
        "ratio-drift",
        "Updates are far off the policy that sampled",
        "Too many optimizer steps per batch, too high a learning rate, or log-probs of another temperature or of "
        "old weights.",
        evidence=(evidence_at(history.steps[-1], ", ".join(text for text in shown if text)),),
        changes=propose((FEWER_STEPS, LOWER_RATE), context),
    )


def mismatch(history: History, context: Context) -> Cause | None:
    """Find log-probs of the engine that differ from the trainer's."""
    values = finite(history, "mismatch_kl")[-RECENT:]
    if not values or fmean(values) <= MOST_MISMATCH_KL:
        return None
    rules = (
        Rule(
            "to",
            key="algorithm.old_logprobs",
            areal="actor.recompute_logprob",
            to="recompute",
            why="corrects the ratio",
        ),
        Rule("to", key="algorithm.sequence_mask", to="geometric", why="leaves out turns that are far off"),
    )
    return Cause(
        "mismatch",
        "The engine's log-probs differ from the trainer's",
        "Precision or kernels differ, the engine serves old weights, or its prefix cache is older than the weights.",
        evidence=(
            evidence_at(history.steps[-1], f"mismatch_kl {fmean(values):.3g}, normal is below {MOST_MISMATCH_KL}"),
        ),
        changes=propose(rules, context),
    )


def failed_trajectories(history: History, context: Context) -> Cause | None:
    """Find many trajectories that end in an error."""
    failed = finite(history, "failed_trajectories")[-RECENT:]
    total = context.config.rollout.batch_size * context.config.rollout.group_size if context.config else 0
    if not failed or not total or fmean(failed) / total <= MOST_FAILED:
        return None
    return Cause(
        "failed-trajectories",
        f"{fmean(failed) / total:.0%} of the trajectories fail",
        "An engine or a verifier answers with errors; failed trajectories count as wrong.",
        evidence=(evidence_at(history.steps[-1], f"failed_trajectories {fmean(failed):.0f} of {total}"),),
        advice=("the reasons are in main.log: grep 'trajectory .* failed'",),
    )


def stale_recover(history: History, context: Context) -> Cause | None:
    """Find recover checkpoints that are not written while steps go on."""
    last_step = number(history.steps[-1], "time") if history.steps else None
    if last_step is None or len(history.steps) < 3:
        return None
    saved = number(history.recovers[-1], "time") if history.recovers else None
    since = saved if saved is not None else number(history.steps[0], "time") or last_step
    every = context.config.checkpoint.ckpt_freq_secs if context.config else 600.0
    age, step_time = last_step - since, history.step_time() or 0.0
    if age <= max(STALE_SECONDS, STALE_FACTOR * step_time) or (age <= STALE_FACTOR * every and every <= STALE_SECONDS):
        return None
    at = f"after step {history.recovers[-1].get('global_step', '?')}" if history.recovers else "never"
    rules: tuple[Rule, ...] = ()
    if every > STALE_SECONDS:
        cause = f"They are written every {duration(every)} only; that much is lost when it stops."
        rules = (
            Rule("to", key="checkpoint.ckpt_freq_secs", areal="exp_ctrl.ckpt_freq_secs", to=600.0, why="10 minutes"),
        )
    else:
        cause = "They were due and did not come: the disk of the recover folder is full or slow, or saving hangs."
    return Cause(
        "stale-recover",
        f"The last recover checkpoint is {duration(age)} older than the last step",
        cause,
        evidence=(evidence_at(history.steps[-1], f"last recover checkpoint: {at}"),),
        changes=propose(rules, context),
        advice=("df -h of the fileroot; main.log has the reason of a save that failed",),
    )


def restart_loop(history: History, context: Context) -> Cause | None:  # noqa: ARG001
    """Find attempts that die one after another before their first step ends."""
    attempts = history.attempts[-LOOPING_ATTEMPTS:]
    if len(attempts) < LOOPING_ATTEMPTS or len({number(attempt, "resume_step") for attempt in attempts}) > 1:
        return None
    began = number(attempts[0], "time") or 0.0
    if any((number(step, "time") or 0.0) > began for step in history.steps):
        return None
    return Cause(
        "restart-loop",
        f"{len(attempts)} attempts in a row made no step",
        "The same cause ends every attempt: starting it once more does not help before that is changed.",
        evidence=(Evidence(SOURCE, 0, f"resume_step {attempts[-1].get('resume_step')} in each of them"),),
        follows=True,
    )


CHECKS: tuple[Check, ...] = (
    nan_loss,
    reward_lowest,
    entropy_collapse,
    reward_flat,
    ratio_drift,
    mismatch,
    failed_trajectories,
    stale_recover,
    restart_loop,
)


def _not_finite(value: Any) -> bool:
    if isinstance(value, str):
        return value.lower() in ("nan", "inf", "-inf")
    return isinstance(value, float) and not math.isfinite(value)


def finite(history: History, name: str) -> list[float]:
    """Return the finite values of a number over the steps; `nan_loss` reports the others."""
    return [value for value in history.stat(name) if math.isfinite(value)]


def _values(stats: dict[str, Any], keys: list[str]) -> str:
    return ", ".join(f"{key}={stats[key]}" for key in keys)


def _idle_groups(history: History, context: Context) -> float | None:
    """Return the share of groups whose rewards are all equal, over the recent steps."""
    counts = finite(history, "zero_variance_groups")[-RECENT:]
    batch = context.config.rollout.batch_size if context.config else 0
    return fmean(counts) / batch if counts and batch else None


def evidence_at(step: dict[str, Any], text: str) -> Evidence:
    """Return what a step's numbers say as evidence."""
    return Evidence(SOURCE, 0, f"step {step.get('global_step', '?')}: {text}")
