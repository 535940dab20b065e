"""Which weights sampled which token of a response."""

from __future__ import annotations

from trainer.types import Completion


def token_versions(done: Completion) -> list[int]:
    """The weight version that sampled each token."""
    return [version for version, count in done.spans or ((done.version, len(done.token_ids)),) for _ in range(count)]
