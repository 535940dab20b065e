"""Grading: answers per second against math-verify alone in one process, and the time of the worst answers.

    .venv/bin/python benchmarks/grading.py

The peer is math-verify's own parse and verify, called in a loop in this process without a deadline: what safety costs.
The answers are the hand-checked ones of the tests. Prints JSON; nothing is downloaded, nothing is written.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from pathlib import Path

from trainer.grading.extract import final_answer
from trainer.grading.mathematics import equal, parse
from trainer.grading.pool import GradingPool

TRIPLES = Path(__file__).parents[1] / "tests" / "cases" / "eval" / "grading_triples.jsonl"
WORST = {
    "a tower of powers": "10^{10^{10}}",
    "a factorial": "100000000!",
    "braces within one another": "{" * 20_000 + "5" + "}" * 20_000,
    "an open fraction": "\\frac{" * 500,
    "a sum of 400 fractions": "+".join(f"\\frac{{1}}{{{n}}}" for n in range(1, 400)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=max((os.cpu_count() or 2) // 2, 1))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--deadline", type=float, default=5.0, help="CPU seconds of one comparison")
    arguments = parser.parse_args()
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    pairs = [(row["truth"], row["answer"]) for row in map(json.loads, TRIPLES.read_text(encoding="utf-8").splitlines())]
    pairs = [pair for pair in pairs if pair[1].strip()] * arguments.repeats
    alone = alone_seconds(pairs)
    with GradingPool(arguments.workers, arguments.deadline) as pool:
        pool.submit(["1"], "2").result()  # the worker's imports are not the answers' time
        began = time.perf_counter()
        for verdict in [pool.submit([truth], answer) for truth, answer in pairs]:
            verdict.result()
        ours = time.perf_counter() - began
        worst = {}
        for name, answer in WORST.items():
            began = time.perf_counter()
            verdict = pool.submit(["7"], answer).result()
            worst[name] = {"seconds": round(time.perf_counter() - began, 2), "verdict": verdict.reason}
    text = "\\boxed{" + "{" * 10_000_000
    began = time.perf_counter()
    final_answer(text)
    extraction = time.perf_counter() - began
    print(
        json.dumps(
            {
                "answers": len(pairs),
                "workers": arguments.workers,
                "answers_per_s": round(len(pairs) / ours, 1),
                "math_verify_alone_answers_per_s": round(len(pairs) / alone, 1),
                "ratio_to_math_verify_alone": round(alone / ours, 2),
                "worst_cases": worst,
                "extraction_of_10_MB_of_braces_s": round(extraction, 3),
            },
            indent=2,
        )
    )


def alone_seconds(pairs: list[tuple[str, str]]) -> float:
    """math-verify on the same pairs in this process."""
    parse("1")
    began = time.perf_counter()
    for truth, answer in pairs:
        try:
            equal(parse(truth), parse(answer))
        except Exception:
            continue
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
