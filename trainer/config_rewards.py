"""Section reward of a RunConfig: how an answer is scored. See trainer/config.py and trainer/config_choice.py."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator

from trainer.config_choice import Choice, named_class, plain_options
from trainer.config_parts import Section


class RewardConfig(Section):
    """What every reward has."""

    name: str
    """boxed: 1 where the content of the last \\boxed{} is a gold answer, else 0. f1: words that answer and gold answer
    share, 0 to 1, after SQuAD's normalisation, of the whole answer where none is marked: for models too small to keep a
    format. found: 1 where a gold answer stands anywhere in the answer, as RULER counts. math: the final answer compared
    as a value, scaled by task.reward_scale.
    memalpha: questions answered from the memory (r1), calls that worked (r2), compression (r3), entries worth keeping
    (r4). Or `module:Class` for one of your own (docs/custom.md)."""


class MemoryRewardConfig(RewardConfig):
    """Rewards of a structured memory."""

    beta: Annotated[float, Field(ge=0)] = 0.05
    """Weight of r3."""
    gamma: Annotated[float, Field(ge=0)] = 0.1
    """Weight of r4; 0: nothing is judged."""


class BoxedConfig(RewardConfig):
    """The marked answer."""

    name: Literal["boxed"] = "boxed"


class F1Config(RewardConfig):
    """Shared words."""

    name: Literal["f1"] = "f1"


class FoundConfig(RewardConfig):
    """A gold answer anywhere."""

    name: Literal["found"] = "found"


class MathRewardConfig(RewardConfig):
    """The final answer as a value; its scale belongs to the task."""

    name: Literal["math"] = "math"


class MemalphaRewardConfig(MemoryRewardConfig):
    """Mem-alpha's four rewards."""

    name: Literal["memalpha"] = "memalpha"


class OwnRewardConfig(MemoryRewardConfig):
    """A reward of the user's own, which may build on any of ours."""

    options: dict[str, Any] = {}  # noqa: RUF012 (pydantic copies it)
    """Settings of a reward of your own, as it wants them: reward.options.NAME=VALUE."""

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        return named_class(name, "reward.name", tuple(REWARD.ours))

    @field_validator("options")
    @classmethod
    def _plain(cls, options: dict[str, Any]) -> dict[str, Any]:
        return plain_options(options)


REWARD = Choice(
    "reward",
    "boxed",
    {
        "boxed": BoxedConfig,
        "f1": F1Config,
        "found": FoundConfig,
        "math": MathRewardConfig,
        "memalpha": MemalphaRewardConfig,
    },
    OwnRewardConfig,
)
AnyRewardConfig = Annotated[
    Annotated[BoxedConfig, Tag("boxed")]
    | Annotated[F1Config, Tag("f1")]
    | Annotated[FoundConfig, Tag("found")]
    | Annotated[MathRewardConfig, Tag("math")]
    | Annotated[MemalphaRewardConfig, Tag("memalpha")]
    | Annotated[OwnRewardConfig, Tag("own")],
    Discriminator(REWARD.tag),
]
"""What a reward's section may be."""
