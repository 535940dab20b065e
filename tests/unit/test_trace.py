"""`clusterkit trace`: recorded trajectories of a real agent and reward, in the terminal, as JSON and on the page."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from builders import ScriptedEngine, byte_tokenizer
from run_writer import RunWriter
from typer.testing import CliRunner

from clusterkit.cli.report import app as report_app
from clusterkit.cli.trace import app
from clusterkit.runs.directory import RunDirectory, user_name
from clusterkit.runs.trace.source import recorded_steps
from trainer.agents.base import RolloutOptions
from trainer.agents.memalpha import MemAlpha
from trainer.config_agents import MemalphaAgentConfig
from trainer.config_rewards import MemalphaRewardConfig
from trainer.errors import RunError, UserError
from trainer.judge.reader import RuleReader
from trainer.rewards.memalpha import MemAlphaReward
from trainer.rollout.record import write_rollouts
from trainer.types import Completion, Evidence, Group, Question, Task, Trajectory, Turn

CHUNKS = ("bako lamp . dilu chair .", "kigo \x1b[31mhoney .")
TASK = Task(
    "train-7", "bako", ("lamp",), chunks=CHUNKS, meta={"source": "facts"},
    questions=(Question("bako", ("lamp",)), Question("kigo", ("honey",))),
)  # fmt: skip


def insert(content: str) -> str:
    arguments = {"memory_type": "semantic", "content": content}
    return f"<tool_call>{json.dumps({'name': 'new_memory_insert', 'arguments': arguments})}</tool_call>"


def rolled_out(*responses: str) -> Trajectory:
    """A trajectory of the real agent over scripted responses, with the real reward."""
    tokenizer = byte_tokenizer()
    config = MemalphaAgentConfig(chunk_tokens=100, max_memory_tokens=300, context_tokens=6000)
    agent, stop = MemAlpha(config, tokenizer), tokenizer.eos_token_id
    engine = ScriptedEngine([[*tokenizer(text)["input_ids"], stop] for text in responses], stop)

    async def run() -> Trajectory:
        one = await agent.rollout(agent.prepare(TASK), engine, RolloutOptions(1.0, lambda turn: turn))
        one.reward = await MemAlphaReward(MemalphaRewardConfig(), RuleReader()).score(TASK, one)
        return one

    return asyncio.run(run())


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path, user_name(), "memory", "run1")
    (directory.logs / "rollouts").mkdir(parents=True)
    good = rolled_out(insert("bako lamp") + insert("bako lamp"), insert("kigo honey <script>"))
    poor = rolled_out("Done", insert("made up"))
    group = Group(TASK, [good, poor])
    write_rollouts(directory.logs / "rollouts" / "step_3.jsonl.zst", [group], [0.5, -0.5], byte_tokenizer())
    return directory


def trace(run: RunDirectory, *options: str, app: Any = app) -> str:
    result = CliRunner().invoke(app, [*options, "--fileroot", str(run.fileroot)], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_every_turn_shows_what_its_calls_did_and_were_worth(run: RunDirectory) -> None:
    text = trace(run)

    assert "step 3, task train-7, sample 0 of 2" in text
    assert "+ new_memory_insert: kept as sem_0001 'bako lamp'  [valid; holds the answer to 1 question]" in text
    assert "x new_memory_insert: sem_0001 says exactly that already" in text
    assert "not worth keeping" in text  # the second entry is no passage of the chunk
    assert "1.00  bako -> lamp" in text
    assert "against the group's turns" in text
    assert "\x1b" not in text


def test_a_run_is_named_as_in_other_commands_too_and_once(run: RunDirectory) -> None:
    assert trace(run, "memory/run1") == trace(run, "--experiment", "memory", "--trial", "run1") == trace(run)
    assert trace(run, "run1", "--experiment", "memory") == trace(run)
    twice = CliRunner().invoke(app, ["run1", "--trial", "run2", "--fileroot", str(run.fileroot)])
    assert isinstance(twice.exception, UserError)
    assert "name the run twice" in str(twice.exception)


def test_another_sample_and_json(run: RunDirectory) -> None:
    found = json.loads(trace(run, "memory/run1", "--task", "train-7", "--sample", "1", "--json"))

    assert found["sample"] == 1
    assert [len(turn["calls"]) for turn in found["turns"]] == [0, 1]
    assert [one["score"] for one in found["asked"]] == [0.0, 0.0]
    assert found["turns"][0]["over"] < 0  # nothing was written, while others did


def test_the_page_has_all_samples_turn_by_turn(run: RunDirectory, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    trace(run, "--out", str(out), app=report_app)
    page = out.read_text()

    assert '"did":"kept as sem_0001","text":"bako lamp","worth":"valid; holds the answer to 1 question"' in page
    assert '"sample":1,' in page
    assert "honey \\u003cscript>" in page
    assert "honey <script>" not in page


def test_a_memagent_run_shows_the_memory_as_it_was_rewritten(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, user_name(), "memagent", "run1")
    (directory.logs / "rollouts").mkdir(parents=True)
    tokenizer = byte_tokenizer()

    def turn(kind: Any, text: str) -> Turn:
        ids = tokenizer(text)["input_ids"]
        return Turn(kind, [1], Completion(ids, [-1.0] * len(ids), "stop", 0))

    one = Trajectory(
        "t", [turn("update", "Ada lives in Arnby"), turn("final", r"\boxed{Arnby}")], 1.0, r"\boxed{Arnby}"
    )
    told = Evidence("Ada", "Ada lives in Arnby.")
    group = Group(Task("t", "Where?", ("Arnby",), evidence=(told, Evidence("", "Arnby is a town."))), [one])
    write_rollouts(directory.logs / "rollouts" / "step_1.jsonl.zst", [group], [0.0], tokenizer)

    text = trace(directory)
    assert "wrote  Ada lives in Arnby\n  has    the answer, [1]\n" in text
    assert "[1] Ada: Ada lives in Arnby.\n  [2] Arnby is a town.\n" in text
    assert text.count("  has  ") == 1  # the final answer is no memory
    assert "Where?" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--step", "9"), "step 9 is not recorded; there are 3"),
        (("--task", "5"), "step 3 has 1 tasks, none of them 5.*train-7"),
        (("--task", "nobody"), "no recorded step has a task nobody"),
        (("--sample", "2"), "choose --sample 0 to 1"),
    ],
)
def test_what_is_not_there_is_said_with_what_is(run: RunDirectory, options: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        trace(run, *options)


def test_a_run_without_trajectories_says_how_to_have_them(run: RunDirectory) -> None:
    next((run.logs / "rollouts").iterdir()).unlink()

    with pytest.raises(RunError, match=r"rollout\.save_trajectories=true"):
        trace(run)


def test_steps_that_were_undone_are_not_the_newest(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path).attempt().steps(1, 6)
    folder = writer.run.logs / "rollouts"
    folder.mkdir()
    for step in range(1, 7):
        (folder / f"step_{step}.jsonl.zst").touch()
    assert recorded_steps(writer.run) == [1, 2, 3, 4, 5, 6]

    writer.attempt(resume_step=3)
    assert recorded_steps(writer.run) == [1, 2, 3]
    writer.steps(4, 4)
    assert recorded_steps(writer.run) == [1, 2, 3, 4]
    writer.attempt()  # afresh
    assert recorded_steps(writer.run) == []
    writer.run.metrics.unlink()
    assert len(recorded_steps(writer.run)) == 6
