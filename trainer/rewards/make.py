"""The reward that a configuration names, with the judge or the processes that it needs."""

from __future__ import annotations

from typing import Any

from trainer import custom
from trainer.config import RunConfig
from trainer.config_rewards import MathRewardConfig, MemalphaRewardConfig, OwnRewardConfig, ReadingRewardConfig
from trainer.judge.reader import Reader, RuleReader
from trainer.judge.served import make_served_reader
from trainer.rewards import PLAIN, Reward
from trainer.rewards.math import MathReward
from trainer.rewards.memalpha import MemAlphaReward
from trainer.rewards.reading import ReadingReward


def make_reward(config: RunConfig, tokenizer: Any = None) -> Reward:
    """The reward that a configuration names. Raises UserError for one that cannot be made.

    tokenizer: of the model, for a reward that reads memories; without it nothing can be scored by that one.
    """
    settings = config.reward
    if isinstance(settings, OwnRewardConfig):
        reward: Reward = custom.make("reward.name", settings.name, config.code_dir, settings)
        return reward
    if isinstance(settings, MathRewardConfig):
        return MathReward(config.verdicts)
    if isinstance(settings, ReadingRewardConfig):
        return ReadingReward(settings, tokenizer)
    if isinstance(settings, MemalphaRewardConfig):
        return MemAlphaReward(settings, make_reader(config))
    return PLAIN[settings.name]()


def make_reader(config: RunConfig) -> Reader:
    """The reader that answers from memories and judges. Raises UserError for servers that cannot be used."""
    return RuleReader() if config.judge.reader == "rules" else make_served_reader(config)
