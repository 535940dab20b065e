"""How fast a supervised start's rows are made from traces, beside tokenising their documents once.

    python3 benchmarks/traces.py QUESTIONS TOKENIZER_FOLDER [--threads 1 4] [--steps 20]

QUESTIONS is a folder of `clusterkit data prepare reading`; sections, memories and rows are those of preset 135M_read.
Printed, a JSON object for every number of threads: seconds of a step of 32 traces, tokens of its rows a second, and
`of_limit`: the seconds that the tokenizer alone takes for the documents of a step, on as many threads, over the step's.
A GPU that learns the rows in less time than they take waits for them.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from clusterkit.config.resolve import resolve
from trainer.agents.template import encode
from trainer.sft.rows import RowMaker
from trainer.sft.start import start_config
from trainer.tasks.examples import load_examples
from trainer.train.model import load_tokenizer


def tokenise(tokenizer: Any, texts: list[str]) -> None:
    for text in texts:
        encode(tokenizer, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    config = start_config(resolve("135M_read", None, [f"task.path={given.questions.resolve()}"]).config)
    tokenizer, size = load_tokenizer(given.tokenizer), config.rollout.batch_size
    examples = load_examples(config.examples).train[: given.steps * size]
    documents = [example.trace.context for example in examples if example.trace]
    for threads in given.threads:
        tokenizers = [copy.deepcopy(tokenizer) for _ in range(threads)]
        shares = [documents[number::threads] for number in range(threads)]
        with ThreadPoolExecutor(threads) as pool:
            began = time.perf_counter()
            list(pool.map(tokenise, tokenizers, shares))
            limit = time.perf_counter() - began
        maker = RowMaker(config, tokenizer, threads)
        began = time.perf_counter()
        batches = [examples[first : first + size] for first in range(0, len(examples), size)]
        made = [maker.begin(batch, config.model.context_window).result() for batch in batches]
        seconds = time.perf_counter() - began
        maker.close()
        tokens = sum(row.num_tokens for one in made for row in one.rows)
        told = {"step_s": round(seconds / len(batches), 3), "row_tokens_per_s": round(tokens / seconds)}
        print(json.dumps({"threads": threads, **told, "of_limit": round(limit / seconds, 2)}), flush=True)


if __name__ == "__main__":
    main()
