"""How long the servers of a judge take for what one training step asks them: alone, several, few and many at a time.

    python benchmarks/judge_server.py URL [URL …] [--concurrency 18 128 512] [--trajectories 64] [--rounds 4]

URLs are servers of one model (`clusterkit serve judge`, or your own). Asked is what memalpha_judge.py asks in a step: 4
questions, answered in up to 64 tokens from a memory of 9 entries, and 9 verdicts a trajectory, all at the same moment.
Prints, a JSON object a line, for the first server alone and for all of them, and each --concurrency: seconds of every
round, and `ratio`, the median of the first line (one server, the smallest concurrency; 18 is what the port of Mem-alpha
to AReaL asks at a time) over this one's. A first round, which fills caches and compiles, is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Coroutine
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from memalpha_judge import write_texts

from trainer.errors import UserError
from trainer.judge.client import ChatClient, verify_model
from trainer.judge.served import ServedReader

ANSWER_TOKENS, VERDICT_TOKENS, TOP_K, TEMPERATURE = 64, 96, 20, 0.7
Text = dict[str, Any]


def questions_of(reader: ServedReader, text: Text, number: int) -> list[Coroutine[Any, Any, object]]:
    """What is asked of trajectory `number`, which kept every line of the text."""
    lines = [line for chunk in text["chunks"] for line in chunk.splitlines()]
    # No two are the same, as no two agents write the same: the judge is asked the same thing only once.
    entries = {f"kept_{place}": f"Note {number}: {line}" for place, line in enumerate(lines)}
    memory = {"core": "", "semantic": entries, "episodic": {}}
    verdicts = [reader.worth_keeping("semantic", entry, "") for entry in entries.values()]
    return verdicts + [reader.answer(asked["question"], memory) for asked in text["questions_and_answers"]]


async def measure(given: argparse.Namespace, texts: list[Text], model: str) -> None:
    numbers = count()
    first: float | None = None
    for urls in dict.fromkeys(((given.urls[0],), tuple(given.urls))):
        for concurrency in sorted(given.concurrency):
            client = ChatClient(lambda urls=urls: urls, model, concurrency)
            reader = ServedReader(client, TOP_K, ANSWER_TOKENS, TEMPERATURE, VERDICT_TOKENS)
            seconds, failed = [], 0
            for _ in range(given.rounds + 1):
                began = time.perf_counter()
                asked = [
                    one for place in range(given.trajectories)
                    for one in questions_of(reader, texts[place % len(texts)], next(numbers))
                ]  # fmt: skip
                answers = await asyncio.gather(*asked, return_exceptions=True)
                seconds.append(round(time.perf_counter() - began, 3))
                failed += sum(isinstance(answer, BaseException) for answer in answers)
            median = statistics.median(seconds[1:])
            first = first or median
            requests = client.counters["judge_requests"] // (given.rounds + 1)
            told = {"servers": len(urls), "concurrency": concurrency, "requests": requests, "seconds": seconds[1:]}
            print(json.dumps({**told, "unanswered": failed, "ratio": round(first / median, 2)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("urls", nargs="+", metavar="URL")
    parser.add_argument("--model", default="", help="name of the model, where a server has several")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[18, 128, 512])
    parser.add_argument("--trajectories", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=4)
    given = parser.parse_args()
    if min(given.rounds, given.trajectories, *given.concurrency) < 1:
        parser.error("--rounds, --trajectories and --concurrency are at least 1")
    try:
        model = verify_model(given.urls[0], given.model)
    except UserError as error:
        parser.error(str(error))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "texts.jsonl"
        write_texts(path, 8)
        texts = [json.loads(line) for line in path.read_text().splitlines()]
    asyncio.run(measure(given, texts, model))


if __name__ == "__main__":
    main()
