"""Publishing of adapters alone: servers keep the base's weights, and load a small folder in PEFT's format."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from trainer.files import replace_tree, sync_tree
from trainer.train.adapterfiles import write_adapter
from trainer.weights.folders import FolderPublisher, caught, explained, fresh
from trainer.weights.publisher import agree
from trainer.weights.source import served_state


class AdapterPublisher(FolderPublisher):
    """Publisher over folders `root/v{version}`, each with an adapter.

    Servers of it compute what the trainer does: in bfloat16 an adapter that is merged loses what is smaller than the
    weights' rounding.
    """

    @property
    def nbytes(self) -> int:
        """See FolderPublisher."""
        adapters = served_state(self.source.learner)[1].values()
        return sum(tensor.numel() * tensor.element_size() for one in adapters for tensor in (one.a, one.b))

    @torch.no_grad()
    def write(self, version: int) -> Path:
        """See FolderPublisher."""
        learner, folder = self.source.learner, self.root / f"v{version}"
        learner.wake(state=False)
        gathered = {name: one.gathered() for name, one in served_state(learner)[1].items()}
        problem = None
        if self.world.is_main:
            temporary = folder.with_name(folder.name + ".tmp")

            def write() -> None:
                fresh(temporary)
                write_adapter(temporary, str(learner.policy.lm.name_or_path), learner.config.model.lora, gathered)
                sync_tree(temporary)
                replace_tree(temporary, folder)

            problem = caught(write)
            if problem is not None:
                shutil.rmtree(temporary, ignore_errors=True)
        agree(self.world, explained(problem, folder))
        return folder
