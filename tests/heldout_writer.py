"""Held-out records of the real agent, task source and recorder; only the model is a fake."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from builders import byte_tokenizer

from trainer.agents.memagent import MemAgent
from trainer.config_agents import MemagentConfig
from trainer.config_tasks import HotpotqaConfig
from trainer.evaluate import EvalSpec, heldout_tasks
from trainer.heldout import HeldoutTrajectories
from trainer.rollout.controller import RolloutController
from trainer.tasks.hotpotqa import HotpotQA
from trainer.types import Completion, SamplingParams

Model = Callable[[str, bool], str]
"""From a prompt, and whether it asks for the answer, to a response."""
LIMITS = {"chunk_tokens": 150, "max_memory_tokens": 400, "max_final_tokens": 100, "max_question_tokens": 200}


class FakeEngine:
    """A fake: answers with what a function makes of the prompt's text."""

    version = 0

    def __init__(self, tokenizer: Any, model: Model) -> None:
        self.tokenizer, self.model = tokenizer, model

    async def generate(self, prompt_ids: list[int], params: SamplingParams, *, key: str = "") -> Completion:
        prompt = self.tokenizer.decode(prompt_ids)
        text = self.model(prompt, "Your answer:" in prompt)
        ids = [*self.tokenizer(text)["input_ids"], self.tokenizer.eos_token_id]
        return Completion(ids, [-1.0] * len(ids), "stop", 0)


def forgetful(_: str, final: bool) -> str:
    """Keep nothing."""
    return "I do not know." if final else "Nothing useful so far."


def careful(prompt: str, final: bool) -> str:
    """Keep sentences about births and towns, and answer with the last river that was kept."""
    memory = prompt.partition("<memory>\n")[2].partition("\n</memory>")[0]
    kept = [] if memory.startswith(("No previous", "Nothing")) else memory.split("\n")
    if final:
        rivers = [line.rpartition(" ")[2].rstrip(".") for line in kept if "river" in line]
        return f"\\boxed{{{rivers[-1] if rivers else 'unknown'}}}"
    section = prompt.partition("<section>\n")[2].partition("\n</section>")[0]
    kept += [line for line in section.split("\n") if "was born in" in line or "on the river" in line]
    return "\n".join(kept) or "Nothing useful so far."


def write_heldout(logs: Path, data: Path, name: str, model: Model, count: int = 8, **limits: Any) -> list[Any]:
    """Evaluate on the held-out tasks of a HotpotQA folder and record it in a run's folder; returns the tasks."""
    tokenizer = byte_tokenizer()
    agent = MemAgent(MemagentConfig.model_validate({**LIMITS, **limits}), tokenizer)
    source = HotpotQA(HotpotqaConfig(path=str(data), num_documents=4), 1)
    controller = RolloutController(agent, FakeEngine(tokenizer, model), 1)
    logs.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(1) as thread:  # a test with a browser has an event loop in its own
        groups = thread.submit(controller.run, *heldout_tasks(source, EvalSpec("test", 2))).result()
    HeldoutTrajectories(logs, count, agent, tokenizer).write(groups, name)
    return [source.heldout("test", index) for index in range(source.num_heldout("test"))]
