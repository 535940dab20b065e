"""How many of a group's prompt tokens are new: what a cache that forgets nothing would have to compute."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from trainer.engines.sharing import common_prefix
from trainer.types import Group


def distinct_prompt_tokens(group: Group) -> int:
    """Of all turns of all trajectories of a group; see `distinct_tokens`."""
    return distinct_tokens([turn.prompt_ids for trajectory in group.trajectories for turn in trajectory.turns])


def distinct_tokens(prompts: Sequence[Sequence[int]]) -> int:
    """Tokens of the tree that prompts make: each counts only from where it leaves all others.

    Sorted, each prompt's longest common prefix with any before it is that with its neighbour. Big-endian bytes sort as
    the ids do, and are compared as fast as memory is read.
    """
    rows = sorted(np.array(prompt, dtype=">u4").tobytes() for prompt in prompts)
    ids = [np.frombuffer(row, dtype=np.int32) for row in rows]
    shared = sum(common_prefix(one, other) for one, other in pairwise(ids))
    return sum(map(len, ids)) - shared
