"""How many engine servers a run waits for."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from trainer.config import RunConfig
from trainer.serving.fleet import Fleet


@pytest.mark.parametrize(
    ("allocation", "minimum", "required"),
    [
        ("sglang:d2|fsdp:d2", 1, 2),  # one that is missing takes memory of the trainer's GPU when it comes
        ("sglang:d2|fsdp:d2", 0, 2),
        ("sglang:d1+fsdp:d1", 0, 1),
        ("sglang:d3+fsdp:d1", 2, 2),
    ],
)
def test_servers_on_the_trainers_gpus_are_waited_for_all(
    allocation: str, minimum: int, required: int, tmp_path: Path
) -> None:
    gpus = 4 if "d3" in allocation else 2
    servers = {"engine": "sglang", "min_required": minimum}
    config = RunConfig(allocation_mode=allocation, n_gpus_per_node=gpus, servers=servers)  # type: ignore[arg-type]

    assert Fleet(cast("Any", None), tmp_path, config).required == required
