"""Reading a document with a memory, and answering one question about it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from evaluation.config import AskConfig, EvalConfig
from evaluation.document import Document, UnknownWords
from evaluation.engines import context_window, open_engine
from evaluation.lengths import fitted_agent
from evaluation.openai_engine import ServerGoneError
from evaluation.plan import choose_kind, visible_gpus
from evaluation.progress import say
from evaluation.steps import told_base
from trainer.agents.base import RolloutOptions, TurnSampler
from trainer.agents.memagent import MemAgent
from trainer.agents.template import encode
from trainer.assets import resolve_model
from trainer.config_agents import MemagentConfig
from trainer.engines.base import Engine, EngineError
from trainer.engines.embedded import GenerationCancelledError
from trainer.errors import InterruptedRunError, RunError, UserError
from trainer.rewards.qa import extract_answer
from trainer.train.adapterfiles import whole_model
from trainer.train.model import load_tokenizer
from trainer.types import Task

POLL_SECONDS = 0.2
GREEDY = RolloutOptions(temperature=0.0, seed_of_turn=lambda turn: turn)
Tell = Callable[..., None]


def answer_question(config: AskConfig, tell: Tell, stop: Callable[[], bool] = lambda: False) -> None:
    """Read the document section by section and answer the question.

    Args:
        tell: gets every event, as names and values.
        stop: asked all the time; True ends the reading.

    Raises:
        UserError: the agent keeps no memory that is one text, or its limits do not fit the model or the question.
        RunError: the engine does not start, or is lost.
        InterruptedRunError: `stop` said so.
    """
    evaluation = _with_one_server(config.evaluation)
    if not isinstance(evaluation.agent, MemagentConfig):
        raise UserError(
            f"the checkpoint's agent is {evaluation.agent.name}, and questions are asked of agent.name=memagent, whose "
            "memory is a text: name a checkpoint of such an agent, or try --set agent.name=memagent"
        )
    folder = resolve_model(evaluation.model_path, evaluation.cache_dir)
    told_base(folder, evaluation.cache_dir)
    whole = whole_model(folder, evaluation.cache_dir)
    tokenizer = load_tokenizer(whole)
    window = context_window(whole, evaluation.server)
    agent = MemAgent(fitted_agent(evaluation, evaluation.agent, tokenizer, window), tokenizer)
    agent.check_window(window)
    disable_progress_bar()  # a memory is shown, and loading takes a second
    task = Task("question", config.question, ("",))
    question = agent.prepare(task).question
    document = Document(Path(config.document), tokenizer, agent.config)
    unknown = UnknownWords(tokenizer)
    unknown.add(config.question, encode(tokenizer, config.question))
    kind = choose_kind(evaluation.server)

    async def run() -> None:
        logs = Path(evaluation.output_path) / "servers"
        async with open_engine(evaluation, kind, whole, tokenizer, logs, stop) as opened:
            say(f"engine {kind} is ready")
            tell(
                event="document",
                tokens=document.tokens,
                sections=document.num_sections,
                left_out_tokens=document.left_out,
                unknown_words={
                    "question": {"count": unknown.count, "first": unknown.first},
                    "document": {"count": document.unknown.count, "first": document.unknown.first},
                },
                model_path=str(folder),
                engine=kind,
            )
            async with _cancelled_by(stop):
                await _read(agent, opened.engine, task, question, document, tell)

    try:
        asyncio.run(run())
    except (asyncio.CancelledError, GenerationCancelledError):
        if not stop():
            raise
        raise InterruptedRunError("interrupted before the answer; nothing is kept") from None
    except (EngineError, ServerGoneError) as error:
        raise RunError(f"the model stopped answering: {error}") from error


def _with_one_server(evaluation: EvalConfig) -> EvalConfig:
    """The same with the GPUs of one server, where all were meant: there is one reader."""
    if evaluation.server.gpus or not visible_gpus():
        return evaluation
    return evaluation.model_copy(
        update={"server": evaluation.server.model_copy(update={"gpus": evaluation.server.tensor_parallel})}
    )


async def _read(
    agent: MemAgent, engine: Engine, task: Task, question: list[int], document: Document, tell: Tell
) -> None:
    began = time.perf_counter()
    memory = agent.prompts.no_memory
    text = ""
    for number, section in enumerate(document.sections(), start=1):
        at = time.perf_counter()
        sampler = TurnSampler(engine, GREEDY, agent.config, task)  # a new one: turns of a long document are not kept
        memory = await agent.update(sampler, agent.update_prompt(question, memory, section), memory)
        before, text = text, _decode(agent, memory)
        tell(
            event="section",
            number=number,
            sections=document.num_sections,
            memory=text,
            memory_tokens=len(memory),
            changed=text != before,
            truncated="truncated_memory" in sampler.counters,
            seconds=round(time.perf_counter() - at, 3),
        )
    sampler = TurnSampler(engine, GREEDY, agent.config, task)
    response = _decode(agent, await agent.answer(sampler, question, memory))
    tell(
        event="answer",
        answer=extract_answer(response) or response.strip(),
        response=response,
        truncated="truncated_final" in sampler.counters,
        seconds=round(time.perf_counter() - began, 3),
    )


def _decode(agent: MemAgent, ids: list[int]) -> str:
    return str(agent.tokenizer.decode(ids, skip_special_tokens=True))


@asynccontextmanager
async def _cancelled_by(stop: Callable[[], bool]) -> AsyncIterator[None]:
    """Cancel what runs in the block as soon as `stop` says so."""
    reading = asyncio.current_task()
    assert reading is not None

    async def watch() -> None:
        while not stop():
            await asyncio.sleep(POLL_SECONDS)
        reading.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
