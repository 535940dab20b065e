"""Whether a model's training fits into GPUs; the numbers stand for GPUs that are not there."""

from __future__ import annotations

import pytest
import torch

from trainer.errors import RunError, UserError
from trainer.train.memory import out_of_memory, room_problem

GIB = 1 << 30


@pytest.mark.parametrize(
    ("billions", "ranks", "free", "kind", "says"),
    [
        (1.5, 1, 79, None, ""),
        (7.6, 2, 79, None, ""),
        (
            7.6,
            1,
            79,
            UserError,
            "7.60 billion parameters on 1 GPUs takes at least 113.2 GiB of each, and of 80.0 GiB there",
        ),
        (32.0, 8, 79, UserError, r"at least 119\.2 GiB of each"),  # every rank loads all of it
        (1.5, 1, 12, RunError, "22.4 GiB of each, and of 80.0 GiB only 12.0 are free: end what else uses"),
    ],
)
def test_what_cannot_fit_is_said_before(
    billions: float, ranks: int, free: int, kind: type[UserError] | None, says: str
) -> None:
    problem = room_problem(int(billions * 1e9), ranks, free * GIB, 80 * GIB)
    assert (None if problem is None else type(problem)) is kind
    if problem is not None:
        with pytest.raises(UserError, match=says):
            raise problem


def test_a_server_that_gives_its_memory_away_is_not_in_the_way() -> None:
    assert room_problem(1_500_000_000, 1, 12 * GIB, 80 * GIB, shared=True) is None
    assert room_problem(1_500_000_000, 1, 5 * GIB, 80 * GIB, shared=True) is not None


def test_memory_that_ran_out_is_told_in_one_line() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has …")
    assert str(out_of_memory(error)).startswith(
        "a GPU ran out of memory (CUDA out of memory. Tried to allocate 2.00 GiB): end what else uses it"
    )
