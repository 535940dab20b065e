"""How many of a group's prompt tokens are new: what a cache that forgets nothing would have to compute."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from trainer.engines.sharing import common_prefix
from trainer.types import Group, packed_ids


def distinct_prompt_tokens(group: Group) -> int:
    """Of all turns of all trajectories of a group; see `distinct_tokens`."""
    turns = [turn for trajectory in group.trajectories for turn in trajectory.turns]
    return _nodes([turn.ids[: 4 * len(turn.prompt_ids)] for turn in turns])


def distinct_tokens(prompts: Sequence[Sequence[int]]) -> int:
    """Tokens of the tree that prompts make: each counts only from where it leaves all others."""
    return _nodes([packed_ids(prompt, ()) for prompt in prompts])


def _nodes(prompts: list[bytes]) -> int:
    """As `distinct_tokens`, of `packed_ids`.

    Sorted, each prompt's longest common prefix with any before it is that with its neighbour; for that any order of
    token ids will do, and bytes are compared as fast as memory is read.
    """
    ids = [np.frombuffer(prompt, dtype=np.int32) for prompt in sorted(prompts)]
    shared = sum(common_prefix(one, other) for one, other in pairwise(ids))
    return sum(map(len, ids)) - shared
