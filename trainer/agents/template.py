"""Prompts as token ids: a template is tokenised once, around its placeholders, and ids are spliced in between.

Nothing that the model sampled is ever decoded and encoded again on its way into the next prompt, so the ids that are
sent are the ids that are trained on (MemAgent's TokenTemplate idea).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.config_agents import AgentConfig, OverwritingAgentConfig
from trainer.errors import UserError
from trainer.wording import NO_MEMORY

INSTRUCTED = "use an instruction-tuned checkpoint"
ADDED_TOKENS = 8
"""An upper bound of what tokenizers put before a text by themselves: a first token, a blank."""
PLACEHOLDER = re.compile(r"\{(problem|memory|section)\}")


@dataclass(frozen=True, slots=True)
class Wording:
    """Text of the two prompts. `no_memory` stands in the memory's place before the first update."""

    update: str
    final: str
    no_memory: str


def memagent_wording(section_first: bool, repeat_problem: bool = False) -> Wording:
    """Prompts for instruction-tuned models; blocks in the paper's order, or with the section before the memory.

    repeat_problem: it stands a second time right behind the section, so in front of a memory that comes last.
    """
    memory = "<memory>\n{memory}\n</memory>"
    section = "<section>\n{section}\n</section>"
    if repeat_problem:
        section += "\n\nThe problem again:\n\n<problem>\n{problem}\n</problem>"
    blocks = f"{section}\n\n{memory}" if section_first else f"{memory}\n\n{section}"
    update = (
        "Below are a problem, one section of a long article that may help to answer it, and the memory that you kept "
        "from earlier sections. Read the section and rewrite the memory: add whatever in the section helps to answer "
        "the problem, and keep every relevant detail that the memory already holds.\n\n"
        f"<problem>\n{{problem}}\n</problem>\n\n{blocks}\n\nUpdated memory:"
    )
    final = (
        "Below are a problem and the memory that you kept while reading a long article. Answer the problem from the "
        "memory and put the answer in \\boxed{}.\n\n"
        "<problem>\n{problem}\n</problem>\n\n<memory>\n{memory}\n</memory>\n\nYour answer:"
    )
    return Wording(update, final, NO_MEMORY)


def words_wording(section_first: bool, repeat_problem: bool = False) -> Wording:
    """Prompts of single words for the tiny model; see `memagent_wording`."""
    section = "section {section} question {problem} ?" if repeat_problem else "section {section}"
    blocks = f"{section} memory {{memory}}" if section_first else f"memory {{memory}} {section}"
    return Wording(
        update=f"<u> question {{problem}} ? {blocks} update <a>",
        final="<u> question {problem} ? memory {memory} answer <a>",
        no_memory="none",
    )


class TokenTemplate:
    """One prompt as alternating runs of fixed ids and placeholders."""

    def __init__(self, tokenizer: Any, prompt_text: str) -> None:
        self.parts: list[list[int] | str] = []
        for position, piece in enumerate(PLACEHOLDER.split(prompt_text)):
            if position % 2:
                self.parts.append(piece)
            elif piece:
                self.parts.append(encode(tokenizer, piece))

    def fill(self, values: Mapping[str, list[int]]) -> list[int]:
        """Prompt ids with every placeholder replaced by its ids."""
        ids: list[int] = []
        for part in self.parts:
            ids.extend(values[part] if isinstance(part, str) else part)
        return ids

    def beginning(self, values: Mapping[str, list[int]]) -> list[int]:
        """Prompt ids up to the first placeholder that is not filled yet."""
        ids: list[int] = []
        for part in self.parts:
            if isinstance(part, str) and part not in values:
                break
            ids.extend(values[part] if isinstance(part, str) else part)
        return ids

    def stands_before(self, first: str, second: str) -> bool:
        """Whether one placeholder stands before the other."""
        places = [part for part in self.parts if part in (first, second)]
        return places[:1] == [first]

    @property
    def num_fixed(self) -> int:
        """Tokens of the prompt without what is filled in."""
        return sum(len(p) for p in self.parts if not isinstance(p, str))

    def length(self, values: Mapping[str, int]) -> int:
        """Tokens of the prompt where every placeholder has so many; one that stands there twice counts twice."""
        return self.num_fixed + sum(values[p] for p in self.parts if isinstance(p, str))


@dataclass(frozen=True, slots=True)
class Prompts:
    """The agent's two prompts and its "no memory yet" ids, for one tokenizer."""

    update: TokenTemplate
    final: TokenTemplate
    no_memory: list[int]


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text, with no special tokens added."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def within(tokenizer: Any, texts: Sequence[str], limit: int, *, special: bool = False) -> list[bool]:
    """Whether each text has at most `limit` tokens. special: with those that the tokenizer adds by itself."""
    # A token of ASCII text has at least one character. Others may be taken apart first, as Unicode's normal forms do.
    fits = [text.isascii() and len(text) + ADDED_TOKENS <= limit for text in texts]
    unknown = [number for number, known in enumerate(fits) if not known]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    tokenizer("")  # has a fast tokenizer forget a truncation that its file asks for
    asked = [texts[number] for number in unknown]
    if backend is not None:
        lengths = [len(made) for made in backend.encode_batch_fast(asked, add_special_tokens=special)]
    else:
        lengths = [len(tokenizer(text, add_special_tokens=special)["input_ids"]) for text in asked]
    for number, length in zip(unknown, lengths, strict=True):
        fits[number] = length <= limit
    return fits


def make_prompts(tokenizer: Any, config: OverwritingAgentConfig) -> Prompts:
    """Tokenise the configured wording, inside the tokenizer's chat template (one user message, generation prompt)."""
    section_first = config.prompt_order == "section_first"
    if config.template == "words":
        wording = words_wording(section_first, config.repeat_problem)
        update, final = wording.update, wording.final
    else:
        ours = memagent_wording(section_first, config.repeat_problem)
        wording = Wording(**config.wording) if config.wording else ours
        lacks = "agent.template=memagent needs a tokenizer with a chat template and this one has none"
        update = user_prompt(tokenizer, wording.update, lacks, thinking=config.enable_thinking)
        final = user_prompt(tokenizer, wording.final, lacks, thinking=config.enable_thinking)
    return Prompts(
        TokenTemplate(tokenizer, update), TokenTemplate(tokenizer, final), encode(tokenizer, wording.no_memory)
    )


def user_prompt(
    tokenizer: Any, text: str, lacks: str, *, thinking: bool | None = None, otherwise: str = INSTRUCTED
) -> str:
    """A user's message in the tokenizer's chat template, up to where the response begins.

    lacks, otherwise: the sentence for a tokenizer without one, and what can be done besides adding it. thinking: for
    templates that know a thinking mode; None leaves it to the template.

    Raises:
        UserError: the tokenizer has no chat template.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(f"{lacks}: put a chat_template.jinja into its folder, or {otherwise}")
    options = {} if thinking is None else {"enable_thinking": thinking}
    messages = [{"role": "user", "content": text}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options))


def prompt_text(tokenizer: Any, text: str, config: AgentConfig, lacks: str) -> str:
    """A text as one user's message, in the agent's kind of template. lacks, raises: see `user_prompt`."""
    if config.template == "words":
        return f"<u> {text} <a>"
    return user_prompt(tokenizer, text, lacks, thinking=config.enable_thinking)


def prompt_ids(tokenizer: Any, text: str, config: AgentConfig, lacks: str) -> list[int]:
    """Token ids of `prompt_text`."""
    return encode(tokenizer, prompt_text(tokenizer, text, config, lacks))
