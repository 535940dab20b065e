"""Runs that learn from examples, and runs that learn nothing; both stopped and gone on with."""

from __future__ import annotations

import csv
import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from evalparts import chat_checkpoint
from runs import Forks, NewTrial, Trial, command

from clusterkit.runs.directory import RunDirectory
from clusterkit.runs.final_evaluation import read_summary, summary_lines
from clusterkit.runs.status import observe
from clusterkit.runs.trials import TrialState, choose_trial
from clusterkit.ui.run_status import status_lines
from trainer.base_run import Attempt
from trainer.checkpoint import export
from trainer.checkpoint.start import Start
from trainer.metrics import Monitor
from trainer.paths import RunPaths
from trainer.sft.encoding import Encoder
from trainer.sft.loop import SftRun
from trainer.train.distributed import single_world
from trainer.types import Row

NAMES, THINGS = ("ada", "bo", "cleo"), ("lamp", "chair", "table", "spoon")
COUNT = 12 * 3
"""Of all examples that there are."""


def examples(path: Path, *, chats: bool = False) -> Path:
    """Who holds what, twice over: the answer is in the prompt."""
    rows: list[dict[str, Any]] = []
    for name in NAMES:
        for thing in THINGS:
            for other in range(3):
                prompt = f"{name} has {thing} . {NAMES[other]}x has {THINGS[other]} . what has {name} ?"
                messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": thing}]
                again = [{"role": "user", "content": "who ?"}, {"role": "assistant", "content": name}]
                rows.append({"messages": [*messages, *again]} if chats else {"prompt": prompt, "answer": thing})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sft(new_trial: NewTrial, tmp_path: Path, name: str = "trial", **settings: Any) -> Trial:
    file = tmp_path / "examples.jsonl"
    changes = {"task.path": str(file if file.exists() else examples(file)), "task.name": "sft", "trainer.type": "sft"}
    return new_trial(name, **{**changes, "train.learning_rate": 1e-2, "task.eval_fraction": 0.2, **settings})


def run_directory(trial: Trial) -> RunDirectory:
    return choose_trial(trial.config, named_by_user=True).run


def test_examples_are_learned(forks: Forks, new_trial: NewTrial, tmp_path: Path) -> None:
    trial = sft(new_trial, tmp_path, **{"train.total_steps": 30})

    assert forks.run(trial) == 0, trial.said()

    steps = trial.records("step")
    assert "Log-probs are the model's own" in trial.log().partition("Epoch")[0]
    losses = [step["stats"]["loss"] for step in steps]
    assert losses[-1] < losses[0] / 2
    # One answer word and the end token of each of the batch's four examples; prompts carry no loss.
    assert all(step["stats"]["trained_tokens"] == 8 for step in steps)
    measured = {(r["name"], r["global_step"]): r["loss"] for r in trial.records("eval")}
    assert measured["before", 0] > measured["after", 30]
    assert ("heldout", 5) in measured
    took = [r["seconds"] for r in trial.records("eval") if r["name"] == "before"]
    assert [line["seconds"] for line in run_directory(trial).measured_before()] == took
    summary = trial.summary()
    assert summary["heldout_loss"] == {"before": measured["before", 0], "after": measured["after", 30]}
    assert any("loss per token" in line for line in summary_lines(summary))
    assert Path(summary["checkpoint"], "model.safetensors").is_file()
    # Each example once an epoch, none that is held out.
    epoch = [task for step in steps[: steps[0]["steps_per_epoch"]] for task in step["task_ids"]]
    assert len(set(epoch)) == len(epoch) <= COUNT - summary["num_tasks"]


def test_log_probs_are_compared_on_the_longest_example_whichever_comes_first(
    forks: Forks, new_trial: NewTrial, tmp_path: Path
) -> None:
    with examples(tmp_path / "examples.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "ada " * 55, "answer": "lamp"}) + "\n")
    trial = sft(new_trial, tmp_path, **{"train.total_steps": 1, "task.train_size": 99})

    assert forks.run(trial) == 0, trial.said()

    assert "of a row of 59" in trial.log()


BACKGROUND = {"checkpoint.async_recover": True}


@pytest.mark.parametrize(
    ("ending", "settings"),
    [
        (signal.SIGTERM, {}),
        (signal.SIGKILL, {}),
        (signal.SIGTERM, {**BACKGROUND, "model.dtype": "bfloat16"}),
        (signal.SIGKILL, BACKGROUND),
    ],
)
def test_supervised_run_that_was_stopped_ends_as_one_that_was_not(
    forks: Forks, new_trial: NewTrial, tmp_path: Path, ending: signal.Signals, settings: dict[str, Any]
) -> None:
    whole = sft(new_trial, tmp_path, "whole", **settings)
    assert forks.run(whole) == 0, whole.said()
    trial = sft(new_trial, tmp_path, "cut", **settings)
    attempt = forks.start(trial)
    assert attempt.reach(lambda: len(trial.records("recover")) >= 3)
    attempt.send(ending)
    assert attempt.end() == (130 if ending == signal.SIGTERM else -9)

    assert forks.run(trial) == 0, trial.said()

    assert trial.records("attempt")[-1]["resume_step"] >= 2
    assert trial.summary()["parameter_sha256"] == whole.summary()["parameter_sha256"]
    assert trial.trained_tasks() == whole.trained_tasks()
    kept = whole.records("recover")
    assert kept[-1]["global_step"] == whole.summary()["global_step"]
    assert all(0 < record["stall_s"] <= record["seconds"] for record in kept)
    assert all(step["timings"]["checkpoint"] > 0 for step in whole.records("step")[1:])


def test_examples_that_were_edited_in_place_are_refused_at_a_recover_checkpoint(
    forks: Forks, new_trial: NewTrial, tmp_path: Path
) -> None:
    trial = sft(new_trial, tmp_path, **{"train.total_steps": 1})
    assert forks.run(trial) == 0, trial.said()
    file = tmp_path / "examples.jsonl"
    text = file.read_text()
    file.write_text(text.replace("lamp", "lump"))
    trial.change(**{"train.total_steps": 2})

    assert forks.run(trial) == 2

    told = f"settings or data (checkpoint -> now):\n  task.path/examples.jsonl: {len(text)} bytes, sha256 "
    assert told in trial.said()
    file.write_text(text)
    assert forks.run(trial) == 0, trial.said()
    assert trial.records("attempt")[-1]["resume_step"] == 1


def test_two_ranks_learn_what_one_does(new_trial: NewTrial, tmp_path: Path) -> None:
    losses = []
    for ranks in (1, 2):
        trial = sft(new_trial, tmp_path, f"ranks{ranks}", **{"train.ranks": ranks, "train.total_steps": 4})
        process = command(trial)
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        losses.append([step["stats"]["loss"] for step in trial.records("step")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_no_checkpoint_is_written_with_a_tokenizer_that_another_thread_makes_rows_with(
    new_trial: NewTrial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = sft(new_trial, tmp_path, **{"train.total_steps": 2, "checkpoint.save_freq_steps": 1}).config
    model, logs = chat_checkpoint(tmp_path / "model", window=256), RunPaths.of(config).logs
    logs.mkdir(parents=True)
    encoding, writing = set[int](), set[int]()
    rows, describe = Encoder.rows, export.save_description

    def noted_rows(self: Encoder, *arguments: Any) -> list[Row]:
        encoding.add(id(self.tokenizer))
        return rows(self, *arguments)

    def noted_description(lm: Any, dtype: Any, tokenizer: Any, folder: Path) -> None:
        writing.add(id(tokenizer))
        describe(lm, dtype, tokenizer, folder)

    monkeypatch.setattr(Encoder, "rows", noted_rows)
    monkeypatch.setattr(export, "save_description", noted_description)
    SftRun(Attempt(config, model, single_world(), Monitor(logs, 1), lambda: False, Start(None))).run()

    assert encoding
    assert writing
    assert not encoding & writing


def test_every_answer_of_a_chat_is_learned(forks: Forks, new_trial: NewTrial, tmp_path: Path) -> None:
    file = examples(tmp_path / "chats.jsonl", chats=True)
    trial = sft(new_trial, tmp_path, **{"task.path": str(file), "train.total_steps": 1})

    assert forks.run(trial) == 0, trial.said()

    (step,) = trial.records("step")
    assert (step["stats"]["trained_rows"], step["stats"]["trained_tokens"]) == (8, 16)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": "who ?"}', "line 1: column 'answer' is missing"),
        ('{"messages": [{"role": "user", "content": "who ?"}]}', "line 1: no message with role assistant"),
        ('{"messages": [{"role": "user"}]}', "line 1: message 1 must have a role and a content"),
        ("", "the file is empty"),
        ('{"prompt": "who ?", "answer": "ada"}', "all 1 examples are held out"),
    ],
)
def test_a_file_that_holds_no_examples_is_refused(
    forks: Forks, new_trial: NewTrial, tmp_path: Path, line: str, said: str
) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(line)
    trial = sft(new_trial, tmp_path, **{"task.path": str(file)})

    assert forks.run(trial) == 2

    assert said in trial.said()


def rollouts(new_trial: NewTrial, name: str = "trial", **settings: Any) -> Trial:
    return new_trial(name, **{"trainer.type": "null", "eval.num_tasks": 18, "rollout.group_size": 2, **settings})


def table(trial: Trial) -> list[dict[str, str]]:
    with (trial.paths.logs / "rollouts" / "table.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_trajectories_without_learning(forks: Forks, new_trial: NewTrial) -> None:
    trial = rollouts(new_trial)

    assert forks.run(trial) == 0, trial.said()

    rows, summary = table(trial), trial.summary()
    assert len({row["task_id"] for row in rows}) == 18
    assert len(rows) == 36
    assert summary["rollouts"]["mean_reward"] == pytest.approx(sum(float(row["reward"]) for row in rows) / 36)
    assert [step["global_step"] for step in trial.records("step")] == [1, 2, 3, 4, 5]
    assert not list(trial.paths.checkpoints.iterdir())
    assert not list(trial.paths.recover.iterdir())
    shown = summary_lines(read_summary(run_directory(trial)) or {})
    assert shown[0].startswith("18 tasks, 36 trajectories")
    assert choose_trial(trial.config, named_by_user=True).state is TrialState.COMPLETE


def test_rollouts_that_were_stopped_go_on_with_the_tasks_that_are_left(forks: Forks, new_trial: NewTrial) -> None:
    whole, trial = rollouts(new_trial, "whole"), rollouts(new_trial, "cut")
    assert forks.run(whole) == 0, whole.said()
    attempt = forks.start(trial)
    assert attempt.reach(lambda: len(trial.records("step")) >= 2)
    attempt.send(signal.SIGTERM)
    assert attempt.end() == 130
    done = len(trial.records("step"))
    assert choose_trial(trial.config, named_by_user=True).resume_step == done

    assert forks.run(trial) == 0, trial.said()

    assert trial.records("attempt")[-1]["resume_step"] == done
    assert table(trial) == table(whole)


def test_more_tasks_and_other_settings(forks: Forks, new_trial: NewTrial) -> None:
    trial = rollouts(new_trial, **{"eval.num_tasks": 6})
    assert forks.run(trial) == 0, trial.said()
    first = table(trial)
    assert forks.run(trial) == 0
    assert "nothing is left to roll out" in trial.said()
    trial.change(**{"eval.num_tasks": 9})

    assert forks.run(trial) == 0, trial.said()

    assert table(trial)[:12] == first
    assert len(table(trial)) == 18
    trial.change(**{"eval.split": "dev", "eval.num_tasks": 20})
    assert forks.run(trial) == 2
    assert "eval.split: test -> dev" in trial.said()


@pytest.mark.parametrize("kind", ["null", "grpo"])
def test_status_tells_how_many_questions_are_too_long_for_the_agent(
    forks: Forks, new_trial: NewTrial, tmp_path: Path, mini_hotpotqa: Path, kind: str
) -> None:
    lines = (mini_hotpotqa / "questions.jsonl").read_text().splitlines()
    limit = sorted(len(json.loads(line)["question"]) for line in lines)[len(lines) // 2]
    task = {"name": "hotpotqa", "path": str(mini_hotpotqa), "num_documents": 3}
    agent = {"template": "memagent", "chunk_tokens": 160, "max_question_tokens": limit, "max_memory_tokens": 8}
    model = chat_checkpoint(tmp_path / "model", window=2048)
    settings = {"model.path": str(model), "task": task, "agent": agent, "trainer.type": kind, "eval.every_steps": 0}
    trial = new_trial(**settings, **{"train.total_steps": 1, "rollout.batch_size": 1, "eval.num_tasks": 1})

    assert forks.run(trial) == 0, trial.said()

    (shown,) = [line for line in shown_status(trial) if line.startswith("warning") and "max_question_tokens" in line]
    assert re.search(r"[1-7] of 8 questions for training and \d of 4 held-out ones are over", shown)
    again = {"kind": "warning", "time": trial.records()[-1]["time"], "attempt": 2, "message": shown.split(None, 1)[1]}
    with (trial.paths.logs / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(again) + "\n")
    assert shown_status(trial).count(shown) == 1, "the next attempt's is the same"


def shown_status(trial: Trial) -> list[str]:
    return status_lines(observe(run_directory(trial), time.time()))


def test_greedy_trajectories_of_training_tasks(forks: Forks, new_trial: NewTrial) -> None:
    settings = {"rollout.temperature": 0, "eval.split": "train", "eval.num_tasks": 4}
    trial = rollouts(new_trial, **settings)

    assert forks.run(trial) == 0, trial.said()

    rows = table(trial)
    assert [row["task_id"] for row in rows[::2]] == [f"train-{n}" for n in range(4)]
    assert all(one["answer"] == other["answer"] for one, other in zip(rows[::2], rows[1::2], strict=True))
