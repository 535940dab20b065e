"""Agents, tasks and rewards of the user's own: the example of the docs as it stands there, and what is refused."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import zstandard
from commandline import run_clusterkit
from runs import ENVIRONMENT, REPOSITORY, Forks, NewTrial, Trial

from clusterkit.runs.final_evaluation import summary_lines

DOCS = REPOSITORY / "docs" / "custom.md"
FAST = [
    *("model.tiny.hidden_size=32", "model.tiny.num_layers=2", "model.tiny.intermediate_size=64"),
    *("warmup.recall_steps=2", "warmup.steps=2", "warmup.batch_size=4", "warmup.gate=0", "warmup.retries=0"),
    *("train.total_steps=2", "rollout.batch_size=4", "rollout.group_size=4", "eval.num_tasks=2", "train.threads=1"),
    "monitor.tensorboard=false",
]


def block(language: str) -> str:
    """The first code block of that language in docs/custom.md."""
    found = re.search(rf"^```{language}\n(.*?)^```$", DOCS.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


def clusterkit(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**ENVIRONMENT, "PYTHONPATH": str(REPOSITORY), "CLUSTERKIT_CACHE": str(folder / "cache")}
    return run_clusterkit(*arguments, cwd=folder, env=environment)


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    (metrics,) = folder.glob("runs/logs/*/shopping/run1/metrics.jsonl")
    found = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [record for record in found if record["kind"] == kind]


def test_the_example_of_the_docs_runs_as_it_stands(tmp_path: Path) -> None:
    source = block("python")
    assert len(source.splitlines()) < 55
    (tmp_path / "shopping.py").write_text(source)
    typed = shlex.split(block("bash").replace("\\\n", " "))
    assert typed[0] == "clusterkit"

    done = clusterkit(tmp_path, *typed[1:], *FAST)

    assert done.returncode == 0, done.stderr
    steps = records(tmp_path, "step")
    assert [step["task_ids"] for step in steps] == [[f"train-{n}" for n in range(first, first + 4)] for first in (0, 4)]
    # Three pieces of the list, as task.options.length=3 says, and the answer; 16 trajectories.
    assert all(step["stats"]["turns"] == 16 * 4 for step in steps)
    assert all(step["stats"]["failed_trajectories"] == 0 for step in steps)
    assert {r["name"] for r in records(tmp_path, "eval")} == {"before", "after"}
    # What a wrong thing of a list earns is reward.options.part=0.2, not the 0.1 of the source.
    (folder,) = tmp_path.glob("runs/logs/*/shopping/run1/rollouts")
    lines = [line for n in (1, 2) for line in zstandard.open(folder / f"step_{n}.jsonl.zst", "rt").readlines()]
    assert {json.loads(line)["reward"] for line in lines} <= {0.0, 0.2, 1.0}
    # An agent of one's own does not tell what it read: what it wrote is shown.
    shown = clusterkit(tmp_path, "trace", "--heldout", "--here", "--json")
    assert shown.returncode == 0, shown.stderr
    task = json.loads(shown.stdout)
    assert task["sections"] == ["", "", ""]
    assert [len(task[name]["memories"]) for name in ("before", "after")] == [3, 3]


def own(folder: Path, text: str) -> str:
    """Write a module of the user's own; returns its folder."""
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(text)
    return str(folder)


FIXED = """
class Fixed:
    def __init__(self, config):
        self.config = config

    async def score(self, task, trajectory):
        return self.config.options["value"] / 1
"""


def test_a_reward_may_wait_and_gets_its_options(forks: Forks, new_trial: NewTrial, tmp_path: Path) -> None:
    code = own(tmp_path / "code", FIXED)
    trial = new_trial(**{"code_dir": code, "reward": {"name": "mine:Fixed", "options": {"value": 3}}})
    trial.change(**{"train.total_steps": 2})

    assert forks.run(trial) == 0, trial.said()

    assert [step["stats"]["task_reward"] for step in trial.records("step")] == [3.0, 3.0]


MEASURING = """
class Measuring:
    def __init__(self, config):
        pass

    def score(self, task, trajectory):
        trajectory.metrics = {"grad_norm": -1.0, "cached_share": -2.0, "turns": -3.0, "mine": -4.0}
        return 1.0
"""


@pytest.mark.parametrize(("kind", "renamed"), [("grpo", {"grad_norm", "cached_share", "turns"}), ("null", {"turns"})])
def test_a_metric_takes_no_number_of_the_step(
    forks: Forks, new_trial: NewTrial, tmp_path: Path, kind: str, renamed: set[str]
) -> None:
    trial = new_trial(code_dir=own(tmp_path / "code", MEASURING), reward={"name": "mine:Measuring"})
    trial.change(**{"train.total_steps": 2, "trainer.type": kind, "eval.num_tasks": 8})

    assert forks.run(trial) == 0, trial.said()

    values = {"grad_norm": -1.0, "cached_share": -2.0, "turns": -3.0, "mine": -4.0}
    wanted = {f"reward/{name}" if name in renamed else name: value for name, value in values.items()}
    first, second = (step["stats"] for step in trial.records("step"))
    for stats in (first, second):
        assert {name: value for name, value in stats.items() if value < -0.5} == wanted
        assert all(stats[name] >= 0 for name in renamed)
    (told,) = (one["message"] for one in trial.records("warning") if "metrics of the reward" in one["message"])
    assert all(f"{name} as reward/{name}" in told for name in renamed)


def test_steps_in_a_row_that_teach_nothing_are_told_once(forks: Forks, new_trial: NewTrial, tmp_path: Path) -> None:
    code = own(tmp_path / "code", FIXED)
    trial = new_trial(**{"code_dir": code, "reward": {"name": "mine:Fixed", "options": {"value": 0.5}}})
    trial.change(**{"train.total_steps": 22, "eval.every_steps": 0})

    assert forks.run(trial) == 0, trial.said()

    (told,) = (warning["message"] for warning in trial.records("warning"))
    assert told.startswith("steps 1 to 20 had nothing to learn from: ")
    assert "(task_reward 0.5)" in told


UNTESTED = """
from trainer.tasks.recall import Recall

class Untested(Recall):
    def num_heldout(self, split):
        return 0
"""


@pytest.mark.parametrize("every", [0, 1])
def test_tasks_that_hold_nothing_out_are_trained_on_and_not_evaluated(
    forks: Forks, new_trial: NewTrial, tmp_path: Path, every: int
) -> None:
    trial = new_trial(**{"code_dir": own(tmp_path / "code", UNTESTED), "task": {"name": "mine:Untested"}})
    trial.change(**{"train.total_steps": 1, "eval.every_steps": every})

    code = forks.run(trial)

    if every:
        assert code == 2
        assert "no task is held out for eval.split=test" in trial.said()
        return
    assert code == 0, trial.said()
    assert (trial.records("eval"), trial.summary()["table"]) == ([], [])
    assert "No task is held out for eval.split=test" in trial.log()
    assert summary_lines(trial.summary())[0].startswith("nothing was held out")


def test_other_options_are_other_settings(forks: Forks, new_trial: NewTrial, tmp_path: Path) -> None:
    code = own(tmp_path / "code", FIXED)
    trial = new_trial(**{"code_dir": code, "reward": {"name": "mine:Fixed", "options": {"value": 3}}})
    trial.change(**{"train.total_steps": 1})
    assert forks.run(trial) == 0, trial.said()
    trial.change(**{"train.total_steps": 2, "reward": {"options": {"value": 4}}})

    assert forks.run(trial) == 2

    assert "reward.options: {'value': 3} -> {'value': 4}" in trial.said()


@pytest.mark.parametrize(
    ("settings", "source", "said"),
    [
        ({"reward.name": "mine:Wrong"}, FIXED, "has no class Wrong: its classes are Fixed"),
        ({"reward.name": "nowhere:Wrong"}, FIXED, "there is no module nowhere in PYTHONPATH and "),
        ({"agent.name": "mine:Fixed"}, FIXED, "class Fixed has no prepare and no rollout and no longest_conversation"),
        ({"reward.name": "mine:Fixed"}, FIXED, "the reward Fixed failed on task "),  # its option is missing
        ({"reward.name": "mine:Fixed"}, "import nothing_like_it", "imports nothing_like_it, which is not installed"),
        ({"reward.name": "mine:Fixed"}, "1 / 0", "importing mine fails: ZeroDivisionError"),
        ({"reward.name": "mine:Fixed"}, FIXED.replace("/ 1", "/ 0"), "the reward Fixed failed on task "),
        ({"reward.name": "mine:Fixed"}, FIXED.replace("self.config = config", "1 / 0"), "cannot be made: ZeroDivision"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_message(
    forks: Forks, new_trial: NewTrial, tmp_path: Path, settings: dict[str, str], source: str, said: str
) -> None:
    trial: Trial = new_trial(code_dir=own(tmp_path / "code", source), **settings)

    assert forks.run(trial) == 2

    assert said in trial.said()
    assert "Traceback" not in trial.said()
    assert not trial.records("step")


AGENT = """
from trainer.agents.base import Agent

class Mine(Agent):
    async def answer(self, task, ask):
        WHAT
"""


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("return self.nothing", "the agent Mine failed on every one of 4 trajectories"),
        ("return 7", "answer of Mine returned int: return a text"),
        ("return await ask('lamp ' * 200)", "the agent sent a conversation of 20"),
    ],
)
def test_an_agent_with_a_mistake_ends_the_run(
    forks: Forks, new_trial: NewTrial, tmp_path: Path, what: str, said: str
) -> None:
    trial = new_trial(code_dir=own(tmp_path / "code", AGENT.replace("WHAT", what)), **{"agent.name": "mine:Mine"})

    assert forks.run(trial) == 2

    assert said in trial.said()


def test_a_class_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    own(tmp_path, "print('hello')\nclass Mine:\n    pass\n")

    done = clusterkit(tmp_path, "train", "--preset", "tiny", "agent.name=mine:Mine")

    assert done.returncode == 2
    assert "class Mine has no prepare" in done.stderr
    assert not (tmp_path / "runs").exists()
