r"""Whether a mathematical answer equals the true one: math-verify's comparison, with what it is too generous about.

math-verify (Hugging Face, Apache-2.0) parses LaTeX into SymPy and compares values, sets, intervals, matrices and
equations. It takes 50 % for 50 and for 0.5, words for products of their letters, and numbers of another base for equal;
those are decided here, before it is asked.

A comparison may run for ever or take all memory, so `trainer.grading.pool` runs this module as a process: it reads
`{"truths", "answer", "lenient"}` a line and writes `{"right", "reason"}` a line. The kernel ends it when one comparison
takes more CPU time than the deadline, even inside a C function, and bounds its memory.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
from collections.abc import Sequence
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, verify
from math_verify import parse as parse_text
from sympy import Expr, Rational

from trainer.grading import Verdict

MAX_CHARACTERS = 1000
"""A longer answer is no final answer: it is not parsed."""
MAX_DEPTH = 40
"""An answer with more braces within one another is not parsed."""

_WRAPPER = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|emph)\s*\{([^{}]*)\}")
_PERCENT = re.compile(r"\\?%|\bper\s?cent\b", re.IGNORECASE)
_BASE = re.compile(r"_\{?\s*(\d+)\s*\}?$")
_CLOCK = re.compile(r"\d{1,2}:\d{2}")
_CHOICE = re.compile(r"\(?\s*([A-J])\s*\)?")
_CHOSEN = re.compile(r"\(?\s*([A-J])\s*(?:$|\)|\.(?:\s|$)|:\s)")
_AMOUNT = re.compile(r"(-?(?:\\?\$)?\d[\d,]*(?:\.\d+)?)\s+(?!per\s?cent\b)[A-Za-z][A-Za-z .]*", re.IGNORECASE)
"""A number with words behind it, such as 18 dollars."""
_VOWEL = re.compile(r"[aeiouy]", re.IGNORECASE)
_FUNCTIONS = frozenset("sin cos tan cot sec csc log exp sqrt frac infty alpha beta gamma theta pi mod max min".split())


def judge(truths: Sequence[str], answer: str, percent_lenient: bool = False) -> Verdict:
    """Compare an extracted answer with the true ones; right if it equals any of them.

    percent_lenient: also right when it is a hundred times or a hundredth of the truth, as AReaL v0.2 counts it.
    """
    if not answer.strip():
        return Verdict(False, "no answer")
    verdict = Verdict(False, "there is no true answer to compare with")
    for truth in truths:
        verdict = _judge_one(truth, answer, percent_lenient)
        if verdict.right:
            break
    return verdict


def _judge_one(truth: str, answer: str, percent_lenient: bool) -> Verdict:
    truth, answer = tidy(truth), tidy(answer)
    if not answer:
        return Verdict(False, "no answer")
    if _bare(truth) == _bare(answer):
        return Verdict(True, "same text")
    if len(answer) > MAX_CHARACTERS:
        return Verdict(False, f"not parsed: {len(answer)} characters are no final answer")
    if _depth(answer) > MAX_DEPTH:
        return Verdict(False, "not parsed: nested too deeply")
    return _by_kind(truth, answer) or _compare(truth, answer, percent_lenient)


def _by_kind(truth: str, answer: str) -> Verdict | None:
    """Decide what is no matter of mathematics; None where it is."""
    if choice := _CHOICE.fullmatch(_unwrapped(truth)):
        chosen = _CHOSEN.match(_unwrapped(answer))
        return _letters(choice.group(1), chosen.group(1) if chosen else "")
    if (words := _words(truth)) is not None:
        same = words == _word_list(_unwrapped(answer))
        return Verdict(same, "same words" if same else "other words")
    truth_base, base = _BASE.search(truth), _BASE.search(answer)
    if truth_base and base and truth_base.group(1) != base.group(1):
        return Verdict(False, f"a number of base {base.group(1)}, not {truth_base.group(1)}")
    if _CLOCK.fullmatch(truth):
        return Verdict(False, "another time or ratio")
    if {_brackets(truth), _brackets(answer)} == {"set", "ordered"}:
        return Verdict(False, "a set is neither a tuple nor an interval")
    return None


def _letters(truth: str, chosen: str) -> Verdict:
    return Verdict(truth == chosen, "same choice" if truth == chosen else "another choice")


def _compare(truth: str, answer: str, percent_lenient: bool) -> Verdict:
    if not re.search(r"[A-Za-z]", _unwrapped(truth)) and (amount := _AMOUNT.fullmatch(answer)):
        answer = amount.group(1)
    truth_percent, percent = bool(_PERCENT.search(truth)), bool(_PERCENT.search(answer))
    left, right = parse(_PERCENT.sub("", truth)), parse(_PERCENT.sub("", answer))
    if not left:
        return Verdict(False, f"the true answer cannot be read as mathematics: {truth[:80]}")
    if not right:
        return Verdict(False, "cannot be read as mathematics")
    if equal(left, right):
        return Verdict(True, "equal")
    if truth_percent != percent:
        # 50 % is 0.5 as well as "50, in per cent"; without a sign a number is only itself.
        part, whole = (left, right) if truth_percent else (right, left)
        if _equal_times(whole, part, "1/100"):
            return Verdict(True, "equal, one of them in per cent")
    if percent_lenient and (_equal_times(left, right, "100") or _equal_times(left, right, "1/100")):
        return Verdict(True, "equal but for a factor of 100 (--percent-lenient)")
    return Verdict(False, f"not equal: {_shown(right)} is not {_shown(left)}")


def parse(text: str) -> list[Any]:
    """What math-verify reads in a text: SymPy object and text; empty when it can read nothing."""
    configs = (LatexExtractionConfig(boxed_match_priority=-1), ExprExtractionConfig())
    # The deadline is the pool's: math-verify's own works in main threads only and cannot end a C function.
    found: list[Any] = parse_text(f"${text}$", extraction_config=configs, parsing_timeout=None)
    return found


def equal(left: list[Any], right: list[Any]) -> bool:
    """math-verify's comparison of two parsed texts, in its strict form."""
    return bool(verify(left, right, timeout_seconds=None, strict=True, allow_set_relation_comp=True))


def _equal_times(left: list[Any], right: list[Any], factor: str) -> bool:
    """Whether left is `factor` times right, where both are numbers."""
    one, other = left[0], right[0]
    if not (isinstance(one, Expr) and isinstance(other, Expr) and one.is_number and other.is_number):
        return False
    return equal([one, str(one)], [product := Rational(factor) * other, str(product)])


def tidy(text: str) -> str:
    r"""A text without what never distinguishes answers: outer $ and \( \), sizes, thin spaces, a final full stop."""
    text = text.strip().replace("\\!", "").replace("\u2212", "-").replace("\u2013", "-")
    for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening) + len(closing):
            text = text[len(opening) : -len(closing)].strip()
    text = re.sub(r"\\(?:left|right|bigg?|Bigg?)(?![A-Za-z])", "", text)
    text = re.sub(r"(?<=\d)(?:\\,|\{,\}|\\ |~)(?=\d{3}(?!\d))", "", text)
    text = re.sub(r"\\[,;:>]|\\quad|~", " ", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text).replace("\\varnothing", "\\emptyset")
    text = re.sub(r"^\\(?:boxed|fbox)\s*\{(.*)\}$", r"\1", text, flags=re.DOTALL)
    return text.strip().removesuffix(".").strip()


def _bare(text: str) -> str:
    """A text to compare as it stands: without spaces, wrappers of words and braces around single digits."""
    return re.sub(r"\s+", "", re.sub(r"\{(\w)\}", r"\1", _unwrapped(text)))


def _unwrapped(text: str) -> str:
    return _WRAPPER.sub(r"\1", text).strip()


def _words(truth: str) -> list[str] | None:
    """The words of a truth that is made of words, such as a name; None where it is mathematics."""
    bare = _unwrapped(truth)
    if not re.fullmatch(r"[A-Za-z][A-Za-z'.,\s-]*", bare):
        return None
    runs = re.findall(r"[A-Za-z]+", bare)
    wrapped = bool(_WRAPPER.fullmatch(truth.strip()))
    longest = max(runs, key=len)
    is_text = (wrapped and len(longest) > 1) or (len(longest) >= 4 and bool(_VOWEL.search(longest)))
    return _word_list(bare) if is_text and longest.lower() not in _FUNCTIONS else None


def _word_list(text: str) -> list[str]:
    words = re.findall(r"[A-Za-z0-9]+", text.lower())
    return [word for word in words if word not in ("a", "an", "the")]


def _brackets(text: str) -> str:
    if text.startswith("\\{") and text.endswith("\\}") and text.count("\\{") == 1:
        return "set"
    return "ordered" if text.startswith(("(", "[")) and text.endswith((")", "]")) else ""


def _depth(text: str) -> int:
    depth = deepest = 0
    for symbol in text:
        depth += (symbol in "{([") - (symbol in "})]")
        deepest = max(deepest, depth)
    return deepest


def _shown(parsed: list[Any], limit: int = 60) -> str:
    text = str(parsed[-1])
    return text if len(text) <= limit else text[: limit - 1] + "…"


def serve(deadline: float, memory_bytes: int) -> None:
    """Compare answers until standard input ends.

    deadline: CPU seconds of one comparison. memory_bytes: most memory of this process.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # what libraries print must not be taken for an answer
    judge(["\\frac{1}{2}"], "0.25")  # imports and grammars take their time before the first deadline
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, resource.getrlimit(resource.RLIMIT_AS)[1]))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # Ctrl-C is for the evaluation, whose end closes our input
    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin:
        item = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, deadline)
        try:
            verdict = judge(item["truths"], item["answer"], item["lenient"])
            right, reason = verdict.right, verdict.reason
        except MemoryError:
            right, reason = False, f"gave up: comparing takes more than {memory_bytes >> 20} MiB of memory"
        except RecursionError:
            right, reason = False, "gave up: nested too deeply"
        except Exception as error:  # whatever a parser makes of a model's text
            right, reason = False, f"cannot be compared: {type(error).__name__}: {str(error)[:120]}"
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(json.dumps({"right": right, "reason": reason}) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve(float(sys.argv[1]), int(sys.argv[2]))
