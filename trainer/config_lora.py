"""The section model.lora: training of low-rank adapters in place of all weights."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any

from pydantic import Field, field_validator

from trainer.config_choice import Section
from trainer.errors import UserError

ALL_LINEAR = "all-linear"


class LoraConfig(Section):
    """Low-rank adapters (LoRA): the model's weights stay as they are, and small matrices beside them are trained."""

    rank: Annotated[int, Field(ge=0, le=1024)] = 0
    """Rank of the adapters; 0: all weights are trained. Learning rates are about ten times those of all weights."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """What an adapter adds is scaled by alpha / rank."""
    targets: list[str] = [ALL_LINEAR]  # noqa: RUF012 (pydantic copies it)
    """Linear layers that get an adapter, by their names in a decoder layer, such as [q_proj,v_proj]; all-linear: all of
    them. Embedding and output layer get none."""

    @field_validator("targets", mode="before")
    @classmethod
    def _one_name(cls, value: Any) -> Any:
        return value.split(",") if isinstance(value, str) else value

    @field_validator("targets")
    @classmethod
    def _names(cls, targets: list[str]) -> list[str]:
        if not targets or (ALL_LINEAR in targets and len(targets) > 1):
            raise ValueError(f"targets={targets}: give names of linear layers, or {ALL_LINEAR} alone")
        return targets

    def chosen(self, known: Collection[str]) -> set[str]:
        """Which of a decoder layer's linear layers get an adapter. Raises UserError where it lacks one of them."""
        if self.targets == [ALL_LINEAR]:
            return set(known)
        if unknown := sorted(set(self.targets) - set(known)):
            raise UserError(
                f"model.lora.targets={','.join(self.targets)}: a decoder layer of this model has no linear layer "
                f"{', '.join(unknown)}: choose among {', '.join(sorted(known))}, or {ALL_LINEAR}"
            )
        return set(self.targets)

    @property
    def scale(self) -> float:
        """What an adapter's output is multiplied by."""
        return self.alpha / self.rank
