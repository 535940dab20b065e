"""Section reward of a RunConfig: how an answer is scored. See trainer/config.py and trainer/config_choice.py."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, get_args

from pydantic import Field

from trainer.config_choice import Choice, OwnSection, Section


class RewardConfig(Section):
    """What every reward has."""

    score_name: ClassVar[str] = "accuracy"
    """What people call the mean over held-out tasks; records keep it under `accuracy`, whatever its name."""
    name: str
    """boxed: 1 where the content of the last \\boxed{} is a gold answer, else 0. f1: SQuAD's F1 of words with the gold
    answer, of the whole answer where none is marked, for models too small to keep a format. found: 1 where a gold
    answer is anywhere in the answer, as in RULER. math: the final answer compared as a value, scaled by
    task.reward_scale. reading: f1, and early in a run a bonus for memories that hold the answer. memalpha: questions
    answered from the memory (r1), successful calls (r2), compression (r3), entries worth keeping (r4). Or
    `module:Class`, a class of your own (docs/custom.md)."""


class MemoryRewardConfig(RewardConfig):
    """Rewards of a structured memory."""

    beta: Annotated[float, Field(ge=0)] = 0.05
    """Weight of r3."""
    gamma: Annotated[float, Field(ge=0)] = 0.1
    """Weight of r4; 0: no entry is judged."""


class BonusRewardConfig(RewardConfig):
    """Rewards with a bonus for what memories hold."""

    memory_bonus: Annotated[float, Field(ge=0)] = 0.5
    """Bonus at the first step for a trajectory every memory of which holds a gold answer; less in proportion. Answers
    yes and no have none."""
    memory_bonus_steps: Annotated[int, Field(ge=1)] = 40
    """Step from which the bonus is 0; it falls to it in equal parts, so that the answer alone counts in the end."""


class BoxedConfig(RewardConfig):
    """The marked answer."""

    name: Literal["boxed"] = "boxed"


class F1Config(RewardConfig):
    """Shared words."""

    score_name = "F1"
    name: Literal["f1"] = "f1"


class FoundConfig(RewardConfig):
    """A gold answer anywhere."""

    name: Literal["found"] = "found"


class MathRewardConfig(RewardConfig):
    """The final answer as a value; its scale belongs to the task."""

    name: Literal["math"] = "math"


class ReadingRewardConfig(BonusRewardConfig):
    """Shared words, and a bonus for memories that hold a gold answer."""

    score_name = "F1"
    name: Literal["reading"] = "reading"


class MemalphaRewardConfig(MemoryRewardConfig):
    """Mem-alpha's four rewards."""

    name: Literal["memalpha"] = "memalpha"


class OwnRewardConfig(OwnSection, MemoryRewardConfig, BonusRewardConfig):
    """A reward of the user's own, which may build on any of ours."""

    score_name = "score"


OurRewardConfig = BoxedConfig | F1Config | FoundConfig | MathRewardConfig | ReadingRewardConfig | MemalphaRewardConfig
REWARD = Choice.by_name("reward", OwnRewardConfig, *get_args(OurRewardConfig))
AnyRewardConfig = Annotated[OurRewardConfig | OwnRewardConfig, REWARD]
"""What a reward's section may be."""
