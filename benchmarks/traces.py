"""How fast a supervised start's rows are made from traces, and how far that holds up a thread that launches kernels.

    python3 benchmarks/traces.py QUESTIONS TOKENIZER_FOLDER [--processes 0 1 2] [--steps 20]

QUESTIONS is a folder of `clusterkit data prepare reading`; sections, memories and rows are those of preset 135M_read.
Printed, a JSON object for every number of processes (0: a thread of this one): seconds of a step of 32 traces, tokens
of its rows a second, and `launches`: the seconds of 4,000 small operations of PyTorch's with nothing beside them, over
those that they take while rows are made. A GPU that runs more kernels than it computes is held up by as much. The limit
is 1: a process on a core of its own takes nothing from them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from clusterkit.config.resolve import resolve
from trainer.sft.rows import RowMaker
from trainer.sft.start import start_config
from trainer.tasks.examples import load_examples
from trainer.train.model import load_tokenizer

OPERATIONS = 4000


def launches() -> float:
    """Seconds of small operations, one after the other."""
    began, value = time.perf_counter(), torch.zeros(64)
    for _ in range(OPERATIONS):
        value = torch.add(value, 1.0)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--processes", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    torch.set_num_threads(1)
    config = start_config(resolve("135M_read", None, [f"task.path={given.questions.resolve()}"]).config)
    tokenizer, size = load_tokenizer(given.tokenizer), config.rollout.batch_size
    examples = load_examples(config.examples).train[: given.steps * size]
    batches = [examples[first : first + size] for first in range(0, len(examples), size)]
    longest = config.model.context_window
    for processes in given.processes:
        maker = RowMaker(config, tokenizer, processes)
        maker.begin(batches[0], longest).result()  # a process has started now
        began = time.perf_counter()
        made = [maker.begin(batch, longest).result() for batch in batches]
        seconds = time.perf_counter() - began
        alone = statistics.median(launches() for _ in range(20))
        making, beside = [maker.begin(batch, longest) for batch in batches], list[float]()
        while not making[-1].done:
            beside.append(launches())
        maker.close()
        tokens = sum(row.num_tokens for one in made for row in one.rows)
        told = {"step_s": round(seconds / len(batches), 3), "row_tokens_per_s": round(tokens / seconds)}
        ratio = round(alone / statistics.mean(beside), 2)
        print(json.dumps({"processes": processes, **told, "launches": ratio}), flush=True)


if __name__ == "__main__":
    main()
