"""Section reward of a RunConfig: how an answer is scored. See trainer/config.py and trainer/config_choice.py."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field

from trainer.config_choice import Choice, OwnSection, Section


class RewardConfig(Section):
    """What every reward has."""

    name: str
    """boxed: 1 where the content of the last \\boxed{} is a gold answer, else 0. f1: SQuAD's F1 of words with the gold
    answer, of the whole answer where none is marked, for models too small to keep a format. found: 1 where a gold
    answer is anywhere in the answer, as in RULER. math: the final answer compared as a value, scaled by
    task.reward_scale. memalpha: questions answered from the memory (r1), successful calls (r2), compression (r3),
    entries worth keeping (r4). Or `module:Class`, a class of your own (docs/custom.md)."""


class MemoryRewardConfig(RewardConfig):
    """Rewards of a structured memory."""

    beta: Annotated[float, Field(ge=0)] = 0.05
    """Weight of r3."""
    gamma: Annotated[float, Field(ge=0)] = 0.1
    """Weight of r4; 0: no entry is judged."""


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


class OwnRewardConfig(OwnSection, MemoryRewardConfig):
    """A reward of the user's own, which may build on any of ours."""


OurRewardConfig = BoxedConfig | F1Config | FoundConfig | MathRewardConfig | MemalphaRewardConfig
REWARD = Choice.by_name("reward", OwnRewardConfig, *get_args(OurRewardConfig))
AnyRewardConfig = Annotated[OurRewardConfig | OwnRewardConfig, REWARD]
"""What a reward's section may be."""
