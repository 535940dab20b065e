"""Section supervised of a RunConfig: examples that are learned before the first step of reinforcement."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trainer.config_choice import Section


class SupervisedConfig(Section):
    """Supervised start, as a run of trainer.type=sft with the model, agent, ranks and seed of this one."""

    dataset: str = ""
    """JSON-lines file of examples, within task.path where the task has one (traces.jsonl of `clusterkit data prepare
    reading`). Empty: no supervised start."""
    eval_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Share of the examples (by hash of their text) that is held out."""
    batch_size: Annotated[int, Field(ge=1)] = 32
    """Examples of an optimizer step."""
    total_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps; 0: total_epochs decides."""
    total_epochs: Annotated[int, Field(ge=1)] = 2
    """Passes over the examples."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-5
    """Peak learning rate of AdamW; it falls along a cosine."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Final learning rate as a share of the peak; 1: constant."""
    warmup_steps: Annotated[int, Field(ge=0)] = 10
    """Optimizer steps of linear warm-up of the learning rate."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.05
    """AdamW; not applied to biases and norms."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """AdamW."""
    eval_every_steps: Annotated[int, Field(ge=0)] = 0
    """Steps between measurements of the held-out loss; 0: only before and after."""
    eval_tasks: Annotated[int, Field(ge=1)] = 256
    """Most held-out examples that are measured."""

    def check(self, kind: str, model_path: str | None) -> None:
        """Raise ValueError where a run cannot have a supervised start. kind: trainer.type."""
        if not self.dataset:
            return
        named = f"supervised.dataset={self.dataset}"
        if kind != "grpo":
            raise ValueError(f"{named} is learned before reinforcement, and trainer.type is {kind}: leave it out")
        if not model_path:
            raise ValueError(
                f"{named} needs a pretrained model, and one built from nothing has a warm-up of its own: set model.path"
            )
