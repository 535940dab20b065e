"""One stream of requests over all rows: greedy and sampled answers together, recorded and graded as they come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from evaluation.config import EvalConfig
from evaluation.engines import Opened, Sampling
from evaluation.grade import Grader
from evaluation.openai_engine import ServerGoneError
from evaluation.plan import Row
from evaluation.progress import Progress
from evaluation.reader import Reader, TooLong
from evaluation.record import GREEDY, Key
from trainer.agents.base import RolloutOptions
from trainer.engines.base import EngineError, EngineGoneError
from trainer.engines.embedded import GenerationCancelledError
from trainer.engines.http import PURPOSE
from trainer.errors import InterruptedRunError, RunError, UserError
from trainer.types import Task, Trajectory

POLL_SECONDS = 0.2


@dataclass(slots=True)
class Loaded:
    """A row with its questions, ready to be asked. prepared: one per task, in order; `TooLong` where it cannot be."""

    row: Row
    reader: Reader
    tasks: list[Task]
    prepared: list[Any]
    truths: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.truths = {task.id: task.answers for task in self.tasks}


class Runner:
    """Asks what is missing, at most `opened.concurrency` requests at a time. stop: asked all the time."""

    def __init__(self, config: EvalConfig, opened: Opened, grader: Grader, stop: Callable[[], bool]) -> None:
        self.config, self.grader, self.stop = config, grader, stop
        self.engine = Sampling(opened.engine, config.top_p, config.top_k)
        self.concurrency = opened.concurrency

    async def run(self, rows: list[Loaded]) -> Progress:
        """Record and grade every answer that is missing.

        Raises:
            InterruptedRunError: `stop` said so. RunError: no server is left. What is written stays.
        """
        jobs: list[tuple[Loaded, int, Key]] = []
        kept = 0
        for loaded in rows:
            questions = [task.id for task in loaded.tasks]
            place = {question: number for number, question in enumerate(questions)}
            keys = loaded.row.keys(questions)
            missing = loaded.row.record.missing(keys)
            kept += len(keys) - len(missing)
            jobs += [(loaded, place[key[0]], key) for key in missing]
        progress = Progress(len(jobs), kept)
        gate = asyncio.Semaphore(self.concurrency)
        tasks = [asyncio.ensure_future(self._one(gate, progress, *job)) for job in jobs]
        tasks += [asyncio.ensure_future(self._regrade(loaded)) for loaded in rows]
        watch = asyncio.ensure_future(self._watch(tasks))
        try:
            await asyncio.gather(*tasks)
        except (asyncio.CancelledError, GenerationCancelledError):
            if not self.stop():
                raise
            raise InterruptedRunError(
                f"interrupted: {kept + progress.done} of {kept + len(jobs)} answers are written; the same command goes "
                "on with the rest"
            ) from None
        finally:
            watch.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, watch, return_exceptions=True)
            for loaded in rows:
                loaded.row.record.close()
        return progress

    async def _watch(self, tasks: Sequence[asyncio.Future[None]]) -> None:
        while not self.stop():
            await asyncio.sleep(POLL_SECONDS)
        for task in tasks:
            task.cancel()

    async def _one(self, gate: asyncio.Semaphore, progress: Progress, loaded: Loaded, number: int, key: Key) -> None:
        found = loaded.prepared[number]
        if isinstance(found, TooLong):
            sample = too_long_line(key, found)
        else:
            async with gate:
                sample = await self._answer(loaded, number, key)
        loaded.row.record.samples.append(sample)
        progress.add(int(sample.get("sampled_tokens", 0)), bool(sample.get("error")))
        if not sample.get("error"):
            await self._grade(loaded, sample)

    async def _answer(self, loaded: Loaded, number: int, key: Key) -> dict[str, Any]:
        """One answer as a line of the record; a request that fails is an answer with an error."""
        temperature = 0.0 if key[1] == GREEDY else self.config.temperature
        options = RolloutOptions(temperature, lambda turn: loaded.row.seed(self.config, key, turn))
        began = time.time()
        base: dict[str, Any] = {"id": key[0], "sample": key[1]}
        PURPOSE.set(f"{key[0]} of {loaded.row.name}")
        try:
            trajectory = await loaded.reader.answer(loaded.prepared[number], self.engine, options)
        except (asyncio.CancelledError, GenerationCancelledError):
            raise
        except ServerGoneError as error:
            raise RunError(f"{error}; the answers until now are written") from error
        except EngineGoneError as error:
            raise RunError(f"{error}; the answers until now are written") from error
        except EngineError as error:
            return {**base, "error": str(error)[:1000]}
        except UserError:
            raise
        except Exception as error:  # one lost request must not cost the evaluation
            return {**base, "error": f"{type(error).__name__}: {error}"[:1000]}
        return base | sample_line(trajectory, began, loaded)

    async def _regrade(self, loaded: Loaded) -> None:
        """Verdicts for answers that were written before, by another process or under another grading."""
        record = loaded.row.record
        for key in record.ungraded(loaded.row.keys([task.id for task in loaded.tasks])):
            await self._grade(loaded, record.samples.entries[key])

    async def _grade(self, loaded: Loaded, sample: dict[str, Any]) -> None:
        truths = loaded.truths[str(sample["id"])]
        verdict = await self.grader.verdict(loaded.row.suite.grading, truths, sample)
        loaded.row.record.verdicts.append(verdict)


def too_long_line(key: Key, found: TooLong) -> dict[str, Any]:
    """What is kept of a question that cannot be asked: an empty answer, which says why it is wrong."""
    numbers = dict.fromkeys(("length", "prompt_tokens", "sampled_tokens", "turns"), 0)
    line = {"id": key[0], "sample": key[1], "text": "", "too_long": found.reason, "finish": "too_long"}
    return {**line, **numbers, "counters": {}}


def sample_line(trajectory: Trajectory, began: float, loaded: Loaded) -> dict[str, Any]:
    """What is kept of an answer. length: tokens of the final response, without the end token."""
    final = trajectory.turns[-1]
    line: dict[str, Any] = {
        "text": trajectory.answer_text,
        "length": len(final.completion.token_ids) - (final.completion.finish_reason == "stop"),
        "finish": final.completion.finish_reason,
        "prompt_tokens": sum(len(turn.prompt_ids) for turn in trajectory.turns),
        "sampled_tokens": sum(len(turn.completion.token_ids) for turn in trajectory.turns),
        "turns": len(trajectory.turns),
        "counters": trajectory.counters,
        "began": round(began, 3),
        "seconds": round(time.time() - began, 3),
    }
    if loaded.row.suite.rule:
        line |= {"rule": loaded.row.suite.rule, **trajectory.details}
    if loaded.row.method == "memagent" or len(trajectory.turns) > 1:
        decode = getattr(loaded.reader, "tokenizer", None)
        if decode is not None:
            line["final_prompt"] = str(decode.decode(final.prompt_ids))
    return line
