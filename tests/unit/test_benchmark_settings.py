"""Benchmarks that only GPUs can run to their end: what they would start is a configuration that a run accepts."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu_suite
import memory_step
import prompt_order
import server_profile

from trainer.config import RunConfig


def accepted(given: argparse.Namespace, folder: Path) -> RunConfig:
    case = memory_step.Case(given.staleness[0], given.orders[0], given.sharing[0])
    return RunConfig.model_validate(memory_step.settings(given, folder / "model", folder, case))


@pytest.mark.parametrize("part", gpu_suite.of_several("TOKENIZER", (), (), small=False), ids=lambda part: part.name)
def test_parts_for_several_gpus_use_as_many_as_they_are_given(part: gpu_suite.Part, tmp_path: Path) -> None:
    script, *words = part.argv
    if script == "lost.py" or script == "memory_step.py":
        config = accepted(memory_step.parse(words), tmp_path)
        assert config.n_gpus_per_node == part.gpus
        assert config.allocation is not None
        assert config.allocation.gpus == part.gpus
    elif "--layouts" in words:
        layouts = words[words.index("--layouts") + 1 :]
        shown = [word for word in layouts if word[0] == "d" and word[1:2].isdigit()]
        import training  # noqa: PLC0415 (seconds)

        cases = [training.Case("7B", "eager", 8192, 4096, 1, 1.0, "cuda", place) for place in shown]
        assert max(case.gpus for case in cases) == part.gpus
    else:
        assert str(part.gpus) in words


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--steps", "0"], "--steps: 0 is not at least 1"),
        (["agent.prompt_order=paper"], "agent.prompt_order: --arms, --seeds, --steps and --tasks say that"),
        (["NUM_ROLLOUT=5"], "train.total_steps: --arms"),
        (["train.share_prefixes=maybe"], "train.share_prefixes=maybe is not allowed"),
        (["--tasks", "9"], "has paper-seed11-steps3 with another eval.num_tasks: name another folder for --out"),
    ],
)
def test_prompt_order_says_what_is_wrong_before_anything_is_trained(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["prompt_order.py", "tiny", "--out", str(tmp_path), "--seeds", "11", "--steps", "3"]
    earlier = argparse.Namespace(
        preset="tiny", seeds=[11], steps=3, tasks=8, arms=["paper"], model="", flags="", settings=[]
    )
    (run,) = prompt_order.runs(earlier, tmp_path)
    prompt_order.file_of(run, tmp_path).write_text(yaml.safe_dump(run.config.model_dump(mode="json")))
    monkeypatch.setattr(sys, "argv", [*command, *words])
    monkeypatch.setattr(prompt_order, "train", lambda *_: pytest.fail("something was trained"))

    with pytest.raises(SystemExit) as ended:
        prompt_order.main()

    assert ended.value.code == 2
    assert said in capsys.readouterr().err


WHOLE_STEPS = [p for p in gpu_suite.parts("TOKENIZER", "DATA", "", cpu=False) if p.argv[0] == "memory_step.py"]


@pytest.mark.parametrize("part", WHOLE_STEPS, ids=lambda part: part.name)
def test_parts_of_whole_steps_are_runs_of_as_many_gpus_as_they_take(part: gpu_suite.Part, tmp_path: Path) -> None:
    given = memory_step.parse([word.replace("{seconds}", "60") for word in part.argv[1:]])

    assert accepted(given, tmp_path).gpus == part.gpus


def test_a_script_with_options_of_its_own_gets_settings_that_a_run_accepts(tmp_path: Path) -> None:
    # As rollout.py, rollout_settings.py and peers.py do: they know few of memory_step's options.
    own = argparse.Namespace(tokenizer="TOKENIZER", shape="1.5B", engine="sglang", documents=4, group=2)
    config = accepted(memory_step.like(own, colocated=True, flags="--enable-metrics"), tmp_path)
    assert (config.rollout.batch_size, config.rollout.group_size, config.servers.flags) == (4, 2, ["--enable-metrics"])
    assert str(config.allocation) == "sglang[rollout]:d1|fsdp[actor]:d1"


def test_a_profile_is_of_the_newest_trace_and_counts_what_runs_at_once_as_one_busy_gpu(tmp_path: Path) -> None:
    def trace(name: str, when: int, milliseconds: float) -> None:
        kernels = [("void gemm<a>(int)", 0.0, 0.6), ("void (anonymous namespace)::soft(int)", 0.5, 0.3)]
        events = [
            {
                "cat": "kernel",
                "name": kernel,
                "ts": 1000 * (step + start) * milliseconds,
                "dur": 1000 * long * milliseconds,
            }
            for step in range(4)
            for kernel, start, long in kernels
        ]
        path = tmp_path / f"{name}-TP-0.trace.json.gz"
        path.write_bytes(gzip.compress(json.dumps({"traceEvents": [*events, {"cat": "cpu_op", "dur": 1e9}]}).encode()))
        os.utime(path, (when, when))

    assert server_profile.facts(tmp_path, 4) == {}
    trace("1", 200, 1.0)
    trace("0", 100, 50.0)
    found = server_profile.facts(tmp_path, 4)

    assert found["kernels"] == [{"ms": 0.6, "name": "gemm<a>"}, {"ms": 0.3, "name": "soft"}]
    assert (found["step_ms"], found["busy"], found["launches"]) == (0.95, 0.842, 2)


def test_mathematics_is_a_workload_of_its_own(tmp_path: Path) -> None:
    config = accepted(memory_step.parse(["TOKENIZER", "--workload", "math", "--response", "512"]), tmp_path)
    assert (config.task.name, config.agent.name, config.agent.response_limit("final")) == ("math", "single_turn", 512)


def test_the_help_of_the_suite_names_its_parts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["gpu_suite.py", "--help"])
    with pytest.raises(SystemExit):
        gpu_suite.main()
    words = capsys.readouterr().out.partition("parts, in their order:")[2].split()
    assert {part.name for cpu in (False, True) for part in gpu_suite.parts("", "", "", cpu)} <= set(words)
