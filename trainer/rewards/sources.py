r"""r1 of Mem-alpha by data source: how an answer that was given from the memory is scored, 0 to 1.

| source | score |
|---|---|
| pubmed-rct, ttl_train, icl… (labels) | the last \boxed{} holds exactly the gold label |
| squad, hotpotqa, narrativeqa, bookqa | a gold answer is part of the answer |
| perltqa | share of the gold answers (`;` between them) that are part of it |
| booksum | share of the keywords (`,` between them) that are part of it |
| lme_train, longmemeval… | a judge says that it agrees (asked by the reward, not here) |
| infbench… (summaries) | ROUGE-L, F1 (Lin 2004) |
| eventqa | 1 where all gold answers are part of it |
| recsys | recall at 5: share of the gold titles among the first five |
| detectiveqa | equality |
| facts | equality (generated facts) |
| everything else (ruler …) | a gold answer is part of the answer, after SQuAD's normalisation |

Gold and answer are compared without case; published code lower-cases one of them only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from trainer.rewards.boxed import last_boxed
from trainer.rewards.qa import normalize

Scorer = Callable[[str, Sequence[str]], float]

_ITEM_MARK = re.compile(r"^\s*(?:[-*•]|\(?\d+[.):])?\s*(.*?)\s*$")
_TOKEN = re.compile(r"[a-z0-9]+")


def needs_judge(source: str) -> bool:
    """Whether a model has to say if an answer of this source is right."""
    name = source.lower()
    return name.startswith(("lme", "longmemeval"))


def scorer(source: str) -> Scorer:
    """The rule of a data source; its name's beginning decides, as sets come in sizes and parts."""
    name = source.lower()
    return next((rule for begin, rule in _RULES if name.startswith(begin)), substring)


def boxed_label(answer: str, golds: Sequence[str]) -> float:
    r"""1 where the content of the last \boxed{} is a gold label; an answer without a box is wrong."""
    content = last_boxed(answer)
    return float(content is not None and content.strip().lower() in {gold.strip().lower() for gold in golds})


def contains(answer: str, golds: Sequence[str]) -> float:
    """1 where any gold answer is part of the answer, letter by letter without case."""
    answer_words = answer.lower()
    return float(any(gold.strip().lower() in answer_words for gold in golds if gold.strip()))


def list_share(separator: str) -> Scorer:
    """Share of the gold items (all answers, cut at `separator`) that are part of the answer."""

    def share(answer: str, golds: Sequence[str]) -> float:
        items = [item.strip().lower() for gold in golds for item in gold.split(separator) if item.strip()]
        answer_words = answer.lower()
        return sum(item in answer_words for item in items) / len(items) if items else 0.0

    return share


def contains_all(answer: str, golds: Sequence[str]) -> float:
    """1 where every gold answer is part of the answer."""
    answer_words = answer.lower()
    items = [gold.strip().lower() for gold in golds if gold.strip()]
    return float(bool(items) and all(item in answer_words for item in items))


def recall_at_5(answer: str, golds: Sequence[str]) -> float:
    """Share of the gold titles among the first five items of the answer (lines, or one line with commas)."""
    lines = [line for line in answer.splitlines() if line.strip()]
    parts = lines if len(lines) > 1 else (lines[0].split(",") if lines else [])
    items = [normalize(_item(part)) for part in parts]
    first = [item for item in items if item][:5]
    gold_words = {normalize(gold) for gold in golds} - {""}
    return len(gold_words & set(first)) / len(gold_words) if gold_words else 0.0


def equal(answer: str, golds: Sequence[str]) -> float:
    """1 where the answer, or the content of its last box, is a gold answer after SQuAD's normalisation."""
    answer_words = normalize(last_boxed(answer) or answer)
    return float(bool(answer_words) and answer_words in {normalize(gold) for gold in golds})


def substring(answer: str, golds: Sequence[str]) -> float:
    """1 where a gold answer is part of the answer, both after SQuAD's normalisation."""
    answer_words = normalize(answer)
    return float(any(gold in answer_words for gold in map(normalize, golds) if gold))


def rouge_l(answer: str, golds: Sequence[str]) -> float:
    """F1 of the longest common subsequence of words, the best gold answer's (Lin 2004; words as letters and digits)."""
    answer_words = _TOKEN.findall(answer.lower())
    return max((_rouge_l(answer_words, _TOKEN.findall(gold.lower())) for gold in golds), default=0.0)


def _rouge_l(answer_words: list[str], gold: list[str]) -> float:
    common = lcs(answer_words, gold)
    return 2 * common / (len(answer_words) + len(gold)) if common else 0.0


def lcs(first: Sequence[str], second: Sequence[str]) -> int:
    """Length of the longest common subsequence, a machine word's worth of columns at a time (Hyyrö 2004)."""
    places: dict[str, int] = {}
    for position, word in enumerate(first):
        places[word] = places.get(word, 0) | 1 << position
    full = (1 << len(first)) - 1
    row = full
    for word in second:
        matches = row & places.get(word, 0)
        row = ((row + matches) | (row - matches)) & full
    return len(first) - row.bit_count()


def _item(line: str) -> str:
    match = _ITEM_MARK.match(line)
    return match.group(1) if match else line


_RULES: tuple[tuple[str, Scorer], ...] = (
    *((name, boxed_label) for name in ("pubmed", "ttl", "icl", "banking", "clinic", "nlu", "trec")),
    *((name, contains) for name in ("squad", "hotpotqa", "narrativeqa", "bookqa")),
    ("perltqa", list_share(";")),
    ("booksum", list_share(",")),
    *((name, rouge_l) for name in ("infbench", "infinitebench")),
    ("eventqa", contains_all),
    ("recsys", recall_at_5),
    ("detectiveqa", equal),
    ("facts", equal),
)
