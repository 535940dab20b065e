"""Before the first step: log-probs of one long row as they are trained on, beside the model's own forward pass.

Both are computed by the model that is going to be trained, with its weights as they lie (sharded, tensor parallel,
compiled), so the check costs two passes over one row and no memory that a step does not take. The row is as long as the
longest that is planned, so that windows and scaled positions show; a short one lies before it in the packed batch, so
that rows which see one another show, too. Another begins as the first half of it, which is computed once for both where
prefixes are shared. Its tokens are drawn evenly from the vocabulary: attention that is wrong then
changes most. Logits exist at the last positions only. The class's own pass keeps its attention, its masks, its output
layer and whatever it does to the logits.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from trainer.errors import UserError
from trainer.train.distributed import give_back
from trainer.train.families import windows
from trainer.train.learner import Learner
from trainer.train.logprobs import token_logprobs
from trainer.train.packing import pack
from trainer.types import Row

BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 0.2}
"""Largest mean difference, in nats, that is taken for rounding. SmolLM2 on 800 tokens: 4e-6 and 0.03; what a class does
beside plain causal attention makes 0.3 and more.
"""
COMPARED = 256
NEIGHBOUR = 24
# On a CPU a long row takes longer than it is worth, unless a window has to be passed.
CPU_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Parity:
    """Mean log-probs of `compared` tokens, and the mean of their absolute differences, in nats.

    name: class of the model. tokens: of the row. ours: as trained on. own: by the model's own forward pass.
    """

    name: str
    tokens: int
    compared: int
    ours: float
    own: float
    gap: float
    bound: float

    def __str__(self) -> str:
        return (
            f"mean log-prob {self.ours:.4f} as it is trained on, {self.own:.4f} by {self.name}'s own forward pass, "
            f"{self.gap:.2g} apart in the mean over the last {self.compared} tokens of a row of {self.tokens:,}"
        )


def require_parity(learner: Learner, longest: int, vocabulary: int) -> Parity:
    """Compare both on one row; collective. Changes neither weights nor any random state.

    Args:
        longest: tokens of the longest row that is planned.
        vocabulary: token ids below it are drawn.

    Raises:
        UserError: they differ by more than rounding (train.max_logprob_gap).
    """
    found = _compare(learner, longest, vocabulary)
    if learner.world.any(not found.gap <= found.bound):  # also where it is not a number
        raise UserError(
            f"what would be trained is not the model that the engine samples from: {found}, and {found.bound:g} is the "
            "most that is taken for rounding. Nothing was trained. Look at config.json for what this checkpoint does "
            "beside others of its class, and use the releases of torch and transformers that the images have; "
            "train.max_logprob_gap sets another bound, 0 leaves the comparison out"
        )
    return found


def _compare(learner: Learner, longest: int, vocabulary: int) -> Parity:
    world, lm = learner.world, learner.policy.lm
    length = _length(longest, lm, world.device)
    shares = learner.shares_prefixes
    count = min(COMPARED, max(1, length // 2) if shares else length - 1)
    rng = random.Random(0)
    ids = [rng.randrange(min(vocabulary, lm.config.vocab_size)) for _ in range(NEIGHBOUR + length)]
    neighbour = _row(ids[:NEIGHBOUR], NEIGHBOUR // 2)
    row = _row(ids[NEIGHBOUR:], count)
    sibling = _row([*row.prompt_ids[: length // 2], *neighbour.prompt_ids], NEIGHBOUR // 2)
    was_training = learner.policy.training
    learner.wake(state=False)
    learner.policy.eval()
    try:
        # With gradients, as in training: what is compiled for it is compiled once.
        with torch.enable_grad():
            rows = [neighbour, sibling, row] if shares else [neighbour, row]
            batch = pack(rows, world.device, shares, world.tensor_size)
            logp = token_logprobs(learner.policy, batch, 1.0, COMPARED)[0]
        ours = logp.detach()[-count:]
        del logp
        give_back(learner.policy)
        with torch.no_grad():
            batch = pack([row], world.device, multiple=world.tensor_size)
            own = learner.policy(batch, 1.0, COMPARED, own=True)[0]
        give_back(learner.policy)
    finally:
        learner.policy.train(was_training)
    bound = learner.config.train.max_logprob_gap
    return Parity(
        type(lm).__name__, length, count, float(ours.mean()), float(own.mean()), float((ours - own).abs().mean()),
        BOUNDS[world.dtype] if bound is None else bound,
    )  # fmt: skip


def _row(ids: list[int], trained: int) -> Row:
    return Row(ids[:-trained], ids[-trained:], [0.0] * trained, advantage=0.0, weight=0.0, trajectory=-1)


def _length(longest: int, lm: object, device: torch.device) -> int:
    if device.type == "cpu":
        widest = max((w for w in windows(lm.config) if w is not None), default=0)  # type: ignore[attr-defined]
        longest = min(longest, max(CPU_TOKENS, widest + widest // 8))
    return max(longest, 2)
