r"""Lenient question-answering metrics, as published long-context tables report them.

Text is compared after SQuAD's normalisation (Rajpurkar et al. 2016): lower case, no punctuation, no articles, single
spaces. Every metric takes the best gold answer. A prediction that normalises to nothing ("", "the", "!") is wrong; some
published scripts count it as right, because the empty string is part of every string.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

from trainer.rewards.boxed import boxed_reward, braced, last_boxed

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLOSED_ANSWERS = frozenset({"yes", "no", "noanswer"})
_ANSWER_MARK = "the answer is"
_THINK_END = "</think>"


def qa_metrics(prediction_text: str, answers: Sequence[str]) -> dict[str, float]:
    r"""All metrics of one final response, each from 0 to 1.

    `prediction_text` is the whole response: `extract_answer` takes the answer from it. Keys: sub_em, sub_em_1way, em,
    f1 of the extracted answer; boxed_em, the strict training reward, of the response.
    """
    predicted = extract_answer(prediction_text)
    return {
        "sub_em": sub_em(predicted, answers),
        "sub_em_1way": sub_em_1way(predicted, answers),
        "em": em(predicted, answers),
        "f1": f1(predicted, answers),
        "boxed_em": boxed_reward(prediction_text, answers),
    }


def extract_answer(text: str) -> str:
    r"""Take the answer out of a response.

    Looks behind the last </think> only. Returns the content of the last \boxed{} or \fbox{}; without one, what follows
    the last "the answer is" (any case), less asterisks, a leading colon and a final full stop; without that, "".
    """
    text = text.rpartition(_THINK_END)[2]
    for content in (braced(text, "\\boxed"), last_boxed(text)):
        if content is not None:
            return content.strip()
    marks = list(re.finditer(_ANSWER_MARK, text, re.IGNORECASE))
    if not marks:
        return ""
    return text[marks[-1].end() :].replace("*", "").strip().removeprefix(":").strip().removesuffix(".").strip()


def normalize(text: str) -> str:
    """SQuAD's normalisation, in its order: lower-case, drop ASCII punctuation, drop a/an/the, collapse whitespace."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def em(predicted: str, answers: Sequence[str]) -> float:
    """Exact match after normalisation: 1.0 or 0.0."""
    return _best(predicted, answers, lambda p, g: float(p == g))


def sub_em(predicted: str, answers: Sequence[str]) -> float:
    """1.0 if the gold answer is part of the prediction *or the other way round*, character by character.

    This is how MemAgent's tables were made, so use it to compare with them. It is generous: "no" is right for the gold
    answer "North Korea". `sub_em_1way` is not.
    """
    return _best(predicted, answers, lambda p, g: float(g in p or p in g))


def sub_em_1way(predicted: str, answers: Sequence[str]) -> float:
    """1.0 if the prediction contains the gold answer as whole words, else 0.0.

    A fragment of the gold answer does not score, nor does a gold "no" in "north".
    """
    return _best(predicted, answers, lambda p, g: float(f" {g} " in f" {p} "))


def f1(predicted: str, answers: Sequence[str]) -> float:
    """Harmonic mean of the precision and recall of words (with their counts), 0 to 1.

    Where either side is yes, no or noanswer only equality scores: a shared word would otherwise earn part of the point.
    """
    return _best(predicted, answers, _f1)


def _f1(predicted: str, gold: str) -> float:
    if (predicted in _CLOSED_ANSWERS or gold in _CLOSED_ANSWERS) and predicted != gold:
        return 0.0
    predicted_words, gold_words = predicted.split(), gold.split()
    common = sum((Counter(predicted_words) & Counter(gold_words)).values())
    # 2PR/(P+R) with P = common/len(predicted) and R = common/len(gold).
    return 2 * common / (len(predicted_words) + len(gold_words))


def _best(predicted: str, answers: Sequence[str], score: Callable[[str, str], float]) -> float:
    prediction = normalize(predicted)
    golds = [gold for gold in map(normalize, answers) if gold]
    if not prediction or not golds:
        return 0.0
    return max(score(prediction, gold) for gold in golds)
