"""Other ways to read than section after section, which say what a memory is worth: the agent reads what of a document
is chosen beforehand. Runs have them in their closing table (`eval.final_methods`), evaluations as `--methods`.
"""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Callable
from dataclasses import replace

from trainer.agents.base import AnyAgent, RolloutOptions
from trainer.agents.memagent import MemAgent, PreparedTask
from trainer.config import RunConfig
from trainer.config_parts import RAG_PARAGRAPHS, FinalMethod
from trainer.engines.base import Engine
from trainer.errors import UserError
from trainer.types import Task, Trajectory

_DOCUMENT = re.compile(r"\n\n(?=Document \d+:\n)")
GOLD = "gold in eval.final_methods"
"""What messages of a run call the setting."""

Find = Callable[[Task], list[str]]
"""From a task to what of its document is shown."""


class FoundText:
    """An agent of text that is chosen of the document; see `AnyAgent`.

    method: name of the way, so that its requests are told from others about the same question. cutter: the agent that
    cuts the text, in whichever thread `prepare` is called: its tokenizer is one thread's at a time, by the lock.
    """

    builtin = True

    def __init__(self, method: str, agent: MemAgent, find: Find, cutter: MemAgent, lock: threading.Lock) -> None:
        self.method, self.agent, self.find, self.cutter, self.lock = method, agent, find, cutter, lock

    def longest_conversation(self) -> int:
        """See `AnyAgent`."""
        return self.cutter.longest_conversation()

    def prepare(self, task: Task) -> PreparedTask:
        """See `MemAgent`."""
        with self.lock:
            return self.cutter.prepare(found_text(task, self.method, self.find))

    async def rollout(self, prepared: PreparedTask, engine: Engine, options: RolloutOptions) -> Trajectory:
        """See `MemAgent`."""
        return await self.agent.rollout(prepared, engine, options)


def make_ways(config: RunConfig, agent: AnyAgent, window: int) -> dict[str, AnyAgent]:
    """The ways of `eval.final_methods` by name. agent: of the run. window: most tokens of prompt plus response."""
    methods = config.eval.final_methods
    if not methods:
        return {}
    assert isinstance(agent, MemAgent)  # RunConfig allows them for no other
    if config.engine != "embedded" and config.serving.context_length:
        window = min(window, config.serving.context_length)
    finds: dict[FinalMethod, Find] = {
        "rag": lambda task: best_paragraphs(task, RAG_PARAGRAPHS),
        "gold": gold_paragraphs,
        "long_context": lambda task: [document_of(task)],
    }
    cutter, lock = MemAgent(agent.config, copy.deepcopy(agent.tokenizer)), threading.Lock()
    whole = in_one_section(cutter, window)
    return {
        name: FoundText(name, agent, finds[name], whole if name == "long_context" else cutter, lock) for name in methods
    }


def in_one_section(agent: MemAgent, window: int) -> MemAgent:
    """The agent, reading at once as much of a text's beginning and end as the window allows.

    A window without room for the longest question and memory is for `MemAgent.check_window` to refuse.
    """
    room = max(window - agent.longest_conversation(0), 1)
    limits = {"chunk_tokens": room, "max_chunks": 1, "overflow": "center"}
    return MemAgent(agent.config.model_copy(update=limits), agent.tokenizer)


def found_text(task: Task, method: str, find: Find) -> Task:
    """The task with what was found in place of its document."""
    way = f"{method} of {len(task.context)} {len(task.chunks)}"
    return replace(task, chunks=(), context="\n\n".join(find(task)), way=way)


def document_of(task: Task) -> str:
    """The whole document of a task."""
    return task.context or " ".join(task.chunks)


def best_paragraphs(task: Task, count: int) -> list[str]:
    """The paragraphs that BM25 (Lucene's variant, bm25s's default) ranks highest for the question, as they stand."""
    from trainer.bm25 import bm25s  # noqa: PLC0415 (a third of a second, for what few runs do at their ends)

    paragraphs = list(task.chunks) or _paragraphs(task.context)
    if len(paragraphs) <= count:
        return paragraphs
    index = bm25s.BM25()
    index.index(bm25s.tokenize(paragraphs, stopwords="en", show_progress=False), show_progress=False)
    query = bm25s.tokenize([task.question], stopwords="en", show_progress=False)
    found, _ = index.retrieve(query, k=count, show_progress=False)
    return [paragraphs[number] for number in sorted(int(n) for n in found[0])]


def gold_paragraphs(task: Task, setting: str = GOLD, instead: str = "take it out") -> list[str]:
    """The documents that hold the answer, as they stand.

    Args:
        setting: what messages call the one that asks for them. instead: what to do where they are not known.

    Raises:
        UserError: it is not known which they are, or they cannot be told from the others.
    """
    places = [int(number) for number in str(task.meta.get("gold_documents", "")).split()]
    if not places:
        raise UserError(
            f"question {task.id}: it is not known which documents hold the answer, so {setting} cannot be asked: "
            f"{instead}"
        )
    paragraphs = _DOCUMENT.split(task.context)
    if len(paragraphs) != task.meta.get("num_documents"):
        raise UserError(
            f"question {task.id}: its documents cannot be told apart, because a text has a line like 'Document 1:' "
            f"behind an empty line: take that out of the data, or leave {setting} out"
        )
    return [paragraphs[place - 1] for place in places]


def _paragraphs(document: str) -> list[str]:
    parts = _DOCUMENT.split(document)
    return parts if len(parts) > 1 else [line for line in document.split("\n") if line.strip()]
