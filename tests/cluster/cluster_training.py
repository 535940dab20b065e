"""Words of the commands that train and evaluate on the cluster of these tests, and what is read of a run's files."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runs import SETTINGS
from safetensors.torch import load_file
from setup_command import Done, Operator
from testbed import Node, Testbed
from testbed_images import base_image

from clusterkit.config.presets import leaves
from clusterkit.runs.directory import user_name

STEPS = 2
WARMUP = ("warmup.recall_steps=5", "warmup.steps=5", "warmup.gate=0")
ALL_STEPS = 60
SHORT = (f"train.total_steps={STEPS}", *WARMUP, "eval.final_chunks=[2]")


def base_of(testbed: Testbed) -> str:
    return base_image(testbed.engine, testbed.base_archive)


def preset(operator: Operator, *settings: str) -> list[str]:
    """Words of a set-up that builds the image with torch and trains the tiny preset."""
    words = ["--image", "none", "--image-base", base_of(operator.testbed), "--recreate", "--preset", "tiny"]
    wheels = operator.testbed.site.pip_find_links
    words += ["--pip-find-links", wheels] if wheels else []
    return [*words, *(word for setting in (*SHORT, *settings) for word in ("--set", setting))]


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


def small(trial: str, **more: object) -> list[str]:
    """Words of `train` for two ranks whose steps take a moment, and that can go on after every step."""
    values = {key: value for key, value in leaves(SETTINGS) if not key.endswith("_name")}
    values |= {"train.total_steps": ALL_STEPS, "train.ranks": 2, "checkpoint.save_freq_steps": ALL_STEPS}
    values |= {"recover_after": 1, "trial_name": trial, **more}
    return ["train", "--preset", "tiny", *(f"{key}={json.dumps(value)}" for key, value in values.items())]


def status(operator: Operator, *words: str) -> dict[str, Any]:
    done = operator("status", "--cluster", "default", "--json", *words)
    return {"progress": {"global_step": 0}, **json.loads(done.stdout), "exit_code": done.exit_code}


def await_status(
    operator: Operator, wanted: Callable[[dict[str, Any]], bool], seconds: float = 240.0
) -> dict[str, Any]:
    """Look until the status is as wanted; the status."""
    deadline = time.monotonic() + seconds
    while not wanted(seen := status(operator)):
        assert time.monotonic() < deadline, seen
    return seen


def weights(root: Path, trial: str) -> dict[str, Any]:
    """Tensors of a trial's last checkpoint."""
    (file,) = root.glob(f"checkpoints/*/*/{trial}/actor/*globalstep{ALL_STEPS}/model.safetensors")
    return dict(load_file(file))


def evaluation(*more: str) -> list[str]:
    """Words of an evaluation of the first test's run."""
    return ["eval", "--cluster", "default", "--model-path", "tiny-recall/run1", "--output-path", "scores", *more]


def person(
    operator: Operator, pair: list[Node], folder: Path, name: str, account: str, sudo_password: str = ""
) -> Operator:
    """Somebody with a home of their own, who logs in to the hosts as an unprivileged account."""
    one = Operator(operator.testbed, folder / name, operator.image, username=account, sudo_password=sudo_password)
    one.environment |= {"USER": name, "LOGNAME": name}
    done = one.setup("--image", "none", "--image-base", base_of(operator.testbed), hosts=pair)
    assert done.exit_code == 0, done.text
    return one
