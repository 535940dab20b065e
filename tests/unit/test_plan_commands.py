"""The command that a plan ends with is taken, and a dry run refuses what the run would refuse."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import Result
from realparts import write_jsonl
from typer.testing import CliRunner

from clusterkit.capacity.checks import check_memory
from clusterkit.capacity.memory import GIB, reported_gib
from clusterkit.capacity.preset_plan import PresetPlan, plan_lines, plan_preset
from clusterkit.capacity.shapes import shape_of
from clusterkit.cli.main import app
from clusterkit.common.finding import Level
from clusterkit.config import presets
from clusterkit.config.resolve import resolve
from clusterkit.hosts import inventory
from clusterkit.hosts.model import Cluster, Host
from clusterkit.runs.directory import hold_lock
from clusterkit.runs.trials import run_directory

PAIRS = [(name, task) for name in presets.size_names() for task in presets.load_size(name).tasks]
SIZES: list[dict[str, int]] = [{}, {"nodes": 1}, {"nodes": 2}, {"gpu_memory_gib": 40}]


def typed(*arguments: str) -> Result:
    """What the command line answers, in this process."""
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, with no clusters and nothing in the cache."""
    monkeypatch.chdir(tmp_path)
    for name in ("CONFIG", "CACHE", "DATA"):
        monkeypatch.setenv(f"CLUSTERKIT_{name}", str(tmp_path / name.lower()))
    return tmp_path


def fetch(place: Path) -> None:
    """Model and data of the presets for this machine, as far as they are looked at before a run."""
    model = place / "cache" / "models" / "smollm2-135m"
    model.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (model / name).write_text("{}")
    documents = [{"id": f"d{n}", "title": f"Town {n}", "text": f"Town {n} has a river."} for n in range(600)]
    questions = [
        {"id": f"q{n}", "question": f"What has town {n}?", "answers": ["a river"]}
        | {"gold_titles": [f"Town {n}"], "supporting": [f"d{n}"], "own_documents": [f"d{n}"]}
        for n in range(99)
    ]
    for folder in ("data/hotpotqa", "FOLDER"):
        (place / folder).mkdir(parents=True)
        write_jsonl(place / folder / "documents.jsonl", documents)
        write_jsonl(place / folder / "questions.jsonl", questions)
    for name in ("FILE", "FOLDER/traces"):
        write_jsonl(place / f"{name}.jsonl", [{"prompt": f"{n}?", "answer": "a"} for n in range(99)])
    problems = place / "inclusionAI/AReaL-RL-Data/data/boba_106k_0319.jsonl"
    problems.parent.mkdir(parents=True)
    write_jsonl(problems, [{"query_id": f"q{n}", "prompt": "1?", "solutions": ["\\boxed{1}"]} for n in range(600)])


def keep_cluster(hosts: int, name: str = "default") -> None:
    inventory.save(Cluster(name=name, hosts=tuple(Host(name=f"h{number}") for number in range(hosts))))


def planned(preset: str, task: str, size: dict[str, int]) -> PresetPlan | None:
    if "nodes" in size and not presets.load_size(preset).gpu_memory_gib:
        return None  # takes no GPUs, so that it is not for other hosts
    return plan_preset(preset, task, (), size.get("nodes"), None, size.get("gpu_memory_gib"))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(("preset", "task"), PAIRS)
def test_the_command_of_a_plan_is_taken(place: Path, preset: str, task: str, size: dict[str, int]) -> None:
    plan = planned(preset, task, size)
    if plan is None:
        return
    if not plan.fits:
        assert (plan.command, plan_lines(plan)[-1]) == (
            "",
            "It does not fit: change what is marked FAIL, and plan it again.",
        )
        return
    if plan.before and plan.here:
        refused = typed(*shlex.split(plan.command)[1:], "--dry-run", "--json")
        assert refused.exit_code
        assert task == "sft" or plan.before == str(refused.exception)
    fetch(place)
    keep_cluster(plan.config.n_nodes)

    ready = planned(preset, task, size)
    assert ready is not None
    answer = typed(*shlex.split(ready.command)[1:], "--dry-run", "--json")

    assert answer.exit_code == 0, answer.exception
    assert task == "sft" or ready.config.supervised.dataset or ready.before == ""
    said = json.loads(answer.stdout)
    assert said["plan"]["ranks"] == ready.config.ranks
    assert said["config"]["allocation_mode"] == ready.config.allocation_mode


def test_a_cluster_that_has_the_hosts_is_named(place: Path) -> None:
    keep_cluster(2, "small")
    keep_cluster(4, "large")

    plan = plan_preset("7B_n4")

    assert (plan.before, plan.command) == ("", "clusterkit train --preset 7B_n4 --cluster large")
    assert plan_preset("7B_n16").before.startswith("clusterkit setup --hostnames H1")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--preset", "7B_n4"], "takes 4 hosts"),
        (["--preset", "1.5B_n1"], "takes 8 GPUs"),
        (["--preset", "135M_cpu"], "clusterkit assets get smollm2-135m"),
        (["--preset", "tiny", "--task", "sft", "task.path=none.jsonl"], "none.jsonl"),
        (["--preset", "tiny", "experiment_name=busy"], "is being trained now"),
    ],
)
def test_a_dry_run_refuses_what_the_run_refuses_and_prints_the_plan(
    place: Path, arguments: list[str], said: str
) -> None:
    run = run_directory(resolve("tiny", None, ["experiment_name=busy", f"fileroot={place / 'runs'}"]).config, "run1")
    run.logs.mkdir(parents=True)
    with hold_lock(run.logs / "run.lock"):
        dry, real = typed("train", *arguments, "--dry-run"), typed("train", *arguments)

    assert said in str(dry.exception)
    assert str(real.exception) == str(dry.exception)
    assert getattr(dry.exception, "exit_code", None) == 2
    assert "# The plan (nothing has been written)" in dry.stdout
    assert real.stdout == ""
    assert list(run.logs.iterdir()) == [run.logs / "run.lock"]


def test_a_plan_says_how_many_ranks_train(place: Path) -> None:
    keep_cluster(4)

    here, there = (
        typed("train", "--preset", "7B_n4", "--dry-run"),
        typed("train", "--cluster", "default", "--preset", "7B_n4", "--dry-run"),
    )

    for answer in (here, there):
        assert "# ranks       16 train on 4 x 8 GPUs, 16 GPUs generate" in answer.stdout
        assert "# steps       at most 1035" in answer.stdout
        assert "  ranks: 16\n" in answer.stdout
    assert "on cluster default" in there.stdout
    assert there.exit_code == 0


def test_one_gpu_is_no_gpus(place: Path) -> None:
    shown = [
        typed("train", "--preset", "135M", "--dry-run").stdout,
        typed("presets", "plan", "135M").stdout,
        typed("doctor").stdout,
        str(typed("train", "--preset", "135M", "n_gpus_per_node=2").exception),
    ]

    assert "# ranks       1 trains on 1 x 1 GPU, 1 GPU generates, in turns on the same ones" in shown[0]
    assert "135M on needles, 1 x 1 GPU of 80 GB" in shown[1]
    assert "135M            takes 1 GPU; none here" in shown[2]
    assert "is for 1 GPU (1 generate and 1 train, the same ones)" in shown[3]
    assert [text for text in shown if re.search(r"(?<![\d.,])1 GPUs", text)] == []


def test_what_the_trainer_cannot_do_does_not_fit(place: Path) -> None:
    plan = plan_preset("1.5B_n1", None, ["allocation_mode=sglang:d4+fsdp:d2c2"])

    assert not plan.fits
    assert any("context parallel" in finding.message for finding in plan.findings)


@pytest.mark.parametrize(("sold", "level"), [(40, Level.WARN), (80, Level.OK), (39.2, Level.WARN), (24, Level.FAIL)])
def test_memory_is_that_of_a_real_card_with_room_left(sold: float, level: Level) -> None:
    """38.5 GiB are needed; a card of 40 GB has 39.4 for programs."""
    config = resolve("7B_n4").config

    found, *_ = check_memory(config, shape_of(config), int(reported_gib(sold) * GIB))

    assert found.level is level
    if sold == 40:
        assert "38.5 GiB of 39.4 GiB" in found.message
        assert "should leave 5% free" in found.message
        assert [change.key for change in plan_preset("7B_n4", gpu_memory_gib=40).changes] == ["train.logprob_chunk"]


@pytest.mark.parametrize(
    ("arguments", "basis"),
    [
        ({}, "measured on 32 H800 GPUs: AReaL"),
        ({"gpu_memory_gib": 40}, "estimated from 32 H800 GPUs with GPUs of 80 GB: AReaL"),
        ({"nodes": 2}, "estimated from 32, 128 H800 GPUs: AReaL"),
        (
            {"overrides": ["agent.max_final_tokens=1000"]},
            "estimated from 32 H800 GPUs with another agent.max_final_tok",
        ),
        ({"overrides": ["rollout.group_size=8"]}, "estimated from 32 H800 GPUs with another batch: AReaL"),
        ({"task": "memagent"}, "measured on 32 GPUs of a kind that was not told: MemAgent"),
    ],
)
def test_hours_name_the_gpus_that_they_were_measured_on(arguments: dict[str, object], basis: str) -> None:
    plan = plan_preset("7B_n4", **arguments)  # type: ignore[arg-type]

    assert plan.step is not None
    assert plan.step.basis.startswith(basis)
