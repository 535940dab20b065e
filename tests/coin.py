"""Runs with engine servers where nothing is warmed up: a coin decides about rewards, so there is something to learn."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from vllmflags import FLAGS

FOLDER = Path(__file__).parent
"""Where a run finds `reward.name=coin:Coin`."""

SETTINGS: dict[str, Any] = {
    # As large as vLLM's kernels want it.
    "model.tiny": {"hidden_size": 128, "num_heads": 2, "intermediate_size": 128, "max_position_embeddings": 128},
    "warmup": {"recall_steps": 0, "steps": 0},
    "reward": {"name": "coin:Coin"},
    "code_dir": str(FOLDER),
    "servers": {"engine": "vllm", "flags": [*FLAGS], "shutdown_on_exit": False},
    "rollout": {"max_staleness": 1, "batch_size": 4, "group_size": 2},
    "eval": {"every_steps": 0},
    "train": {"learning_rate": 1e-3, "threads": 1},
}


class Coin:
    """One half of all trajectories is right."""

    def __init__(self, config: object) -> None:
        self.coin = random.Random(0)

    def score(self, task: object, trajectory: object) -> float:
        """1.0 or 0.0."""
        return float(self.coin.random() < 0.5)
