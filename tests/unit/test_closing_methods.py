"""Controls in the closing table of a run: the agent reads what was chosen of the document, as evaluations have it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builders import byte_tokenizer
from heldout_writer import LIMITS, FakeEngine, careful

from clusterkit.capacity.plan import remote_plan
from clusterkit.config.resolve import resolve
from evaluation.config import EvalConfig
from evaluation.methods import make_reader
from evaluation.suites import Finder
from trainer.agents import make_agent
from trainer.agents.base import RolloutOptions
from trainer.agents.ways import FoundText, make_ways
from trainer.config import RunConfig
from trainer.errors import UserError
from trainer.evaluate import (
    BEFORE,
    EvalResult,
    EvalSpec,
    check_lengths,
    closing_table,
    evaluate,
    heldout_tasks,
    store_before,
    table_specs,
)
from trainer.rollout.controller import RolloutController
from trainer.serving.host import expected_requests
from trainer.tasks.hotpotqa import HotpotQA
from trainer.types import Completion, SamplingParams

METHODS = ["rag", "gold", "long_context"]
WINDOW = 1500
"""Bytes: with the longest question and memory beside it a context of 12 documents is cut."""
MEMORY = 80


@dataclass
class Listening(FakeEngine):
    """A fake: answers as `careful`, and keeps what it was sent."""

    tokenizer: Any = field(default_factory=byte_tokenizer)
    prompts: list[list[int]] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__(self.tokenizer, careful)

    async def generate(self, prompt_ids: list[int], params: SamplingParams, *, key: str = "") -> Completion:
        self.prompts.append(list(prompt_ids))
        self.keys.add(key)
        return await super().generate(prompt_ids, params, key=key)


def config_of(data: Path, methods: Sequence[str] = METHODS, **changes: Any) -> RunConfig:
    sections = {
        "model": {"path": "/model"},
        "agent": {"template": "memagent", **LIMITS, "max_memory_tokens": MEMORY},
        "task": {"name": "hotpotqa", "path": str(data), "num_documents": 4},
        "eval": {"num_tasks": 2, "final_documents": [4, 12], "final_methods": list(methods)},
    }
    return RunConfig.model_validate({**sections, **changes})


def source_of(config: RunConfig) -> HotpotQA:
    return HotpotQA(config.task, config.seed)  # type: ignore[arg-type]


def controller_of(config: RunConfig, engine: FakeEngine, window: int = WINDOW) -> RolloutController:
    agent = make_agent(config, engine.tokenizer)
    return RolloutController(agent, engine, 1, window=window, ways=make_ways(config, agent, WINDOW))


def by_evaluation(config: RunConfig, method: str, task: Any) -> list[list[int]]:
    """The prompts of `clusterkit eval --methods METHOD` with reader=agent about a task."""
    asked = {"model_path": "m", "output_path": "o", "data_names": ["ruler_hqa@4"], "reader": "agent", "rag_top_k": 2}
    settings = EvalConfig.model_validate({**asked, "agent": config.agent})
    engine = Listening()
    suite = Finder(str(config.data_path)).suite("ruler_hqa@4")
    reader = make_reader(settings, method, engine.tokenizer, WINDOW, suite)  # type: ignore[arg-type]
    (prepared,) = reader.prepare([task])
    asyncio.run(reader.answer(prepared, engine, RolloutOptions(0.0, lambda turn: turn)))
    return engine.prompts


def test_a_run_sends_the_prompts_of_an_evaluation_by_the_agent(mini_hotpotqa: Path) -> None:
    config = config_of(mini_hotpotqa)
    source, cut = source_of(config), 0
    for method in METHODS:
        for documents in (0, 12):
            tasks, plan = heldout_tasks(source, EvalSpec("test", 2, documents=documents, method=method))
            for task in tasks:
                engine = Listening()
                (group,) = controller_of(config, engine).run([task], plan)
                assert engine.prompts == by_evaluation(config, method, task)
                assert group.task == task, "it is scored as the memory's answer is"
                assert "Updated memory:" in engine.tokenizer.decode(engine.prompts[0])
                cut += group.trajectories[0].counters.get("truncated_context", 0)
                if method == "long_context":
                    assert len(engine.prompts) == 2
    assert cut == 2, "the full context of 12 documents, of both questions"


def test_its_lines_follow_the_memorys_at_every_number_of_documents(mini_hotpotqa: Path) -> None:
    config = config_of(mini_hotpotqa, ["gold", "rag", "gold"])

    lines = [(spec.documents, spec.blank_memory, spec.method) for spec in table_specs(config)]

    assert lines[:3] == [(0, False, ""), (12, False, ""), (0, True, "")]
    assert lines[3:] == [(0, False, "gold"), (12, False, "gold"), (0, False, "rag"), (12, False, "rag")]
    assert [spec.is_mixture for spec in table_specs(config)] == [True] + 6 * [False]


def test_requests_of_all_lines_about_a_question_are_told_apart(mini_hotpotqa: Path) -> None:
    config = config_of(mini_hotpotqa)
    source, keys = source_of(config), dict[EvalSpec, set[str]]()
    for spec in table_specs(config):
        engine = Listening()
        evaluate(controller_of(config, engine).run, source, spec)
        keys[spec] = engine.keys
        assert len(engine.keys) == 2, "a question each"
    others = [spec for spec in keys if not spec.blank_memory]  # whose first prompts are the memory's own
    assert len(set.union(*(keys[spec] for spec in others))) == sum(len(keys[spec]) for spec in others)


def test_the_window_of_what_is_trained_on_is_not_that_of_the_full_context(mini_hotpotqa: Path) -> None:
    config, engine = config_of(mini_hotpotqa), Listening()
    window = make_agent(config, engine.tokenizer).longest_conversation()
    run = controller_of(config, engine, window).run

    evaluate(run, source_of(config), EvalSpec("test", 2, documents=12, method="long_context"))

    assert window < max(map(len, engine.prompts)) <= WINDOW


def test_servers_with_a_shorter_context_get_no_more_of_it(mini_hotpotqa: Path) -> None:
    servers = {"engine": "vllm", "context_length": WINDOW - 100}
    for more, longest in (({}, WINDOW), ({"servers": servers}, WINDOW - 100)):
        config = config_of(mini_hotpotqa, **more)
        way = make_ways(config, make_agent(config, byte_tokenizer()), WINDOW)["long_context"]
        assert isinstance(way, FoundText)
        assert way.longest_conversation() == longest


def result(accuracy: float) -> EvalResult:
    return EvalResult(accuracy, (accuracy, accuracy), {}, 2, 0, 1.0, tasks="same")


def test_before_is_of_the_same_way_to_read_and_older_files_know_the_memory_alone(tmp_path: Path) -> None:
    memory, rag = EvalSpec("test", 2), EvalSpec("test", 2, method="rag")
    store_before(tmp_path, {memory: result(0.1), rag: result(0.2)})

    def table() -> list[tuple[str, float | None, float]]:
        rows = closing_table(tmp_path, {memory: result(0.3), rag: result(0.4)})
        return [(row["method"], row["before"], row["after"]) for row in rows]

    assert table() == [("", 0.1, 0.3), ("rag", 0.2, 0.4)]
    older = json.loads((tmp_path / BEFORE).read_text())[:1]
    del older[0]["method"]
    (tmp_path / BEFORE).write_text(json.dumps(older))
    assert table() == [("", 0.1, 0.3), ("rag", None, 0.4)]


@pytest.mark.parametrize(
    ("preset", "task", "overrides"),
    [
        ("tiny", None, []),
        ("135M", "needles", []),
        ("135M_cpu", "hotpotqa", ["agent.name=single_turn"]),
        ("135M_cpu", "hotpotqa", ["agent.name=mine:Agent"]),
        ("135M_cpu", "hotpotqa", ["task.name=mine:Task"]),
    ],
)
def test_a_run_that_cannot_have_them_is_refused(preset: str, task: str | None, overrides: list[str]) -> None:
    with pytest.raises(UserError, match=r"eval\.final_methods=.*is for task\.name=hotpotqa with agent\.name=memagent"):
        resolve(preset, task, [*overrides, "eval.final_methods=rag"])


@pytest.mark.parametrize("word", ["agent.name=single_turn", "agent.name=mine:Agent", "task.name=mine:Task"])
def test_a_preset_has_them_for_its_own_agent_and_task_alone(word: str) -> None:
    assert resolve("135M_read", None, []).config.eval.final_methods == METHODS
    # What else the preset has for its task would be in the way of another.
    alone = [word, "supervised.dataset=", "eval.final_documents=[]"]
    assert resolve("135M_read", None, alone).config.eval.final_methods == []


def test_trajectories_under_way_go_on_while_a_text_is_chosen_and_cut(mini_hotpotqa: Path) -> None:
    config = config_of(mini_hotpotqa, ["rag"])
    controller = controller_of(config, Listening())
    cut, waited = controller.ways["rag"].prepare, []
    goes_on = threading.Event()

    def prepare(task: Any) -> Any:
        waited.append(goes_on.wait(30))
        return cut(task)

    controller.ways = {"rag": SimpleNamespace(prepare=prepare, rollout=controller.ways["rag"].rollout)}

    async def asked() -> None:
        wanted = heldout_tasks(source_of(config), EvalSpec("test", 1, method="rag"))
        groups = asyncio.ensure_future(controller.groups(*wanted))
        await asyncio.sleep(0)
        goes_on.set()
        await groups

    asyncio.run(asked())
    assert waited == [True]


def test_an_unknown_one_is_refused() -> None:
    with pytest.raises(UserError, match=r"final_methods.*long_context"):
        resolve("135M_cpu", "hotpotqa", ["eval.final_methods=[rag,no_context]"])


def test_gold_is_refused_before_anything_is_trained_where_it_is_not_known_what_answers(mini_hotpotqa: Path) -> None:
    config = config_of(mini_hotpotqa)
    source = source_of(config)
    check_lengths(config, source)

    known = source._made

    def untold(*arguments: Any) -> Any:
        task = known(*arguments)
        del task.meta["gold_documents"]
        return task

    source._made = untold  # type: ignore[assignment]
    with pytest.raises(UserError, match=r"not known which .* so gold in eval\.final_methods cannot be asked: take it"):
        check_lengths(config, source)
    check_lengths(config_of(mini_hotpotqa, ["rag", "long_context"]), source)


def test_servers_and_plans_count_them() -> None:
    def read(methods: str) -> RunConfig:
        return resolve("135M_read", None, [f"eval.final_methods={methods}", "eval.num_tasks=200"]).config

    none, some = read("[]"), read("rag,gold,long_context")
    assert (expected_requests(none), expected_requests(some)) == (7 * 200, (7 + 3 * 5) * 200)
    plans = remote_plan(none), remote_plan(some)
    assert plans[1].evaluation_trajectories - plans[0].evaluation_trajectories == 2 * 3 * 5 * 200
    # A section of the documents that were found, or one that fills the window; then the answer.
    answer, section = 220 + 30 + 160 + 32, 220 + 30 + 160 + 512 + 160
    tokens = 2 * 200 * 5 * (2 * (section + answer) + 1280 + answer)
    assert plans[1].evaluation_tokens - plans[0].evaluation_tokens == tokens
    assert "closing table at [8, 16, 32, 64] documents, with rag, gold, long_context;" in plans[1]._evaluation()
