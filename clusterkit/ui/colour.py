"""Colour on a terminal, the one place that decides on it: NO_COLOR, FORCE_COLOR, TERM=dumb, no terminal."""

from __future__ import annotations

import os
import re
from typing import TextIO

_STYLES = {"bad": "31", "good": "32", "care": "33", "plot": "36", "error": "1;31"}
_WORDS = {
    "good": "ok|running|ready|finished|complete|completed|succeeded|alive",
    "care": "warn|stalled|silent|interrupted|pending|starting|waiting|stopped",
    "bad": "FAIL|failed|killed|unreachable|gone",
}
_RULES = [
    ("error", re.compile(r"^error:", re.MULTILINE)),
    ("care", re.compile(r"^warning:|^warning(?=  )", re.MULTILINE)),
    ("plot", re.compile(r"^note:|[▁▂▃▄▅▆▇█]{2,}", re.MULTILINE)),
    # A verdict stands in a column of its own: two blanks before it, and the end of the cell behind it.
    *((style, re.compile(rf"(?<=  )(?:{words})(?=  |$|:| \()", re.MULTILINE)) for style, words in _WORDS.items()),
]


def has_colour(stream: TextIO) -> bool:
    """Whether what is written to a stream is coloured."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR", "0") not in ("", "0"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def coloured(text: str) -> str:
    """Colour what a user looks for in a text: its error or warning, verdicts in tables, sparklines."""
    for style, rule in _RULES:
        text = rule.sub(lambda found, code=_STYLES[style]: f"\x1b[{code}m{found[0]}\x1b[0m", text)  # type: ignore[misc]
    return text


def for_stream(text: str, stream: TextIO) -> str:
    """Colour a text where the stream takes it."""
    return coloured(text) if has_colour(stream) else text
