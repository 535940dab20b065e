"""The section of a page on how a memory grew in the newest recorded trajectory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from clusterkit.observe.report.source import Run
from clusterkit.runs.trace.model import Trace, trace_of
from clusterkit.runs.trace.source import read_groups, recorded_steps
from clusterkit.runs.trace.view import cut, verdict
from clusterkit.ui.markup import Html, join, table, tag
from trainer.errors import UserError

MOST_TURNS = 40


def memory_of(runs: Sequence[Run]) -> Html | None:
    """Return a trajectory of each run's newest recorded step, turn by turn; None if no run has a structured memory."""
    parts = []
    for run in runs:
        trace = newest_trace(run)
        if trace is not None:
            parts.append(_trace(run.name, trace))
    return join(*parts) if parts else None


def newest_trace(run: Run) -> Trace | None:
    """Return the best trajectory of the first task of the newest recorded step, if it has a structured memory."""
    steps = recorded_steps(run.directory)
    if not steps:
        return None
    path = run.directory.logs / "rollouts" / f"step_{steps[-1]}.jsonl.zst"
    try:
        return _best_of(path, path.stat().st_mtime_ns, steps[-1])
    except (OSError, UserError):  # the file is being replaced, or damaged: the page works without it
        return None


@lru_cache(maxsize=8)
def _best_of(path: Path, changed: int, step: int) -> Trace | None:  # noqa: ARG001 (a new file is read anew)
    group = next(iter(read_groups(path).values()), [])
    if not group or not (group[0].get("details") or {}).get("memory"):
        return None
    return trace_of(step, group, max(range(len(group)), key=lambda i: float(group[i]["reward"])))


def _trace(name: str, trace: Trace) -> Html:
    rows: list[list[object]] = []
    for turn in trace.turns[:MOST_TURNS]:
        did = [
            tag("div", f"{'+' if c.ok else 'x'} {c.did}", f": {cut(c.content, False)}" if c.content else None)
            for c in turn.calls
        ]
        judged = [tag("div", verdict(c) or "\u00a0") for c in turn.calls]
        reward = "" if turn.reward is None else f"{turn.reward:.3f}"
        over = "" if turn.over is None else f"{turn.over:+.3f}"
        rows.append(
            [
                f"turn {turn.number}",
                cut(turn.chunk, False),
                join(*did),
                join(*judged),
                turn.memory_tokens,
                reward,
                over,
            ]
        )
    header: list[object] = [
        "", "read", "calls", "worth", "memory, tokens", "reward", "against the group",
    ]  # fmt: skip
    question_rows: list[list[object]] = [
        [
            cut(q.question, False),
            cut(q.answer, False),
            " | ".join(q.gold),
            "" if q.score is None else f"{q.score:.2f}",
        ]
        for q in trace.asked
    ]
    title = f"{name}, step {trace.step}, task {trace.task}, sample {trace.sample}: reward {trace.reward:.3f}"
    left_out = len(trace.turns) - MOST_TURNS
    return join(
        tag("p", tag("b", title)),
        table(header, rows),
        tag("p", f"{left_out} further turns: clusterkit trace --task {trace.task}") if left_out > 0 else None,
        table(["question", "answer from the memory", "gold", "score"], question_rows),
    )
