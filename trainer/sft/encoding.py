"""Examples as rows of token ids: one row for every answer, with all that came before it as the prompt.

A trace has a row for every turn that the memory agent would take: its own prompts, and the memory that it should write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate
from random import Random
from typing import Any, TypeVar

from trainer.agents.memagent import MemAgent
from trainer.agents.template import encode
from trainer.config import RunConfig
from trainer.config_agents import MemagentConfig
from trainer.errors import UserError
from trainer.seeding import derive_seed
from trainer.tasks.evidence import MOST_SENTENCES
from trainer.tasks.examples import ASSISTANT, NOTHING, Example, Trace
from trainer.types import Row, Task

Message = tuple[str, str]
Kept = TypeVar("Kept")
Place = tuple[int, int, str]
"""Where a sentence stands in a text: start, end, and the title that it stands below."""


class Encoder:
    """Makes rows in the wording that the model will be asked in later: its chat template, or the tiny model's words.

    Attributes:
        long_memories: traces that ended until now at a memory over agent.max_memory_tokens, or are left out for it.
        misfits: traces that were left out whole until now, because the agent cannot take their question or document.
        misfit: why it cannot take the first of them; empty where there is none.

    Raises:
        UserError: examples are to become chats and the tokenizer has no chat template.
    """

    def __init__(self, config: RunConfig, tokenizer: Any) -> None:
        self.config, self.tokenizer = config, tokenizer
        self.words = config.agent.template == "words"
        self.chat = config.examples.as_chat and not self.words
        if self.chat and not getattr(tokenizer, "chat_template", None):
            raise UserError(
                "the model's tokenizer has no chat template: use an instruction-tuned checkpoint, or learn the text as "
                "it stands with task.as_chat=false"
            )
        if tokenizer.eos_token_id is None:
            raise UserError("the model's tokenizer names no end token: an answer could never learn to end")
        self.long_memories = self.misfits = 0
        self.misfit = ""
        self._made_agent: MemAgent | None = None

    def rows(self, example: Example, number: int) -> list[Row]:
        """A row for every answer; the loss is on the answer and its end token. number: of the example in its step."""
        if example.trace is not None:
            return self._turns(example.trace, number)
        return [
            self._row(example.messages[:place], content, example, number)
            for place, (role, content) in enumerate(example.messages)
            if role == ASSISTANT and place and content.strip()
        ]

    def _turns(self, trace: Trace, number: int) -> list[Row]:
        """The turns of the agent on a trace's document, until its memory is longer than the agent could write."""
        agent = self._agent
        try:
            prepared = agent.prepare(Task("trace", trace.problem, (trace.answer,), trace.context))
        except UserError as error:  # one of thousands does not end a run
            self.misfits += 1
            self.misfit = self.misfit or str(error)
            return []
        rows: list[Row] = []
        memory = agent.prompts.no_memory
        encoded = cache(partial(encode, self.tokenizer))  # memories stay from section to section
        memories = self._memories(trace, prepared.chunks, encoded)
        for section, (written, left) in zip(prepared.chunks, memories, strict=True):
            prompt = agent.prompts.update.fill({"problem": prepared.question, "memory": memory, "section": section})
            answer = encoded(written)
            if not self._fits(answer):  # nor could it write the later ones, which have all of this
                self.long_memories += 1
                return rows
            rows.append(self._answered(prompt, answer, number))
            memory = encoded(left)
        if not prepared.chunks:
            pairs = (trace.evidence, trace.distractors, lambda text: self._fits(encoded(text)))
            memory = encoded(whole_memory(*pairs, trace.sentences))
            if not self._fits(memory):
                self.long_memories += 1
                return []
        prompt = agent.prompts.final.fill({"problem": prepared.question, "memory": memory})
        return [*rows, self._answered(prompt, encode(self.tokenizer, trace.answer), number)]

    def _memories(
        self, trace: Trace, sections: Sequence[list[int]], encoded: Callable[[str], list[int]]
    ) -> list[tuple[str, str]]:
        """What each turn should write, and what the next one is shown, all texts as the tokenizer gives them back."""
        read = [i for section in sections for i in section]
        text = self._text(read)
        parts = [self._text(section) for section in sections]
        ends = list(accumulate(map(len, parts)))
        joined = "".join(parts) == text
        if not joined:  # a border within a character, or a tokenizer that looks at what stands before
            ends = [len(self._text(read[:stop])) for stop in accumulate(map(len, sections))]
        exact = joined and text == trace.context

        def given_back(told: str) -> str:
            # A tokenizer that gives the document back, in pieces too, does so with what stands in it.
            return told if exact and told in text else self._text(encoded(told))

        evidence, distractors = (
            [(given_back(title), given_back(sentence)) for title, sentence in pairs]
            for pairs in (trace.evidence, trace.distractors)
        )
        return oracle_memories(text, ends, evidence, distractors, lambda m: self._fits(encoded(m)), trace.sentences)

    def _fits(self, memory: list[int]) -> bool:
        """Whether the agent could write it, and its end token."""
        return len(memory) < self._agent.config.max_memory_tokens

    def _text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    @property
    def _agent(self) -> MemAgent:
        if self._made_agent is None:
            if not isinstance(self.config.agent, MemagentConfig):
                raise UserError(
                    f"{self.config.data_path} has traces of a memory, which agent.name=memagent learns from, not "
                    f"{self.config.agent.name}"
                )
            self._made_agent = MemAgent(self.config.agent, self.tokenizer)
        return self._made_agent

    def _answered(self, prompt: list[int], answer: list[int], number: int) -> Row:
        response = [*answer, self.tokenizer.eos_token_id]
        return Row(prompt, response, [0.0] * len(response), advantage=1.0, weight=0.0, trajectory=number)

    def _row(self, before: Sequence[Message], answer: str, example: Example, number: int) -> Row:
        prompt = encode(self.tokenizer, self._prompt(before, example))
        return self._answered(prompt, encode(self.tokenizer, answer), number)

    def _prompt(self, before: Sequence[Message], example: Example) -> str:
        if self.words:
            end = self.tokenizer.eos_token
            return (
                " ".join(f"<a> {text} {end}" if role == ASSISTANT else f"<u> {text}" for role, text in before) + " <a>"
            )
        if self.chat:
            messages = [{"role": role, "content": text} for role, text in before]
            thinking = self.config.agent.enable_thinking
            try:
                text = self.tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True, enable_thinking=thinking
                )
            except Exception as error:  # a template is code of the checkpoint's
                roles = ", ".join(role for role, _ in before)
                raise UserError(
                    f"{self.config.data_path}: the model's chat template refuses messages of {roles}: {error}"
                ) from error
            return str(text)
        if not example.plain:
            raise UserError(
                "task.as_chat=false takes examples with prompt and answer, and these have messages: leave it out"
            )
        return before[0][1]


def oracle_memories(
    text: str,
    ends: Sequence[int],
    evidence: Sequence[tuple[str, str]],
    distractors: Sequence[tuple[str, str]] = (),
    fits: Callable[[str], bool] = lambda _: True,
    most: int = MOST_SENTENCES,
) -> list[tuple[str, str]]:
    """Memories that an agent should have written, one for each section, each with the one that the next turn is shown.

    Both hold, for every piece of evidence, what of its sentence stands in the sections until then, verbatim and behind
    its title; `NOTHING` where there is none yet. So all that is written was in the section or the memory before.

    The one that is shown has distractors that were begun, too, up to `most` in all: what an agent keeps that
    errs. What is written keeps those that it was shown, as far as evidence leaves them a place, and adds none: so a
    model learns what to do about a wrong sentence, and never to write one. All stand in the order of the text.

    Args:
        ends: where each section ends in it, in characters.
        evidence: (title, sentence) in any order; those that are not in the text are never known.
        distractors: (title, sentence), those to be kept longest first.
        fits: whether a memory is short enough; distractors are left out until it is.
        most: sentences of a memory that has distractors; evidence may be more.
    """
    gold, misleading = (
        [place for title, sentence in pairs if (place := _place(text, title, sentence))]
        for pairs in (evidence, distractors)
    )
    memories = []
    others: list[Place] = []
    for end in ends:
        kept = [place for place in gold if place[0] < end]
        told = partial(_written, text, ends, end)
        written = _filled(kept, others, told, fits, most)
        others = [place for place in misleading if place[0] < end]
        memories.append((written, _filled(kept, others, told, fits, most)))
    return memories


def _filled(
    kept: list[Kept], others: list[Kept], told: Callable[[list[Kept]], str], fits: Callable[[str], bool], most: int
) -> str:
    """The memory of the kept ones and of the first of the others that have a place in it."""
    beside = others[: max(most - len(kept), 0)]
    # What is left out here stays out: what stands before it in the list, and its text, can only grow.
    while beside and not fits(told([*kept, *beside])):
        beside.pop()
    return told([*kept, *beside])


def _written(text: str, ends: Sequence[int], end: int, places: Sequence[Place]) -> str:
    """The memory of some places of a text that was read until `end`."""
    lines = []
    for start, stop, title in sorted(places):
        part = text[start : min(stop, end)].strip()
        began = max((other for other in ends if other <= start), default=0)
        # A title that an earlier section ended with is known no more: nothing told that it would matter.
        title_at = text.rfind(title, 0, start)
        lines.append(f"{title}: {part}" if title_at >= began else part)
    return "\n".join(lines) or NOTHING


def whole_memory(
    evidence: Sequence[tuple[str, str]],
    distractors: Sequence[tuple[str, str]] = (),
    fits: Callable[[str], bool] = lambda _: True,
    most: int = MOST_SENTENCES,
) -> str:
    """The memory after everything was read; arguments as of `oracle_memories`.

    Evidence stands as it is given. With distractors the order is drawn anew: places would tell which these are.
    """

    def told(pairs: Sequence[tuple[str, str]]) -> str:
        lines = [f"{title}: {sentence}" for title, sentence in pairs]
        if len(lines) > len(evidence):
            Random(derive_seed("whole-memory", *lines)).shuffle(lines)
        return "\n".join(lines) or NOTHING

    return _filled(list(evidence), list(distractors), told, fits, most)


def _place(text: str, title: str, sentence: str) -> Place | None:
    """Where the sentence stands below its title: start, end and the title."""
    start = text.find(sentence)
    while start >= 0 and text.rfind(title, 0, start) < 0:
        start = text.find(sentence, start + 1)
    return (start, start + len(sentence), title) if start >= 0 else None
