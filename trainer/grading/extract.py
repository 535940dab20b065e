r"""The final answer within a response: the last \boxed{}, or what the response itself announces as its answer.

Time is linear in the length of the response, whatever it holds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\S")
_THINK_END = "</think>"
_MARK = re.compile(r"(?:final answer|answer|答案)\s*(?:is|:|是|为)\s*:?\s*", re.IGNORECASE)
_HASHES = "####"
_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?%?")
READ_CHARACTERS = 1_000_000
"""How much of the end of a response is read at all."""
MARK_CHARACTERS = 2000
"""How far before the end of a response an announcement ("the answer is") is looked for."""


@dataclass(frozen=True, slots=True)
class Extraction:
    """text: the answer; empty without one. how: where it stood: boxed, announced, hashes, last number; or none."""

    text: str
    how: str


def final_answer(response: str, last_number: bool = False) -> Extraction:
    r"""Take the final answer out of a response; what stands before the last </think> does not count.

    In this order: the last \boxed{} or \fbox{} with balanced braces that is not empty; what follows the last "####";
    what follows the last "answer is" or "answer:" in its line. last_number: else the last number of the response, as
    AReaL v0.2 takes it.
    """
    text = response[-READ_CHARACTERS:].rpartition(_THINK_END)[2]
    if boxed := last_box(text):
        return Extraction(boxed, "boxed")
    if _HASHES in text and (after := _first_line(text.rpartition(_HASHES)[2])):
        return Extraction(after, "hashes")
    if after := _announced(text[-MARK_CHARACTERS:]):
        return Extraction(after, "announced")
    if last_number and (numbers := _NUMBER.findall(text)):
        return Extraction(numbers[-1], "last number")
    return Extraction("", "none")


def last_box(text: str) -> str:
    r"""Content of the last \boxed{…} or \fbox{…} whose braces balance and which is not empty; "" without one.

    Braces after a backslash do not count. `\boxed 5` and `\boxed5`, which TeX allows, give one word.
    """
    end = len(text)
    for command in reversed([(match.start(), match.end()) for match in _BOX.finditer(text)]):
        start, after = command
        content = _braced(text, after - 1, end) if text[after - 1] == "{" else _word(text[after - 1 : after + 80])
        if content:
            return content
        end = start
    return ""


def _braced(text: str, opening: int, end: int) -> str:
    r"""Text within the brace at `opening`; an unbalanced one is read no further than the box that was tried before."""
    depth = 0
    for match in _BRACES.finditer(text, opening, end):
        symbol = match.group()
        if symbol == "{":
            depth += 1
        elif symbol == "}":
            depth -= 1
            if depth == 0:
                return text[opening + 1 : match.start()].strip()
    return ""


def _word(text: str) -> str:
    found = re.match(r"[^\s$.,;{}]+(?:\.\d+)?", text)
    return found.group() if found else ""


def _announced(text: str) -> str:
    found = ""
    for match in _MARK.finditer(text):
        found = _first_line(text[match.end() :]) or found
    return found


def _first_line(text: str) -> str:
    """The first line without emphasis, TeX's math signs around it and a final full stop."""
    line = text.strip().partition("\n")[0].replace("*", "").strip()
    # A sentence ends the answer, a decimal point does not.
    line = re.split(r"[.!](?:\s|$)", line, maxsplit=1)[0].strip()
    for opening, closing in (("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        if line.startswith(opening) and closing in line[len(opening) :]:
            line = line[len(opening) :].partition(closing)[0]
    return line.strip(" :")
