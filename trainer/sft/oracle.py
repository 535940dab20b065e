"""Memories that an agent should have written: the sentences that answer a problem, as far as they were read.

An oracle memory holds, for every piece of evidence, what of its sentence stands in the sections until then, verbatim
and behind its title; `NOTHING` where there is none yet. So all that it says was in the section or the memory before.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainer.tasks.examples import NOTHING


def oracle_memories(text: str, ends: Sequence[int], evidence: Sequence[tuple[str, str]]) -> list[str]:
    """One memory after each section.

    Args:
        text: the document.
        ends: where each section ends in it, in characters.
        evidence: (title, sentence) in any order; those that are not in the text are never known.
    """
    places = sorted(place for title, sentence in evidence if (place := _place(text, title, sentence)))
    memories = []
    for end in ends:
        lines = []
        for start, stop, title in places:
            if start >= end:
                continue
            part = text[start : min(stop, end)].strip()
            began = max((other for other in ends if other <= start), default=0)
            # A title that an earlier section ended with is known no more: nothing told that it would matter.
            title_at = text.rfind(title, 0, start)
            lines.append(f"{title}: {part}" if title_at >= began else part)
        memories.append("\n".join(lines) or NOTHING)
    return memories


def whole_memory(evidence: Sequence[tuple[str, str]]) -> str:
    """The memory after everything was read."""
    return "\n".join(f"{title}: {sentence}" for title, sentence in evidence) or NOTHING


def _place(text: str, title: str, sentence: str) -> tuple[int, int, str] | None:
    """Where the sentence stands below its title: start, end and the title."""
    start = text.find(sentence)
    while start >= 0 and text.rfind(title, 0, start) < 0:
        start = text.find(sentence, start + 1)
    return (start, start + len(sentence), title) if start >= 0 else None
