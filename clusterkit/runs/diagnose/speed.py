"""Checks of what makes a run slower than necessary: a judge that is waited for, sections that are read again.

Each takes the history and returns a finding or None. None explains why a run ended. The thresholds are in
docs/diagnose.md.
"""

from __future__ import annotations

from statistics import fmean

from clusterkit.runs.diagnose.changes import Context, propose
from clusterkit.runs.diagnose.checks import RECENT, evidence_at, finite
from clusterkit.runs.diagnose.model import Cause, Rule
from clusterkit.runs.log.metrics import History
from trainer.config_agents import MemagentConfig

MOST_JUDGE_SHARE = 0.1
FORGOTTEN_SHARE = 0.2
"""Of the prompt tokens: computed again although an earlier prompt began with them."""
LITTLE_SHARED = 0.5
"""Of the prompt tokens: with the section before the memory three quarters and more are equal."""
REPEATED_SHARE = 0.05
"""Of the tokens that training computes: prefixes that were computed before."""
ROUND_TOKENS, MOST_LARGER = 1024, 4
"""A size of a micro-batch that is proposed is a multiple of the first, and so many times the present one at most."""
AHEAD = {
    2: "one batch is scored while the next is sampled and the last is learned from",
    4: "with more under way sampling keeps ahead: of a batch that comes late the scores are waited for, too",
}
"""Values of rollout.max_staleness that let a judge work beside sampling and training, and why."""


def check_speed(history: History, context: Context) -> list[Cause]:
    """Return the findings of all checks."""
    findings = (check(history, context) for check in (judge_wait, read_again, computed_again))
    return [finding for finding in findings if finding is not None]


def judge_wait(history: History, context: Context) -> Cause | None:
    """Find a trainer that waits for nothing but the judge."""
    shares = finite(history, "judge_share")[-RECENT:]
    if len(shares) < RECENT or fmean(shares) <= MOST_JUDGE_SHARE:
        return None
    rules = [Rule("double", key="judge.concurrency", most=512, why="servers answer many requests at a time")]
    if context.config is not None:
        now = context.config.rollout.max_staleness
        more = [Rule("to", key="rollout.max_staleness", to=to, why=why) for to, why in AHEAD.items() if to > now]
        rules = more[:1] + rules
    return Cause(
        "judge-wait",
        f"The trainer waits for the judge, and for nothing else, in {fmean(shares):.0%} of its time",
        "The judge answers more slowly than the policy is sampled and trained, or nothing goes on beside its answers.",
        evidence=(evidence_at(history.steps[-1], f"judge_share {fmean(shares):.3f} over {len(shares)} steps"),),
        changes=propose(tuple(rules), context),
        advice=("another judge server, of which there may be any number: clusterkit serve judge",),
    )


def read_again(history: History, context: Context) -> Cause | None:
    """Find prompt tokens of a group that are computed again although other prompts begin with them."""
    cached, possible = (finite(history, name)[-RECENT:] for name in ("cached_share", "shareable_share"))
    if len(cached) < RECENT or len(possible) < RECENT or context.config is None:
        return None
    share, most, rollout = fmean(cached), fmean(possible), context.config.rollout
    if context.config.engine == "embedded" and rollout.share_prefixes:
        return None  # what it reads again takes less than another pass would
    advice: tuple[str, ...] = ()
    if most - share > FORGOTTEN_SHARE:
        title = f"{most - share:.0%} of the prompt tokens are read again that an earlier prompt began with"
        cause = (
            "Prompts of a group are sent together and all miss the cache, or it is too small to keep what they share."
        )
        rules = [Rule("to", key="rollout.share_prefixes", to=True, why="the first prompt is read before the others")]
        if rollout.share_prefixes:
            rules = [Rule("more", key="rollout.gpu_memory_fraction", by=0.05, most=0.9, why="room in the cache")]
            advice = ("prompts of a group under way at a time need room together: servers.count, rollout.max_running",)
    elif (
        most < LITTLE_SHARED
        and isinstance(agent := context.config.agent, MemagentConfig)
        and not agent.shares_sections
        and rollout.group_size > 1
    ):
        title = f"Only {most:.0%} of the prompt tokens can be shared: the memory stands before the section"
        cause = (
            "All trajectories of a group read the same section, but behind memories that differ. With the section "
            "first it is read once for all of them. Another order of the prompt is another policy, so of a new run; a "
            "small one remembered less far beyond its trained length (docs/prefix-sharing.md), so compare both."
        )
        if not agent.repeat_problem:
            advice = ("agent.repeat_problem=true with it: the small one lost half as much then",)
        rules = [Rule("to", key="agent.prompt_order", to="section_first", why="a group shares its sections")]
        if agent.wording:
            advice, rules = ("{section} before {memory} in agent.template_file, for a new run",), []
    else:
        return None
    return Cause(
        "read-again",
        title,
        cause,
        evidence=(evidence_at(history.steps[-1], f"cached_share {share:.3f}, shareable_share {most:.3f}"),),
        changes=propose(tuple(rules), context),
        advice=advice,
    )


def computed_again(history: History, context: Context) -> Cause | None:
    """Find beginnings of rows that are computed more than once, since a micro-batch has no room for a whole group."""
    again, groups = (finite(history, name)[-RECENT:] for name in ("train_repeated", "train_group_tokens"))
    if len(again) < RECENT or not groups or context.config is None:
        return None
    share, largest, room = fmean(again), max(groups), context.config.train.max_tokens_per_mb
    if share < REPEATED_SHARE or largest <= room:
        return None
    to = -(-min(int(largest), MOST_LARGER * room) // ROUND_TOKENS) * ROUND_TOKENS
    numbers = f"train_repeated {again[-1]:.3f}, train_group_tokens {groups[-1]:.0f}, train.max_tokens_per_mb {room}"
    return Cause(
        "computed-again",
        f"{share:.0%} of the tokens that training computes were computed before",
        "Rows begin alike (those of a group with the same section) and have no room together in one micro-batch: each "
        "micro-batch computes their beginning again.",
        evidence=(evidence_at(history.steps[-1], numbers),),
        advice=(f"train.max_tokens_per_mb up to {to}, as far as the memory has room (docs/prefix-sharing.md)",),
    )
