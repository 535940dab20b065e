"""A process that writes recover checkpoints in the background until it is killed: python background_saver.py DIR."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

from trainer.checkpoint.background import BackgroundWriter
from trainer.checkpoint.recover import RecoverStore, RunState
from trainer.train.distributed import single_world


class BigLearner:
    """As much of a Learner as checkpoints see, with tensors that take a while to write: 256 MB of weights."""

    def __init__(self) -> None:
        self.world = single_world()
        self.policy = nn.Linear(8192, 8192, bias=False)
        self.optimizer = torch.optim.SGD(self.policy.parameters(), lr=0.1)
        self.optimizer_steps = 0
        self.base = ""  # no adapters

    def wake(self, state: bool = True) -> None:
        """It is never at rest."""


def main(folder: Path) -> None:
    learner = BigLearner()
    writer = BackgroundWriter()
    store = RecoverStore(folder, writer)
    for step in range(1, 1000):
        with torch.no_grad():
            learner.policy.weight.fill_(step)
        state = RunState(step, step, step, step, 0.0)
        store.save_in_background(learner, state, {}, learner.world, lambda _: None)  # type: ignore[arg-type]
        if step == 1:
            writer.wait()
        print(step, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
