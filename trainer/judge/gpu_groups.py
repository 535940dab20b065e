"""Which GPUs the servers of a judge take."""

from __future__ import annotations

from trainer.errors import UserError


def gpu_groups(wanted: str, per_server: int) -> list[tuple[int, ...]]:
    """GPUs of every server: `wanted` is a number of them, or their device numbers with commas; none: one on the CPU.

    Raises:
        UserError: it is neither, or they do not divide into groups.

    """
    try:
        numbers = [int(part) for part in wanted.split(",") if part.strip()]
    except ValueError:
        raise UserError(f"--gpus {wanted}: give how many, such as 3, or which, such as 2,3,4") from None
    if len(numbers) == 1 and "," not in wanted:
        numbers = list(range(numbers[0]))
    if len(numbers) % per_server:
        raise UserError(f"--gpus {wanted}: {len(numbers)} GPUs do not divide into servers of {per_server}")
    return [tuple(numbers[i : i + per_server]) for i in range(0, len(numbers), per_server)] or [()]
