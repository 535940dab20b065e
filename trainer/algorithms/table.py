"""The algorithm table: an algorithm is a row of settings over the same few functions. Both sides read it: no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from trainer.config_parts import AlgorithmConfig


@dataclass(frozen=True, slots=True)
class Algorithm:
    """loss: shape of the surrogate. advantage, loss_norm: see trainer.config. clip_low, clip_high: ratio range
    [1 - clip_low, 1 + clip_high]. dual_clip: None is off. dynamic_sampling: groups of equal rewards are replaced.
    overlong_share: last part of the response limit within which a response is punished for its length; 0: none is.
    """

    loss: Literal["ppo", "gspo", "cispo"]
    advantage: Literal["mean", "mean_std"]
    loss_norm: Literal["token", "trajectory_mean", "constant"]
    clip_low: float
    clip_high: float
    dual_clip: float | None
    dynamic_sampling: bool = False
    overlong_share: float = 0.0


TABLE: dict[str, Algorithm] = {
    # As MemAgent's released runs have it (verl's GRPO), not as in DeepSeekMath (arXiv 2402.03300), which divides by the
    # group's std, takes the mean of each response first, and has no dual clip.
    "grpo": Algorithm("ppo", "mean", "token", 0.2, 0.2, 3.0),
    # DAPO (arXiv 2503.14476): clip-higher, token mean, dynamic sampling, and the soft overlong punishment over the last
    # 4,096 of 20,480 tokens. It has no KL term; algorithm.kl_coef is 0 unless set.
    "dapo": Algorithm("ppo", "mean_std", "token", 0.2, 0.28, None, dynamic_sampling=True, overlong_share=0.2),
    # Dr. GRPO (arXiv 2503.20783): neither the group's std nor the response's length may weigh; no KL.
    "dr_grpo": Algorithm("ppo", "mean", "constant", 0.2, 0.2, None),
    # GSPO (arXiv 2507.18071): the paper's ranges; trajectories weigh the same, within them every token (in the paper a
    # trajectory is one response).
    "gspo": Algorithm("gspo", "mean_std", "trajectory_mean", 3e-4, 4e-4, None),
    # CISPO (MiniMax-M1, arXiv 2506.13585): the loss alone. Only the upper range acts; the paper gives no number for it.
    "cispo": Algorithm("cispo", "mean_std", "token", 1.0, 5.0, None),
}


def resolve(config: AlgorithmConfig) -> Algorithm:
    """The configured row, with the fields that are set in the configuration put over it."""
    row = TABLE[config.name]
    given: dict[str, Any] = {
        name: value
        for name in ("advantage", "loss_norm", "clip_low", "clip_high", "dual_clip")
        if (value := getattr(config, name)) is not None
    }
    if given.get("dual_clip") == 0:
        given["dual_clip"] = None
    return replace(row, **given)


def overlong_penalty(length: int, limit: int, buffer: int) -> float:
    """DAPO's soft overlong punishment (eq. 13), 0 to -1.

    Args:
        length: tokens of the response. limit: the most that it may have (L_max). buffer: the last so many of them, over
            which the punishment grows linearly (L_cache); 0: there is none.
    """
    if not buffer:
        return 0.0
    return -min(max(length - (limit - buffer), 0) / buffer, 1.0)
