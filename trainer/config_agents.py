"""Section agent of a RunConfig: who turns a task into conversations. See trainer/config.py and config_choice.py."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import Field, model_validator

from trainer.config_choice import Choice, OwnSection, Section
from trainer.errors import UserError
from trainer.wording import NO_MEMORY, check_wording, read_wording


class AgentConfig(Section):
    """What every agent has."""

    name: str
    """memagent: one memory text, overwritten with every chunk. single_turn: the question in one prompt, one response of
    up to max_final_tokens, no memory. memalpha: a structured memory, written by tool calls. Or `module:Class`, a class
    of your own (docs/custom.md)."""
    template: Literal["memagent", "words"] = "memagent"
    """Wording of prompts. words: a few single words, for models that start from random weights."""
    enable_thinking: bool = False
    """Turn thinking on in chat templates that have such a switch (Qwen3)."""
    max_final_tokens: Annotated[int, Field(ge=1)] = 1024
    """Longest final answer, in tokens. memalpha has none, but other methods of its evaluations do."""

    def response_limit(self, kind: str) -> int:  # noqa: ARG002 (for those that write a memory)
        """Most tokens of a response of a kind, `update` or `final`."""
        return self.max_final_tokens

    def question_limit(self, kind: str) -> int:  # noqa: ARG002 (for those that tell it)
        """Most tokens of the question in a prompt of a kind, each place where it stands counted."""
        return 0


class QuestionAgentConfig(AgentConfig):
    """An agent that is told the question."""

    max_question_tokens: Annotated[int, Field(ge=1)] = 1024
    """Longest question, in tokens; a longer one is refused, never cut."""

    def question_limit(self, kind: str) -> int:  # noqa: ARG002 (for those that repeat it)
        """See AgentConfig."""
        return self.max_question_tokens


class ChunksAgentConfig(AgentConfig):
    """An agent that reads in chunks and writes a memory."""

    chunk_tokens: Annotated[int, Field(ge=1)] = 5000
    """Tokens of the document read in one conversation."""
    max_memory_tokens: Annotated[int, Field(ge=1)] = 1024
    """Longest memory, in tokens: the response limit of every update conversation."""
    max_chunks: Annotated[int, Field(ge=0)] = 0
    """Most chunks that are read; a longer document is handled as `overflow` says. 0: no limit."""
    overflow: Literal["center", "error"] = "center"
    """What to do with a document of more than max_chunks. center: read its first and last chunks, and count it. error:
    end the run."""

    def response_limit(self, kind: str) -> int:
        """See AgentConfig."""
        return self.max_final_tokens if kind == "final" else self.max_memory_tokens


class OverwritingAgentConfig(ChunksAgentConfig, QuestionAgentConfig):
    """An agent whose memory is one text, overwritten with every chunk."""

    template_file: str = ""
    """YAML file with your own wording of both prompts: update with {problem}, {memory} and {section}, final with
    {problem} and {memory}, and no_memory, the text of the memory before the first chunk (docs/coming-from-areal.md)."""
    wording: dict[str, str] = {}  # noqa: RUF012 (pydantic copies it)
    """Content of template_file; the command reads it."""
    prompt_order: Literal["paper", "section_first"] = "paper"
    """paper: problem, memory, section. section_first: problem, section, memory, so that a group reads each section
    once; a small model remembered less with it, far beyond its trained length (docs/prefix-sharing.md)."""
    repeat_problem: bool = False
    """Let the problem stand a second time right behind the section; max_question_tokens is the limit of each."""
    empty_memory: Literal["keep", "clear"] = "keep"
    """What an empty update means: keep the old memory, or clear it. Counted either way."""

    @model_validator(mode="after")
    def _worded(self) -> OverwritingAgentConfig:
        """Read the file where that was not done yet; afterwards its text goes with the configuration."""
        if not self.template_file and not self.wording:
            return self
        file = f"agent.template_file={self.template_file}"
        if self.template != "memagent":
            raise ValueError(
                f"{file} is put into a chat template, and agent.template=words is for models without: leave one out"
            )
        if self.prompt_order != "paper":
            raise ValueError(f"{file} has an order of its own: leave agent.prompt_order={self.prompt_order} out")
        if self.repeat_problem:
            raise ValueError(f"{file} has a wording of its own, with the problem once: leave agent.repeat_problem out")
        if self.wording:
            self.wording = {"no_memory": NO_MEMORY, **self.wording}
            check_wording(self.wording)
            return self
        path = Path(self.template_file).expanduser().absolute()
        try:
            self.wording, self.template_file = read_wording(path), str(path)
        except UserError as error:
            raise ValueError(str(error)) from None
        return self

    @property
    def shares_sections(self) -> bool:
        """Whether the section stands before the memory, so that the prompts of a group begin alike up to its end."""
        if self.wording:
            return self.wording["update"].index("{section}") < self.wording["update"].index("{memory}")
        return self.prompt_order == "section_first"

    def question_limit(self, kind: str) -> int:
        """See AgentConfig."""
        return self.max_question_tokens * (2 if self.repeat_problem and kind == "update" else 1)


class StoresAgentConfig(ChunksAgentConfig):
    """An agent whose memory has stores of entries, written by tool calls."""

    context_tokens: Annotated[int, Field(ge=32)] = 16384
    """Most tokens of a prompt and its response; where the memory does not fit, less of it is shown (counted)."""
    core_tokens: Annotated[int, Field(ge=1)] = 512
    """Longest core memory, in tokens; a longer one is cut, and the answer to the call says so."""
    shown_items: Annotated[int, Field(ge=0)] = 20
    """Entries of each store that a prompt shows, the newest ones."""
    tool_format: Literal["auto", "chat", "json"] = "auto"
    """chat: tools in the model's own chat template. json: described in the prompt. auto: chat where the template knows
    tools."""


class MemagentConfig(OverwritingAgentConfig):
    """The memory agent: one conversation a chunk, the memory is overwritten each time, then one final conversation."""

    name: Literal["memagent"] = "memagent"


class SingleTurnConfig(QuestionAgentConfig):
    """One prompt, one response."""

    name: Literal["single_turn"] = "single_turn"


class MemalphaAgentConfig(StoresAgentConfig):
    """A structured memory, written by tool calls."""

    name: Literal["memalpha"] = "memalpha"


class OwnAgentConfig(OwnSection, OverwritingAgentConfig, StoresAgentConfig):
    """An agent of the user's own, which may build on any of ours."""


OurAgentConfig = MemagentConfig | SingleTurnConfig | MemalphaAgentConfig
AGENT = Choice.by_name("agent", OwnAgentConfig, *get_args(OurAgentConfig))
AnyAgentConfig = Annotated[OurAgentConfig | OwnAgentConfig, AGENT]
"""What an agent's section may be."""
