"""The rows of an evaluation: suites times ways of reading, and what defines each."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evaluation.config import FOUND, EvalConfig, Method, ServerConfig
from evaluation.grade import grading_identity
from evaluation.record import Key, RowRecord, wanted_keys
from evaluation.suites import Finder
from evaluation.suites.base import Suite
from trainer.config_agents import AGENT
from trainer.rewards.sources import needs_judge
from trainer.seeding import derive_seed

VERSION = 1
"""Raised when the same inputs would give other prompts or seeds, so that old answers are not taken for new ones."""
RECORDS = "records"


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table.

    method: None for problems, which have no document.
    name: what the table calls it: the suite, and how documents were read where that is not the memory agent.
    config: the evaluation's; of documents, with the lengths that they are read in.
    """

    suite: Suite
    method: Method | None
    name: str
    record: RowRecord
    greedy: bool
    samples: int
    config: EvalConfig

    def keys(self, questions: list[str]) -> list[Key]:
        """The answers that it wants."""
        return wanted_keys(questions, self.greedy, self.samples)

    @property
    def finished(self) -> bool:
        """Whether every answer is recorded and graded."""
        questions = self.record.questions
        if questions is None:
            return False
        keys = self.keys(questions)
        return not self.record.missing(keys) and not self.record.ungraded(keys)

    def seed(self, config: EvalConfig, key: Key, turn: int) -> int:
        """Seed of one response: the same however many samples there are, and in whatever order they are made."""
        return derive_seed("evaluation", config.seed, self.suite.name, *key, turn)


def make_rows(
    config: EvalConfig, checkpoint: str, engine: str, fitted: Callable[[], EvalConfig] | None = None
) -> list[Row]:
    """Every row, with what is recorded of it.

    Args:
        fitted: gives the configuration for documents that a memory agent reads; None: `config` is that.

    Raises:
        UserError: suites that are unknown or have no data.
    """
    finder = Finder(config.data_path, config.cache_dir, config.num_questions, config.task, config.split)
    root = Path(config.output_path).expanduser().absolute() / RECORDS
    rows = []
    suites = finder.suites(config.data_names)
    by_agent = any(suite.documents for suite in suites) and any(map(config.reads_by_agent, config.methods))
    of_documents = fitted() if fitted is not None and by_agent else config
    for suite in suites:
        samples = suite.samples if config.n_sampling < 0 else config.n_sampling
        methods: list[Method | None] = [*config.methods] if suite.documents else [None]
        for method in methods:
            settings = of_documents if method is not None and config.reads_by_agent(method) else config
            label = suite.name if method is None else f"{suite.name}-{method}"
            name = suite.name if method in (None, "memagent") else f"{suite.name} {method}"
            if method in FOUND and config.reader == "agent":
                name += " reader=agent"
            record = RowRecord(
                root,
                label,
                row_inputs(settings, suite, method, checkpoint, engine),
                grading_identity(config, suite.grading),
            )
            rows.append(Row(suite, method, name, record, config.greedy, samples, settings))
    return rows


def row_inputs(config: EvalConfig, suite: Suite, method: Method | None, checkpoint: str, engine: str) -> dict[str, Any]:
    """Everything that shapes the answers of a row; how many samples are asked for does not shape any of them."""
    inputs: dict[str, Any] = {
        "version": VERSION,
        "checkpoint_sha256": checkpoint,
        "data": suite.identity,
        "suite": suite.name,
        "engine": engine,
        "context_length": config.server.context_length,
        "sampling": {
            "temperature": config.temperature,
            "top_p": config.top_p,
            "top_k": config.top_k,
            "seed": config.seed,
        },
    }
    if engine == "embedded":
        inputs["dtype"] = config.server.dtype
    if config.server.url:
        inputs["url"] = config.server.url
    if method is None:
        own = {"agent": _agent(config)} if suite.as_trained and config.prompt_type == "auto" else {}
        return inputs | own | {"prompt_type": config.prompt_type, "max_gen_tokens": config.max_gen_tokens}
    inputs |= {"method": method, "agent": _agent(config)}
    if suite.rule and (method == "memagent" or needs_judge(suite.rule)):
        where = {"url", "concurrency", "timeout_s", "wait_s", "cache"}
        inputs["judge"] = config.judge.model_dump(exclude=where)
    if method == "rag":
        inputs["rag_top_k"] = config.rag_top_k
    if method in FOUND and config.reader == "agent":
        inputs["reader"] = config.reader
    return inputs


def _agent(config: EvalConfig) -> dict[str, Any]:
    """The agent's settings. Of a wording from a file the text counts, and where there is none nothing is said of it.

    What other agents have is named with its default, as 0.1 did: its answers are found again, but for those of a run of
    agent.name=single_turn whose preset set chunks (135M_cpu), which it no longer has. What 0.1 did not know is named
    where it is set.
    """
    settings = AGENT.defaults() | config.agent.model_dump()
    left_out = {"template_file"} | {name for name in ("wording", "repeat_problem") if not settings[name]}
    return {name: value for name, value in settings.items() if name not in left_out}


def choose_kind(server: ServerConfig) -> str:
    """The engine that `auto` means here."""
    if server.engine != "auto":
        return server.engine
    if server.url:
        return "openai"
    if visible_gpus():
        if importlib.util.find_spec("sglang"):
            return "sglang"
        if importlib.util.find_spec("vllm") or os.environ.get("CLUSTERKIT_VLLM_PYTHON"):
            return "vllm"
    return "embedded"


def visible_gpus() -> int:
    """GPUs that this process may use."""
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return 0  # no import of seconds to find out
    import torch  # noqa: PLC0415 (seconds, and nothing to count without a device)

    return int(torch.cuda.device_count())
