"""What a run was started with and how busy its machine is, and that every place of numbers calls them the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builders import small_config

import trainer.machine
from clusterkit.common.origin import SWITCHES, masked, origin_environment
from clusterkit.observe.report.charts import numbers_of
from clusterkit.observe.report.source import RunReader
from clusterkit.runs.directory import RunDirectory
from trainer.base_run import Attempt, SteppedRun
from trainer.checkpoint.start import Start
from trainer.engines import sglang_setting
from trainer.machine import GIB, Usage, commit, origin
from trainer.metrics import Monitor
from trainer.schedule import Schedule
from trainer.train import flash4
from trainer.train.distributed import single_world


class Sink:
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def scalars(self, values: dict[str, float], step: int) -> None:
        self.values |= values

    def close(self) -> None:
        pass


class Run(SteppedRun):
    """The part of a run that reports a step."""

    def run(self) -> None:
        self._report_step(1, {"task_reward": 0.5, "n_tokens": 70.0}, 140.0, time.perf_counter() - 2, ["t1"])

    def _publish(self, version: int) -> None:
        raise NotImplementedError

    def _checkpoint(self, number: int) -> None:
        pass


def test_tensorboard_wandb_and_the_page_have_the_same_names(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path, "me", "tiny-recall", "run1")
    run.logs.mkdir(parents=True)
    sink = Sink()
    monitor = Monitor(run.logs, 1, [sink])
    trained = Run(Attempt(small_config(), run.logs, single_world(), monitor, lambda: False, Start(None)))
    trained.course = Schedule(4, 4, 64, 16)
    with trained.clock.phase("train"):
        pass
    trained.run()
    trained.monitor.close()

    page = numbers_of([RunReader(run).read()])
    assert page.keys() == sink.values.keys()
    assert {name: series[0].mean[0] for name, series in page.items()} == sink.values
    names = {"task_reward", "n_tokens", "step_time_s", "tokens_per_s", "time/train", "time/other"}
    assert names <= page.keys()
    assert sink.values["tokens_per_s"] == pytest.approx(70, rel=0.1)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")
def test_the_use_of_cores_and_memory_is_that_since_the_last_look() -> None:
    usage = Usage()
    ends = time.process_time() + 0.3
    while time.process_time() < ends:
        pass
    found = usage.take()
    usage.close()

    assert 0.5 / (os.cpu_count() or 1) < found["cpu_share"] <= 1
    assert 0 < found["memory_gib"] < origin()["machine"]["memory_gib"]


def driver(_: str) -> Any:
    """Stands in for NVIDIA's library, as there is no GPU to be had: two GPUs, one of them busy, the other one lost."""

    def put(place: Any, name: str, value: int, code: int = 0) -> int:
        setattr(place._obj, name, value)
        return code

    def name(handle: Any, text: Any, _length: int) -> int:
        text.value = f"GPU {handle.value}".encode()
        return 0

    return SimpleNamespace(
        nvmlInit_v2=lambda: 0,
        nvmlDeviceGetCount_v2=lambda number: put(number, "value", 2),
        nvmlDeviceGetHandleByIndex_v2=lambda index, handle: put(handle, "value", index + 1),
        nvmlDeviceGetName=name,
        nvmlDeviceGetUtilizationRates=lambda handle, rates: put(rates, "gpu", 90 if handle.value == 1 else 0),
        nvmlDeviceGetMemoryInfo=lambda handle, room: put(room, "used", 7 * GIB, 0 if handle.value == 1 else 15),
    )


def test_gpus_are_looked_at_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer.machine.ctypes, "CDLL", driver)
    monkeypatch.setattr(trainer.machine, "SAMPLE_SECONDS", 0.01)

    assert origin()["machine"]["gpus"] == ["GPU 1", "GPU 2"]
    usage = Usage()
    found: dict[str, float] = {}
    while "gpu_share" not in found:
        found = usage.take()
    usage.close()
    assert (found["gpu_share"], found["gpu_memory_gib"]) == (0.45, 7.0)


@pytest.mark.parametrize(
    ("typed", "recorded"),
    [
        ("judge.url=http://me:secret@host:80/v1", "judge.url=http://me:***@host:80/v1"),
        ("'servers.flags=[--api-key,secret,--x]'", "'servers.flags=[--api-key,***,--x]'"),
        ('["--api-key", "secret"]', '["--api-key", "***"]'),
        ("--hf-token-file /a servers.url=http://host:8000/v1", "--hf-token-file /a servers.url=http://host:8000/v1"),
    ],
)
def test_what_is_recorded_of_a_command_has_no_secret(typed: str, recorded: str) -> None:
    assert masked(typed) == recorded


def test_a_run_knows_its_command_its_commit_and_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/clusterkit", "train", "agent.name=a b"])
    environment = origin_environment()
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    found = origin()
    assert found["command"] == "clusterkit train 'agent.name=a b'"
    assert found["machine"]["cores"] == os.cpu_count()
    assert isinstance(found["machine"]["gpus"], list)
    if (Path(__file__).parents[2] / ".git").exists():
        head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        assert found["code"].removesuffix("+") == head


def test_kernels_that_a_user_chose_hold_where_the_run_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {flash4.SWITCH, sglang_setting.OUTPUT_LAYER} == set(SWITCHES)
    monkeypatch.delenv(sglang_setting.OUTPUT_LAYER, raising=False)
    monkeypatch.setenv(flash4.SWITCH, "0")

    found = origin_environment()
    assert found[flash4.SWITCH] == "0"
    assert sglang_setting.OUTPUT_LAYER not in found


def test_code_that_was_sent_to_a_host_knows_the_commit_of_the_operator(tmp_path: Path) -> None:
    """There it lies in a folder without git."""
    folder = tmp_path / "trainer"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "machine.py").write_bytes((Path(__file__).parents[2] / "trainer" / "machine.py").read_bytes())
    program = "import json; from trainer.machine import origin; print(json.dumps(origin()))"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "CLUSTERKIT_COMMIT": "abc+"}

    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, cwd=tmp_path
    )

    assert json.loads(done.stdout)["code"] == "abc+"
    assert commit() != "abc+"
