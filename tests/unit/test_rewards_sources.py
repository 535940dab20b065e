"""r1 by data source against cases worked out by hand."""

from __future__ import annotations

import pytest

from trainer.rewards.sources import lcs, needs_judge, scorer

CASES = [
    ("pubmed-rct", r"The label is \boxed{3}", ["3"], 1.0),
    ("pubmed-rct", r"\boxed{13}", ["3"], 0.0),
    ("pubmed-rct", "3", ["3"], 0.0),
    ("ttl_train", r"first \boxed{1}, no: \boxed{2}", ["2"], 1.0),
    ("icl_banking77_5900shot_balance", r"\boxed{41}", ["41"], 1.0),
    ("squad", "It is in PARIS, France.", ["paris"], 1.0),
    ("squad", "It is in Paris.", ["Lyon", "Paris"], 1.0),
    ("hotpotqa", "I do not know", ["Paris"], 0.0),
    ("perltqa", "She plays tennis and chess.", ["Tennis; Golf; CHESS; rowing"], 0.5),
    ("perltqa", "tennis", ["tennis", "golf;chess"], 1 / 3),
    ("booksum", "Ishmael sails with Ahab", ["Ahab, Ishmael, Queequeg, whale"], 0.5),
    ("infbench_sum_eng_shots2", "the cat sat on a mat", ["the cat lay on the mat"], 2 * 4 / 12),
    ("infbench_sum_eng_shots2", "", ["the cat"], 0.0),
    ("eventqa_full", "First A died, then B was born.", ["A died", "b was born"], 1.0),
    ("eventqa_full", "First A died.", ["A died", "B was born"], 0.0),
    ("recsys_redial_full", "1. Heat\n2. Alien\n3. Up\n4. Jaws\n5. Big\n6. Rocky", ["Alien", "Rocky"], 0.5),
    ("recsys_redial_full", "Heat, Alien, Up", ["alien", "up"], 1.0),
    ("detectiveqa", "B.", ["B"], 1.0),
    ("detectiveqa", "B or C", ["B"], 0.0),
    ("ruler_qa1_197K", "the answer: Old  Trafford!", ["old trafford"], 1.0),
    ("something_new", "unknown", ["old trafford"], 0.0),
    ("facts", "lamp", ["lamp"], 1.0),
    ("facts", "lamp chair", ["lamp"], 0.0),
]


@pytest.mark.parametrize(("source", "answer", "golds", "score"), CASES)
def test_score_of_an_answer(source: str, answer: str, golds: list[str], score: float) -> None:
    assert scorer(source)(answer, golds) == pytest.approx(score)


def test_only_conversations_are_judged_by_a_model() -> None:
    assert needs_judge("lme_train")
    assert needs_judge("longmemeval_s*")
    assert not needs_judge("squad")


def test_longest_common_subsequence_against_the_textbook_table() -> None:
    def slow(a: list[str], b: list[str]) -> int:
        row = [0] * (len(b) + 1)
        for x in a:
            before = row[:]
            for j, y in enumerate(b):
                row[j + 1] = before[j] + 1 if x == y else max(before[j + 1], row[j])
        return row[-1]

    texts = ["", "a", "abcbdab", "bdcaba", "aaaa", "zxy" * 30, "xyz" * 25]
    for first in texts:
        for second in texts:
            assert lcs(list(first), list(second)) == slow(list(first), list(second))
