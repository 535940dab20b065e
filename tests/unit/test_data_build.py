"""The folder that a build makes: another command that works on it at the same time loses nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clusterkit.data.datasets.build import BuildPlan, Output, build
from trainer.errors import UserError


def test_a_folder_that_another_command_has_made_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    out = tmp_path / "data"

    def plan(seed: int, meanwhile: Any = lambda: None) -> BuildPlan:
        def row(_: int) -> dict[str, Any]:
            meanwhile()
            return {"data_source": "a", "seed": seed}

        return BuildPlan("reading", [], {"seed": seed}, [Output("rows.jsonl", 1, row)])

    def seed_in_it() -> int:
        return json.loads((out / "rows.jsonl").read_text(encoding="utf-8"))["seed"]

    with pytest.raises(UserError, match="was prepared with --seed 2, not 1: choose another folder"):
        build(plan(1, lambda: build(plan(2), out, print)), out, print)
    assert seed_in_it() == 2

    assert build(plan(1), out, print, force=True)["outcome"] == "made"
    assert seed_in_it() == 1
