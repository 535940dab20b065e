"""The reward that a configuration names, with the judge or the processes that it needs."""

from __future__ import annotations

from trainer import custom
from trainer.config import RunConfig
from trainer.judge.reader import Reader, RuleReader
from trainer.judge.served import make_served_reader
from trainer.rewards import PLAIN, Reward
from trainer.rewards.math import MathReward
from trainer.rewards.memalpha import MemAlphaReward


def make_reward(config: RunConfig) -> Reward:
    """The reward that a configuration names. Raises UserError for one that cannot be made."""
    if custom.is_custom(config.reward.name):
        reward: Reward = custom.make("reward.name", config.reward.name, config.code_dir, config.reward)
        return reward
    if config.reward.name in PLAIN:
        return PLAIN[config.reward.name]()
    if config.reward.name == "math":
        return MathReward(config.task)
    if config.reward.name == "memalpha":
        return MemAlphaReward(config.reward, make_reader(config))
    raise AssertionError("config was not validated")


def make_reader(config: RunConfig) -> Reader:
    """Who answers from memories and judges. Raises UserError for servers that cannot be used."""
    return RuleReader() if config.judge.reader == "rules" else make_served_reader(config)
