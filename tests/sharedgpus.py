"""Runs whose servers share the ranks' GPUs, where Ray only believes in these: settings, and the loss of hosts.

SGLang is the stand-in of tests/standins. Placement, hosts, ranks, the hand over of weights and restarts are real.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import coin
from runs import DEADLINE_S, wait_for

from clusterkit.runs.log.metrics import read_history
from trainer.files import last_records

STANDINS = Path(__file__).parent / "standins"
STEPS, BATCH = 8, 3


def settings(hosts: int) -> dict[str, Any]:
    """Settings of a run with one rank and one server on the GPU of each of so many hosts."""
    return {
        **coin.SETTINGS,
        "n_nodes": hosts,
        "n_gpus_per_node": 1,
        "allocation_mode": f"sglang:d{hosts}|fsdp:d{hosts}",
        "train.ranks": hosts,
        "train.offload": True,
        "train.total_steps": STEPS,
        "rollout.max_staleness": 0,
        "rollout.batch_size": BATCH,
        "servers": {"engine": "sglang", "shutdown_on_exit": True, "flags": []},
        "model.dtype": "float32",
        "recover_after": 1.0,
        "checkpoint.async_recover": False,
    }


def put_sglang(folder: Path, seen_as: Path) -> str:
    """Put the stand-in for SGLang into a folder of a cluster's storage.

    Args:
        folder: as this machine sees it.
        seen_as: as the cluster's hosts see it.

    Returns:
        What `servers.python` is to name there.
    """
    shutil.copytree(STANDINS, folder / "standins")
    shutil.copy(STANDINS.with_name("weightserver.py"), folder)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={seen_as}/standins:$PYTHONPATH exec python3 "$@"\n')
    python.chmod(0o755)
    return str(seen_as / "python")


def count(logs: Path, kind: str) -> int:
    """Records of a kind in a run's metrics."""
    return sum(record["kind"] == kind for record in last_records(logs / "metrics.jsonl"))


def go_through_a_loss(
    logs: Path, lose: Callable[[], object], bring_back: Callable[[], object] | None = None, seconds: float = DEADLINE_S
) -> str:
    """Lose hosts in the middle of a run, and wait until its next attempt has made a step.

    Args:
        logs: folder of the run's records.
        lose: takes the hosts away, all at once.
        bring_back: starts them again once the loss was noticed; None: the run goes on without them.
        seconds: how long each part may take.

    Returns:
        How long it took, in words.
    """
    wait_for(lambda: count(logs, "recover") >= 2, seconds, every=0.2)
    lose()
    lost = time.monotonic()
    wait_for((logs / "attempt_1" / "exit.json").exists, seconds, every=0.2)
    noticed = time.monotonic()
    assert "was lost" in (logs / "attempt_1" / "exit.json").read_text()
    steps = count(logs, "step")
    if bring_back is not None:
        bring_back()
    back = time.monotonic()
    wait_for(lambda: count(logs, "step") > steps, seconds, every=0.2)
    went_on = time.monotonic()
    text = f"first step {went_on - lost:.0f} s after the loss: noticed after {noticed - lost:.0f} s"
    if bring_back is not None:
        text += f", the hosts started again in {back - noticed:.0f} s, the first step {went_on - back:.0f} s later"
    print(text)
    return text


def assert_went_on(logs: Path, seconds: float = DEADLINE_S) -> None:
    """The run comes to its end: all steps made, those after the loss from a recover checkpoint, no task twice."""
    wait_for(lambda: count(logs, "finish") >= 2, seconds, every=0.2)
    assert [record["status"] for record in last_records(logs / "metrics.jsonl") if record["kind"] == "finish"] == [
        "failed",
        "completed",
    ]
    history = read_history(logs / "metrics.jsonl")
    assert [step["global_step"] for step in history.steps] == list(range(1, STEPS + 1))
    first, *later = [record for record in last_records(logs / "metrics.jsonl") if record["kind"] == "attempt"]
    assert first["resume_step"] == 0
    assert later[-1]["resume_step"] >= 2
    tasks = [task for step in history.steps for task in step["task_ids"]]
    assert len(set(tasks)) == len(tasks) == STEPS * BATCH
