"""RunConfig: everything that defines a run, in one validated tree.

Both sides read this module and the config_* modules beside it, so they import nothing but pydantic, the standard
library and modules of the same kind. Every field has a default, bounds and a sentence, which `clusterkit presets
explain` prints. Unknown keys are errors.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, model_validator

from trainer.config_0_1 import without_others
from trainer.config_checks import CHECKS
from trainer.config_fields import RunFields


class RunConfig(RunFields):
    """One run: what `clusterkit train` resolves and `python -m trainer` executes."""

    @model_validator(mode="before")
    @classmethod
    def _of_0_1(cls, values: Any) -> Any:
        return without_others(values)

    @model_validator(mode="after")
    def _fits(self) -> RunConfig:
        for check in CHECKS:
            check(self)
        return self


def flatten(config: BaseModel, prefix: str = "") -> dict[str, Any]:
    """Dotted name -> value of every leaf of a configuration, in field order."""
    flat: dict[str, Any] = {}
    for name in type(config).model_fields:
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat
