"""With rollout.max_staleness=0 the asynchronous machinery makes the very run that taking turns makes, on a real server.

vLLM on the CPU, one request at a time and nothing kept of it: then what a request returns depends on nothing else.
tests/unit/test_work_buffer.py says what is under way without staleness, with no server.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import coin
import pytest
from runs import ENVIRONMENT, REPOSITORY, Trial
from vllmflags import FLAGS
from vllmserver import vllm_python

PARITY = """
import hashlib

class Parity:
    def __init__(self, config):
        pass

    def score(self, task, trajectory):
        # Of what was sampled alone, in whatever order trajectories end.
        ids = [turn.completion.token_ids for turn in trajectory.turns]
        return float(hashlib.sha256(repr((task.id, ids)).encode()).digest()[0] % 2)
"""
IN_TURNS = """
import sys
from itertools import islice
from trainer.__main__ import main
from trainer.rollout.server_sampler import ServedSampler

def batch(self, number):
    numbers = list(islice(self.cursor.numbers(), self.config.rollout.batch_size))
    groups = self.groups([self.source.train(i) for i in numbers], self.plan(number))
    self.cursor.consume(numbers)
    return groups

ServedSampler.batch = batch
sys.exit(main())
"""
NO_CACHE = [*FLAGS, "--no-enable-prefix-caching"]


@pytest.mark.long
def test_staleness_0_is_the_synchronous_loop_bit_for_bit(tmp_path: Path) -> None:
    (tmp_path / "parity.py").write_text(PARITY)
    environment = {**ENVIRONMENT, "VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONPATH": str(REPOSITORY)}
    settings: dict[str, Any] = {
        **coin.SETTINGS,
        "reward": {"name": "parity:Parity"},
        "code_dir": str(tmp_path),
        "servers": {"engine": "vllm", "flags": NO_CACHE, "python": vllm_python()},
        "rollout": {"max_staleness": 0, "max_running": 1, "batch_size": 4, "group_size": 4},
        "train.total_steps": 3,
    }
    trials = [Trial(tmp_path / name, tmp_path / "cache", **settings) for name in ("machinery", "turns")]
    commands = [["-m", "trainer"], ["-c", IN_TURNS]]
    running = [
        subprocess.Popen([sys.executable, *words, str(trial.file)], cwd=REPOSITORY, env=environment)
        for trial, words in zip(trials, commands, strict=True)
    ]
    assert [process.wait(600) for process in running] == [0, 0]

    machinery, turns = (trial.records("step") for trial in trials)
    for name in ("task_reward", "actor_loss", "grad_norm", "mismatch_kl", "sampled_tokens"):
        assert [s["stats"][name] for s in machinery] == [s["stats"][name] for s in turns]
    assert all(step["stats"]["grad_norm"] > 0 for step in turns)
    assert trials[0].summary()["parameter_sha256"] == trials[1].summary()["parameter_sha256"]
    assert trials[0].trained_tasks() == trials[1].trained_tasks()
