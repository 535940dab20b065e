"""`train --sweep` on a real Ray: a job for each trial, left and taken up again by the same command."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from raycluster import RayCluster, running
from runs import wait_for
from test_sweep import FAST

pytest_plugins = ["sshd_fixture"]
pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]


@pytest.fixture
def cluster() -> Iterator[RayCluster]:
    with running(gpus=0) as found:
        yield found
        found.stop_jobs()


def test_a_sweep_is_a_job_for_each_trial_and_ends_with_the_table(cluster: RayCluster, tmp_path: Path) -> None:
    words = ["train", "--preset", "tiny", "--cluster", "c", *FAST, "train.total_steps=3"]
    words += ["--sweep", "train.learning_rate=1e-4,2e-4", "--json"]
    process = cluster.start(*words, cwd=tmp_path)

    def listed() -> list[dict[str, str]]:
        found: list[dict[str, str]] = json.loads(cluster("jobs", "--cluster", "c", "--json", cwd=tmp_path).stdout)
        return found

    wait_for(lambda: len(listed()) == 2 or process.poll() is not None, every=1.0)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=300) == 0, (tmp_path / "stderr").read_text()
    said = (tmp_path / "stderr").read_text()
    assert "at work on cluster c, without this command" in said or "clusterkit runs --cluster c" in said
    assert [job["trial"] for job in listed()] == ["learning_rate-0.0001", "learning_rate-0.0002"]

    done = cluster(*words, cwd=tmp_path)

    told = json.loads(done.stdout)
    assert [(trial["state"], trial["global_step"]) for trial in told["trials"]] == [("finished", 3)] * 2
    assert [trial["settings"]["train.learning_rate"] for trial in told["trials"]] == [1e-4, 2e-4]
    assert len(listed()) == 2, "attached to, not submitted again"
    assert "is complete already" in cluster(*words, cwd=tmp_path).stderr
    assert len(listed()) == 2
    shown = cluster("runs", "--cluster", "c", cwd=tmp_path).stdout
    assert shown.count("\tfinished\t") == 2
