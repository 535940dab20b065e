"""Processes that start from one that has imported everything already: in a moment each, and not in seconds."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "transformers.models.llama.modeling_llama",
        "transformers.models.qwen2.modeling_qwen2",
        "transformers.models.qwen3.modeling_qwen3",
        "trainer.checkpoint.recover",
        "trainer.engines.embedded",
        "trainer.evaluate",
        "trainer.launch.rank_run",
        "trainer.rollout.controller",
        "trainer.train.learner",
        "trainer.train.parity",
        "trainer.rollout.sampler",
        "trainer.weights.nccl",
    ]
)


def run_ranks(main: Callable[..., None], size: int, folder: Path, *arguments: Any) -> list[Any]:
    """Run `main(rank, size, folder, *arguments)` in a process for every rank; what each has saved as rankN.pt."""
    processes = [CONTEXT.Process(target=main, args=(rank, size, folder, *arguments)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=600)
        if process.is_alive():
            process.kill()
    assert [process.exitcode for process in processes] == [0] * size
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(size)]
