r"""The strict training reward: is the content of the last \boxed{} the gold answer?

The rule is the one that MemAgent (Yu et al. 2025, arXiv 2507.02259) was trained with: only the tail of the response is
read, letters are lower-cased, LaTeX decoration and spaces are ignored, and nothing else is. "Beatles" is not
"The Beatles". Expect it to be well below the lenient metrics of `trainer.rewards.qa` on the same answers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

TAIL_CHARACTERS = 300
r"""How much of the end of a response is read: the \boxed must begin within it."""

_SPACED = "\\boxed "

# Applied in this order, after Hendrycks et al. 2021 (MATH): an earlier rule can expose text that a later one removes.
_STRIP_RULES = (
    ("\n", ""),
    ("\\!", ""),
    ("\\\\", "\\"),
    ("tfrac", "frac"),
    ("dfrac", "frac"),
    ("\\left", ""),
    ("\\right", ""),
    ("^{\\circ}", ""),
    ("^\\circ", ""),
    ("\\$", ""),
    ("\\%", ""),
    (" .", " 0."),
    ("{.", "{0."),
    (" ", ""),
)

_BRACE = re.compile(r"[{}]")


def boxed_reward(response: str, answers: Iterable[str]) -> float:
    r"""Score a response: 1.0 if its last box equals any gold answer under the strict rule, else 0.0.

    Reads the last 300 characters only. No box, an unbalanced one and an empty one all score 0.
    """
    content = last_boxed(response[-TAIL_CHARACTERS:].lower())
    if content is None:
        return 0.0
    predicted = strip_latex(content)
    if not predicted:
        return 0.0
    return float(any(predicted == strip_latex(answer.lower()) for answer in answers))


def last_boxed(text: str) -> str | None:
    r"""Content of the last box in `text`, or None.

    In this order: with "\boxed " (a space) anywhere, the text after the last such mark up to the next dollar sign;
    else the balanced braces after the last "\boxed"; else those after the last "\fbox". When the last command found
    has no balanced braces the answer is None: an earlier box is not taken in its place. Time is linear in the text's
    length.
    """
    if _SPACED in text:
        return text.rpartition(_SPACED)[2].partition("$")[0]
    command = "\\boxed" if "\\boxed" in text else "\\fbox"
    return braced(text, command)


def braced(text: str, command: str) -> str | None:
    """Text within the braces right after the last `command`; None without the command, the brace or its partner."""
    start = text.rfind(command)
    opening = start + len(command)
    if start < 0 or not text.startswith("{", opening):
        return None
    depth = 0
    for match in _BRACE.finditer(text, opening):
        depth += 1 if match.group() == "{" else -1
        if depth == 0:
            return text[opening + 1 : match.start()]
    return None


def strip_latex(text: str) -> str:
    r"""Remove what does not distinguish answers: line breaks, \!, \left, \right, degree signs, \$, \% and all spaces.

    Articles, punctuation and units stay.
    """
    for old, new in _STRIP_RULES:
        text = text.replace(old, new)
    return text
