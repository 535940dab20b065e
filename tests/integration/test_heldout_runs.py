"""Real runs record their held-out tasks before and after training, and `clusterkit trace` and the report show them."""

from __future__ import annotations

import re
import subprocess

from commandline import run_clusterkit
from runs import SHORT_WARMUP, Forks, NewTrial, Trial

from clusterkit.runs.final_evaluation import read_summary, summary_lines
from clusterkit.runs.trace.heldout import heldout_tasks
from clusterkit.runs.trials import choose_trial


def clusterkit(trial: Trial, *words: str) -> subprocess.CompletedProcess[str]:
    return run_clusterkit(*words, "--here", "--fileroot", trial.config.fileroot)


def test_a_run_shows_how_its_memory_changed_at_each_section_before_and_after_training(reference: Trial) -> None:
    tasks = heldout_tasks(choose_trial(reference.config, named_by_user=True).run)
    measured = {r["name"]: r["accuracy"] for r in reference.records("eval")}

    for name in ("before", "after"):  # the greedy evaluation of the closing table, all of whose tasks are kept here
        passes = [getattr(task, name) for task in tasks]
        assert sum(one.scores["accuracy"] for one in passes) / len(tasks) == measured[name]
        assert all(len(one.memories) == len(task.sections) for one, task in zip(passes, tasks, strict=True))
    for number, task in enumerate(tasks):
        (gold,) = task.gold
        assert len(gold.places) == 1
        text = clusterkit(reference, "trace", "small/run1", "--heldout", "--task", str(number)).stdout
        assert f"question  {task.question}\ngold      {task.answers[0]}\n" in text
        assert f"section {gold.places[0].section} of {len(task.sections)}, with [1]" in text
    page = clusterkit(reference, "report", "--out", "-").stdout
    assert all(f'"text":"{task.gold[0].sentence}"' in page for task in tasks)


def test_what_a_run_measures_is_told_under_its_own_name(reference: Trial, forks: Forks, new_trial: NewTrial) -> None:
    shared = new_trial(reward={"name": "f1"}, **SHORT_WARMUP)
    shared.change(**{"train.total_steps": 1, "eval.num_tasks": 4})
    assert forks.run(shared) == 0, shared.said()

    for trial, name in ((reference, "accuracy"), (shared, "F1")):
        log = (trial.paths.logs / "main.log").read_text()
        told = re.findall(r"Evaluation (before|after) \(training lengths\): (\S+) \d", log)
        assert told == [("before", name), ("after", name)]
        assert {one["score_name"] for one in trial.records("eval")} == {name}
        summary = read_summary(choose_trial(trial.config, named_by_user=True).run)
        assert summary is not None
        assert summary_lines(summary)[0].startswith(f"held-out {name} (4 tasks, greedy)")


def test_a_run_may_keep_none_and_go_on_with_some(forks: Forks, new_trial: NewTrial) -> None:
    trial = new_trial(**{"train.total_steps": 1, "eval.save_trajectories": 0, **SHORT_WARMUP})
    assert forks.run(trial) == 0, trial.said()

    refused = clusterkit(trial, "trace", "--heldout")
    assert refused.returncode == 1
    assert "small/run1 has no record of held-out tasks" in refused.stderr
    # It goes on with other settings of the evaluation, which are no matter of what is learned.
    trial.change(**{"train.total_steps": 2, "eval.save_trajectories": 1})
    assert forks.run(trial) == 0, trial.said()
    text = clusterkit(trial, "trace", "--heldout").stdout
    assert "held-out task 0 of 1" in text
    assert "There is no record from before the first step" in text
