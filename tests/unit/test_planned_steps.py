"""What a plan counts is what the run makes: for every preset and task, over data with as many rows as it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from realparts import write_jsonl

from clusterkit.capacity import timing
from clusterkit.capacity.plan import RunPlan, remote_plan
from clusterkit.capacity.preset_plan import plan_preset
from clusterkit.config import presets
from clusterkit.config.resolve import resolve
from trainer.config import RunConfig
from trainer.errors import UserError
from trainer.runs import train_size
from trainer.schedule import Schedule
from trainer.tasks import make_source
from trainer.tasks.examples import load_examples

PAIRS = [(name, task) for name in presets.size_names() for task in presets.load_size(name).tasks]
ROWS = {"math": 5 * 512 + 10, "memalpha": 562, "memagent": 300, "hotpotqa": 140, "sft": 400}
"""Of the data, with which a fifth more or less makes another number of steps."""


def math(folder: Path, rows: int) -> str:
    line = {"prompt": "1 + 1?", "solutions": ["\\boxed{2}"]}
    write_jsonl(folder / "problems.jsonl", [{"query_id": f"q{n}", **line} for n in range(rows)])
    return f"task.path={folder} task.dataset=problems.jsonl"


def sft(folder: Path, rows: int) -> str:
    write_jsonl(folder / "examples.jsonl", [{"prompt": f"{n} + 1?", "answer": str(n + 1)} for n in range(rows)])
    return f"task.path={folder / 'examples.jsonl'}"


def memalpha(folder: Path, rows: int) -> str:
    asked = json.dumps([{"question": "Who?", "answer": "He"}])
    both: list[dict[str, Any]] = [
        {"instance_id": f"i{n}", "data_source": f"s{n % 8}", "chunks": json.dumps(["He came."])}
        | {"questions_and_answers": asked}
        for n in range(rows + 20)
    ]
    write_jsonl(folder / "train.jsonl", both[:rows])
    write_jsonl(folder / "test.jsonl", both[rows:])
    return f"task.path={folder}"


def hotpotqa(folder: Path, rows: int) -> str:
    """Half as many again: the data set has more questions than are asked for, and a fifth of them is held out."""
    count = rows + rows // 2
    documents = [{"id": f"d{n}", "title": f"Town {n}", "text": f"Town {n} has a river."} for n in range(3 * count)]
    gold: list[dict[str, Any]] = [
        {"id": f"q{n}", "question": f"What has town {n}?", "answers": ["a river"], "source": "made"}
        | {"gold_titles": [f"Town {n}"], "supporting": [f"d{n}"], "own_documents": [f"d{n}"]}
        for n in range(count)
    ]
    write_jsonl(folder / "questions.jsonl", gold)
    write_jsonl(folder / "documents.jsonl", documents)
    return f"task.path={folder}"


WRITERS = {"math": math, "memalpha": memalpha, "hotpotqa": hotpotqa, "memagent": hotpotqa, "sft": sft}


def planned_and_run(folder: Path, preset: str, task: str, *more: str) -> tuple[Schedule, Schedule]:
    """The schedule that a plan without the data is made with, and that of the run."""
    if task not in WRITERS:
        config = resolve(preset, task, more).config
        return timing.schedule(config), Schedule.of(config, train_size(config))
    rows = ROWS[task]
    here = WRITERS[task](folder, rows).split()
    settings = [f"task.train_size={rows}", *more]
    config = resolve(preset, task, [*settings, *here]).config
    planned = config if task == "sft" else resolve(preset, task, settings).config  # which has no data but one's own
    return timing.schedule(planned), Schedule.of(config, train_size(config))


@pytest.mark.parametrize(("preset", "task"), PAIRS)
def test_planned_steps_are_the_steps_of_the_run(tmp_path: Path, preset: str, task: str) -> None:
    planned, run = planned_and_run(tmp_path, preset, task, "train.total_steps=0")

    assert planned == run


def test_areals_mathematics_trains_on_every_row() -> None:
    plan = plan_preset("7B_n4")

    assert plan.config.task.eval_fraction == 0
    assert plan.as_dict()["steps"] == 1035
    assert "at most 106000 rows to train on, 207 steps an epoch; none is held out" in "\n".join(
        finding.message for finding in plan.findings
    )


def test_a_part_that_is_held_out_when_asked_is_not_planned_with(tmp_path: Path) -> None:
    here = math(tmp_path, 1000).split()
    settings = ["task.eval_fraction=0.2", "rollout.batch_size=8", "train.minibatches=1", *here]
    config = resolve("135M_cpu", "math", settings).config
    far = resolve("7B_n4", "math", ["task.eval_fraction=0.2"]).config

    assert timing.schedule(config) == Schedule.of(config, train_size(config))
    assert train_size(config) < 1000
    assert timing.schedule(far).train_size == 84_800


def test_the_questions_of_a_folder_are_counted(tmp_path: Path) -> None:
    whole, divided = tmp_path / "whole", tmp_path / "divided"
    for place, rows in {whole: 80, divided / "train": 80, divided / "dev": 40, divided / "test": 40}.items():
        place.mkdir(parents=True)
        hotpotqa(place, rows)

    def told(folder: Path, *more: str) -> tuple[str, RunConfig]:
        plan = plan_preset(
            "135M_read", None, [f"task.path={folder}", "supervised.dataset=", "task.num_documents=2", *more]
        )
        return next(finding.message for finding in plan.findings if finding.check == "data"), plan.config

    for folder in (whole, divided):  # at most: the run leaves out questions that are too long
        message, config = told(folder)
        assert message == f"at most {train_size(config)} rows to train on, {train_size(config) // 16} steps an epoch"
    assert train_size(config) == 120
    assert told(divided, "task.train_size=32")[0].startswith("at most 32 rows to train on, 2 steps")
    assert told(tmp_path / "nowhere")[0].startswith("at most 65536 rows")


@pytest.mark.parametrize("divided", [False, True])
def test_no_more_held_out_questions_are_planned_than_there_are(tmp_path: Path, divided: bool) -> None:
    for place, rows in {"train": 80, "dev": 40, "test": 20}.items() if divided else [("", 80)]:
        (tmp_path / place).mkdir(exist_ok=True)
        hotpotqa(tmp_path / place, rows)

    def plan(*more: str) -> RunPlan:
        here = [f"task.path={tmp_path}", "supervised.dataset=", "task.num_documents=2", *more]
        return remote_plan(resolve("135M_read", None, here).config)

    for split in ("dev", "test"):
        config = plan(f"eval.split={split}").config
        held = make_source(config).num_heldout(split)
        assert 0 < held < config.eval.num_tasks == 128
        told = plan(f"eval.split={split}").lines()
        assert any(f"at most {held} held-out task{'s' * (held > 1)} before, after" in line for line in told)
        whole, few = (plan(f"eval.split={split}", f"eval.num_tasks={count}") for count in (128, 1))
        assert whole.evaluation_trajectories == held * few.evaluation_trajectories
        made = plan(f"eval.split={split}", "trainer.type=null", "eval.every_steps=0", "rollout.batch_size=2")
        assert (made.steps, f"at most {held} of {split}" in "\n".join(made.lines())) == (-(-held // 2), True)
    assert "at most 128 held-out tasks" in plan("task.path=/nowhere")._evaluation()


def test_held_out_rows_of_a_file_are_counted(tmp_path: Path) -> None:
    share = ("task.eval_fraction=0.02", "eval.num_tasks=32")
    examples = resolve("135M_cpu", "sft", [*sft(tmp_path, 400).split(), *share]).config
    problems = resolve("135M_cpu", "math", [*math(tmp_path, 1000).split(), *share]).config

    learned, held = len(load_examples(examples.task).heldout), make_source(problems).num_heldout("test")

    assert (0 < learned < 32, 0 < held < 32) == (True, True)
    assert remote_plan(examples)._evaluation().startswith(f"{learned} held-out tasks before")
    assert remote_plan(problems)._evaluation().startswith(f"at most {held} held-out tasks before")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["eval.every_steps=5"], "task.eval_fraction=0.02"),
        (["trainer.type=null"], "eval.split=train"),
    ],
)
def test_what_needs_a_held_out_part_is_refused_without_one(settings: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        resolve("135M_cpu", "math", settings)
    held: RunConfig = resolve("135M_cpu", "math", [*settings, "task.eval_fraction=0.1"]).config
    assert held.task.eval_fraction == 0.1
