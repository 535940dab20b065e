"""`clusterkit setup --preset`: the runtime image is built on the head, goes to all hosts, and the preset trains."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from setup_command import Done, Operator
from testbed import Node, Testbed
from testbed_images import base_image
from testbed_runtime import put_on_storage

from clusterkit.images import Image
from clusterkit.rundir import user_name

pytestmark = pytest.mark.timeout(1500)

STEPS = 2
WARMUP = ("warmup.recall_steps=5", "warmup.steps=5", "warmup.gate=0")
SETTINGS = (f"train.total_steps={STEPS}", *WARMUP, "eval.final_chunks=[2]")
HOLDS = "holds"
"""A run that is longer than the tests look at it."""


@pytest.fixture(scope="module")
def pair(testbed: Testbed) -> list[Node]:
    """Two bare hosts: the second head is the first's."""
    testbed.reset()
    return testbed.nodes[:2]


@pytest.fixture(scope="module")
def operator(
    testbed: Testbed, pair: list[Node], cpu_image: Image, tmp_path_factory: pytest.TempPathFactory
) -> Operator:
    """A cluster of two hosts without a preset, whose head has the base that the testbed's Debian is."""
    put_on_storage(testbed, cpu_image)
    operator = Operator(testbed, tmp_path_factory.mktemp("operator"), cpu_image)
    done = operator.setup(hosts=pair)
    assert done.exit_code == 0, done.text
    with testbed.base_archive.open("rb") as base:
        words = testbed.engine.argv("exec", "-i", pair[0].container, "docker", "import", "-", base_of(testbed))
        subprocess.run(words, stdin=base, check=True, capture_output=True, timeout=300)
    return operator


def base_of(testbed: Testbed) -> str:
    return base_image(testbed.engine, testbed.base_archive)


def preset(operator: Operator, *settings: str) -> list[str]:
    """Words of a set-up that builds the image with torch and trains the tiny preset."""
    words = ["--image", "none", "--image-base", base_of(operator.testbed), "--recreate", "--preset", "tiny"]
    wheels = operator.testbed.site.pip_find_links
    words += ["--pip-find-links", wheels] if wheels else []
    return [*words, *(word for setting in (*SETTINGS, *settings) for word in ("--set", setting))]


def run_folder(operator: Operator, trial: str = "run1") -> Path:
    """The run's logs on the shared storage."""
    (folder,) = operator.testbed.storage.glob(f"ray/experiments/logs/{user_name()}/*/{trial}")
    return folder


def records(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def await_end(folder: Path, seconds: float = 300.0) -> dict[str, Any]:
    """Wait for the run's last record."""
    deadline = time.monotonic() + seconds
    while True:
        if finished := [record for record in records(folder) if record["kind"] == "finish"]:
            return finished[-1]
        assert time.monotonic() < deadline, f"no end within {seconds:.0f} s: {records(folder)[-3:]}"
        time.sleep(0.2)


def train_state(done: Done, node: Node) -> str:
    assert done.exit_code == 0, done.text
    return str(done.row(node)["steps"]["train"])


def test_image_with_torch_is_built_and_the_preset_trains_on_it(operator: Operator, pair: list[Node]) -> None:
    head, worker = pair
    first = operator.setup(*preset(operator), hosts=pair, timeout=1200)
    assert train_state(first, head) == "changed"
    assert first.row(worker)["steps"]["train"] == "skipped"
    assert first.report["ray"]["ready"] is True
    assert len({node["image_id"] for node in first.report["ray"]["nodes"]}) == 1
    training = first.report["training"]
    assert training["state"] == "started"
    folder = run_folder(operator)
    assert training["run_dir"].endswith(str(folder.relative_to(operator.testbed.storage)))
    end = await_end(folder)
    assert end["status"] == "completed", end
    steps = [record["global_step"] for record in records(folder) if record["kind"] == "step"]
    assert steps == [1, 2]
    assert "task_reward" in (folder / "main.log").read_text()

    again = operator.setup(*preset(operator), hosts=pair)
    assert (again.changes, again.report["training"]["state"]) == (0, "complete")


def test_same_command_attaches_and_another_run_is_refused(operator: Operator, pair: list[Node]) -> None:
    head = pair[0]
    long = ("train.total_steps=100000", f"trial_name={HOLDS}")
    first = operator.setup(*preset(operator, *long), hosts=pair)
    assert train_state(first, head) == "changed"
    job = first.report["training"]["submission_id"]

    same = operator.setup(*preset(operator, *long), hosts=pair)
    assert (train_state(same, head), same.changes) == ("ok", 0)
    assert (same.report["training"]["state"], same.report["training"]["submission_id"]) == ("attached", job)

    other = operator.setup(*preset(operator, *long, "seed=2"), hosts=pair)
    assert other.exit_code == 3
    failure = other.failure(head)
    assert failure["step"] == "train"
    assert f"{HOLDS} is being trained with other settings, as job {job}" in failure["message"]
    assert "trial_name=NEW" in failure["message"]

    # Ray must not be taken from under a job.
    recreated = operator.setup("--shm", "100m", hosts=pair)
    assert recreated.exit_code != 0
    assert job in recreated.failure(head)["fix"]
    assert [record for record in records(run_folder(operator, HOLDS)) if record["kind"] == "finish"] == []


def test_check_looks_from_inside_the_containers(operator: Operator, pair: list[Node]) -> None:
    done = operator.check("--nccl", "--bandwidth", hosts=pair)
    told = {finding["check"]: finding for finding in done.report["cluster"]}
    assert "inside the containers of 2 host(s)" in told["container storage"]["message"]
    assert "all-reduce over 2 hosts: " in told["nccl"]["message"], told
    assert (told["container storage"]["level"], told["nccl"]["level"]) == ("ok", "ok")
