"""The closing table sets after beside before only where both are of the same tasks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from builders import byte_tokenizer
from heldout_writer import LIMITS, FakeEngine, careful

from trainer.agents.memagent import MemAgent
from trainer.config_agents import MemagentConfig
from trainer.config_tasks import HotpotqaConfig
from trainer.evaluate import BEFORE, EvalResult, EvalSpec, closing_table, evaluate, store_before
from trainer.rollout.controller import RolloutController
from trainer.tasks.hotpotqa import HotpotQA

SPEC = EvalSpec("test", 2)


def measured(data: Path, tasks: int) -> EvalResult:
    tokenizer = byte_tokenizer()
    agent = MemAgent(MemagentConfig.model_validate(LIMITS), tokenizer)
    source = HotpotQA(HotpotqaConfig(path=str(data), num_documents=4), 1)
    return evaluate(RolloutController(agent, FakeEngine(tokenizer, careful), 1).run, source, EvalSpec("test", tasks))


def test_before_counts_for_the_same_tasks_alone(mini_hotpotqa: Path, tmp_path: Path) -> None:
    one, again, two = measured(mini_hotpotqa, 1), measured(mini_hotpotqa, 1), measured(mini_hotpotqa, 2)
    store_before(tmp_path, {SPEC: one})

    (same,), (other,) = closing_table(tmp_path, {SPEC: again}), closing_table(tmp_path, {SPEC: two})
    assert (same["before"], same["interval_before"]) == (one.accuracy, list(one.interval))
    assert (other["before"], other["after"]) == (None, two.accuracy)

    rows = json.loads((tmp_path / BEFORE).read_text())
    assert [row["seconds"] for row in rows] == [pytest.approx(one.seconds, abs=1e-3)]
    for row in rows:
        del row["tasks"]  # as 0.1 wrote it
    (tmp_path / BEFORE).write_text(json.dumps(rows))
    assert closing_table(tmp_path, {SPEC: two})[0]["before"] == one.accuracy
