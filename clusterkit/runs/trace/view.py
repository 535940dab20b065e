"""A trace as text for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from clusterkit.runs.trace.evidence import GoldSentence
from clusterkit.runs.trace.model import AnsweredQuestion, Call, Trace, TurnView

EXCERPT = 160
BAR = 24


def lines_of(trace: Trace, full: bool = False) -> list[str]:
    """Return the trace, a few lines per turn; with `full`, texts are not cut."""
    rewards = ", ".join(f"{value:.2f}" for value in trace.others)
    lines = [
        f"step {trace.step}, task {cut(trace.task, True)}, sample {trace.sample} of {len(trace.others)}",
        f"reward {trace.reward:.3f} (the group's: {rewards})",
    ]
    parts = [f"{name} {trace.metrics[name]:.3f}" for name in ("r1", "r2", "r3", "r4") if name in trace.metrics]
    if parts:
        lines.append("  ".join(parts))
    if trace.error:
        lines.append(f"failed: {trace.error}")
    if trace.gold:
        lines += ["", "gold sentences", *gold_lines(trace.gold, full)]
    largest = max((turn.memory_tokens for turn in trace.turns), default=1) or 1
    for turn in trace.turns:
        lines += ["", *_turn(turn, largest, full)]
    if trace.memory:
        lines += ["", "memory at the end", *_memory(trace, full)]
    lines += ["", "questions"]
    lines += [_question(one, full) for one in trace.asked]
    return lines


def reward_text(turn: TurnView) -> str:
    """Return the reward of a turn, and its difference from the mean of the group's turns."""
    if turn.reward is None:
        return ""
    over = "" if turn.over is None else f", {turn.over:+.3f} against the group's turns"
    parts = [f"{name} {value:.2f}" for name, value in (("r2", turn.r2), ("r4", turn.r4)) if value is not None]
    return f"reward {turn.reward:.3f}{over}" + (f" ({', '.join(parts)})" if parts else "")


def verdict(call: Call) -> str:
    """Return the judge's verdict on a call, and how many answers it wrote."""
    found = []
    if call.valid is not None and call.ok:
        found.append("valid" if call.valid else "not worth keeping")
    if call.answers:
        found.append(f"holds the answer to {len(call.answers)} question{'s' * (len(call.answers) > 1)}")
    return "; ".join(found)


def gold_lines(gold: Sequence[GoldSentence], full: bool) -> list[str]:
    """Return the gold sentences with their numbers, and with the sections where they stand if that is known."""
    lines = []
    for number, one in enumerate(gold, start=1):
        where = " and ".join(f"{place.section}" for place in one.places)
        section = f"section{'s' * (len(one.places) > 1)} {where}: " if where else ""
        title = f"{cut(one.title, full)}: " if one.title else ""
        lines.append(f"  [{number}] {section}{title}{cut(one.sentence, full)}")
    return lines


def cut(text: str, full: bool) -> str:
    """Return a text on one line, without control characters, cut unless `full`."""
    flat = "".join(letter for letter in " ".join(text.split()) if letter.isprintable())
    return flat if full or len(flat) <= EXCERPT else f"{flat[: EXCERPT - 1]}…"


def _turn(turn: TurnView, largest: int, full: bool) -> list[str]:
    filled = round(BAR * turn.memory_tokens / largest)
    bar = "█" * filled + "░" * (BAR - filled)
    earned = reward_text(turn)
    shown = "  less of the memory was shown" * turn.shrunk
    lines = [f"turn {turn.number:<3} {bar} {turn.memory_tokens} tokens  {earned}{shown}".rstrip()]
    if turn.chunk:
        lines.append(f"  read   {cut(turn.chunk, full)}")
    for call in turn.calls:
        sign = "+" if call.ok else "x"
        judged = verdict(call)
        text = f" {cut(call.content, full)!r}" if call.content else ""
        lines.append(f"  {sign} {call.tool or 'call'}: {call.did}{text}{f'  [{judged}]' if judged else ''}")
    if not turn.calls:
        lines.append(f"  {'wrote' if not turn.chunk else 'no call:'}  {cut(turn.response, full) or '(nothing)'}")
    if turn.held and str(turn.held):
        lines.append(f"  has    {turn.held}")
    return lines


def _memory(trace: Trace, full: bool) -> list[str]:
    lines = [f"  core: {cut(str(trace.memory.get('core') or '(empty)'), full)}"]
    for store in ("semantic", "episodic"):
        entries = trace.memory.get(store) or {}
        lines.append(f"  {store}: {len(entries)} entries")
        lines += [f"    {name}  {cut(str(text), full)}" for name, text in entries.items()]
    return lines


def _question(one: AnsweredQuestion, full: bool) -> str:
    score = "not scored" if one.score is None else f"{one.score:.2f}"
    gold = " | ".join(one.gold)
    return (
        f"  {score:>10}  {cut(one.question, full)} -> {cut(one.answer, full) or '(nothing)'}  (gold: {cut(gold, full)})"
    )
