"""Ways from a question, and its document, to an answer: one prompt, or the memory agent.

Each has `prepare` (checks limits, makes token ids once per question) and `answer` (one trajectory). Prompt templates of
problems have AReaL's names where it has them; their text is tokenised as it is, with no further token before it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from evaluation.agent_reader import AgentReader
from evaluation.config import MOST_GENERATED, EvalConfig, Method
from evaluation.memory import Judged, StructuredMemory
from evaluation.reader import Reader, TooLong, prepared
from evaluation.suites.base import Suite
from trainer.agents.base import RolloutOptions
from trainer.agents.single_turn import SingleTurn
from trainer.agents.template import encode, user_prompt
from trainer.agents.ways import best_paragraphs, document_of, gold_paragraphs
from trainer.config_agents import MemagentConfig, MemalphaAgentConfig, SingleTurnConfig
from trainer.config_choice import as_class
from trainer.engines.base import Engine
from trainer.errors import QuestionTooLongError, UserError
from trainer.rewards.sources import needs_judge
from trainer.types import SamplingParams, Task, Trajectory, Turn

NOTHING = "none"


def make_reader(config: EvalConfig, method: Method | None, tokenizer: Any, window: int, suite: Suite) -> Reader:
    """The reader of a row; method None: problems. window: most tokens of prompt plus response. Raises UserError.

    Where the suite's rule is a model's judgement, that model is asked about every answer.
    """
    if suite.as_trained and config.prompt_type == "auto":
        return Trained(config, tokenizer, window)
    reader = _reader(config, method, tokenizer, window)
    if needs_judge(suite.rule) and not (method == "memagent" and isinstance(config.agent, MemalphaAgentConfig)):
        return Judged(reader, config)
    return reader


def _reader(config: EvalConfig, method: Method | None, tokenizer: Any, window: int) -> Reader:
    if method is None:
        template = template_named(config.prompt_type)
        return SinglePrompt(
            tokenizer, window, config.max_gen_tokens, lambda task, _: template(task.question, tokenizer)
        )
    if method == "memagent" and isinstance(config.agent, MemalphaAgentConfig):
        return StructuredMemory(config, tokenizer, window)
    by_agent = config.reads_by_agent(method)
    if by_agent and method != "memagent" and not isinstance(config.agent, MemagentConfig):
        asked = "--methods blank_memory" if method == "blank_memory" else f"reader=agent with --methods {method}"
        raise UserError(
            f"{asked} is for checkpoints of agent.name=memagent, and this one's agent is {config.agent.name}: leave it "
            "out, or take that agent (--set agent.name=memagent)"
        )
    if method == "memagent":
        return AgentReader(config, tokenizer, window)
    find: dict[str, Callable[[Task], list[str]]] = {
        "blank_memory": lambda _: [],
        "long_context": lambda task: [document_of(task)],
        "rag": lambda task: best_paragraphs(task, config.rag_top_k),
        "gold": lambda task: gold_paragraphs(task, "--methods gold", "it is for ruler_hqa"),
        "no_context": lambda _: [],
    }
    if by_agent:
        return AgentReader(config, tokenizer, window, method, find[method])
    prompt = _document_prompt(config, tokenizer)
    limit = min(config.agent.max_final_tokens, window // 2)
    return SinglePrompt(tokenizer, window, limit, prompt, find[method])


@dataclass(frozen=True, slots=True)
class Prepared:
    """Token ids of one prompt, the response limit, and how many tokens of the document were cut out."""

    task: Task
    ids: list[int]
    max_new_tokens: int
    cut: int = 0


class SinglePrompt:
    """Everything in one prompt, one response.

    limit: response tokens; 0: as many as fit beside the longest prompt, at most MOST_GENERATED. prompt: makes the text
    from a task and the document's text. find: what of the document is shown; its middle is cut out where too long.
    """

    def __init__(
        self,
        tokenizer: Any,
        window: int,
        limit: int,
        prompt: Callable[[Task, str], str],
        find: Callable[[Task], list[str]] | None = None,
    ) -> None:
        self.tokenizer, self.window, self.limit, self.prompt, self.find = tokenizer, window, limit, prompt, find

    def prepare(self, tasks: Sequence[Task]) -> list[Prepared | TooLong]:
        """See `Reader`."""
        made = prepared(self._checked, tasks)
        longest = max((len(one[0]) for one in made if not isinstance(one, TooLong)), default=0)
        limit = self.limit or min(MOST_GENERATED, self.window - longest)
        if limit < 1 or longest + limit > self.window:
            room = self.window - longest
            fits = f"at most --max-gen-tokens {room} fits" if room > 0 else "no response fits"
            raise UserError(
                f"a response of {limit} tokens and the longest prompt of {longest} tokens are more than the context "
                f"window of {self.window} tokens: {fits}; or take a model with a longer one"
            )
        return [
            one if isinstance(one, TooLong) else Prepared(task, one[0], limit, one[1])
            for task, one in zip(tasks, made, strict=True)
        ]

    def first_prompt(self, prepared: Prepared) -> str:
        """See `Reader`."""
        return str(self.tokenizer.decode(prepared.ids))

    async def answer(self, prepared: Prepared, engine: Engine, options: RolloutOptions) -> Trajectory:
        """See `Reader`."""
        params = SamplingParams(prepared.max_new_tokens, options.temperature, options.seed_of_turn(0))
        completion = await engine.generate(prepared.ids, params, key=prepared.task.id)
        length_end = completion.finish_reason == "length"
        text = str(self.tokenizer.decode(completion.text_ids, skip_special_tokens=True))
        counters = {"truncated_final": 1} if length_end else {}
        if prepared.cut:
            counters["truncated_context"] = 1
        turns = [Turn("final", prepared.ids, completion)]
        return Trajectory(prepared.task.id, turns, 0.0, answer_text=text, counters=counters)

    def _checked(self, task: Task) -> tuple[list[int], int]:
        """Token ids of a task's prompt, and how many of the document were cut out. Raises QuestionTooLongError."""
        ids, cut = self._ids(task)
        if len(ids) >= self.window:
            raise QuestionTooLongError(
                f"task {task.id}: the prompt has {len(ids)} tokens and the context window {self.window}: take a model "
                "with a longer one"
            )
        return ids, cut

    def _ids(self, task: Task) -> tuple[list[int], int]:
        if self.find is None:
            return encode(self.tokenizer, self.prompt(task, "")), 0
        shown = "\n\n".join(self.find(task))
        ids = encode(self.tokenizer, self.prompt(task, shown))
        room = self.window - self.limit
        if len(ids) <= room:
            return ids, 0
        document = encode(self.tokenizer, shown)
        bare = len(encode(self.tokenizer, self.prompt(task, "")))
        if bare > room:
            raise QuestionTooLongError(
                f"task {task.id}: the prompt has {bare} tokens without any document, and the context window leaves "
                f"{room} beside the response: take a model with a longer one"
            )
        # Text that is cut between tokens may take a few more of them when it is put together again.
        keep = max(room - bare - 16, 0)
        head, tail = document[: keep // 2], document[len(document) - (keep - keep // 2) :]
        text = self.tokenizer.decode(head) + "\n\n" + self.tokenizer.decode(tail) if keep else ""
        return encode(self.tokenizer, self.prompt(task, text))[:room], len(document) - keep


class Trained(SinglePrompt):
    """Problems as the training's single-turn agent puts them: in the chat template, or as they stand with its marks."""

    def __init__(self, config: EvalConfig, tokenizer: Any, window: int) -> None:
        limit = config.max_gen_tokens or config.agent.max_final_tokens
        super().__init__(tokenizer, window, limit, lambda task, _: task.question)
        agent = as_class(SingleTurnConfig, config.agent)
        # The limit on questions is for the training's memory: here the window decides.
        self.agent = SingleTurn(agent.model_copy(update={"max_question_tokens": sys.maxsize}), tokenizer)

    def _ids(self, task: Task) -> tuple[list[int], int]:
        return self.agent.prepare(task).ids, 0


def _document_prompt(config: EvalConfig, tokenizer: Any) -> Callable[[Task, str], str]:
    if config.agent.template == "words":
        return lambda task, text: f"<u> question {task.question} ? memory {text or NOTHING} answer <a>"
    lacks = "the checkpoint's tokenizer has no chat template, which reading documents needs"

    def prompt(task: Task, text: str) -> str:
        content = bare_question(task.question)
        if text:
            words = "Below are an article and a problem. Answer the problem from the article and put the answer in"
            problem = f"<problem>\n{task.question}\n</problem>\n\nYour answer:"
            content = f"{words} \\boxed{{}}.\n\n<article>\n{text}\n</article>\n\n{problem}"
        return user_prompt(tokenizer, content, lacks, thinking=config.agent.enable_thinking)

    return prompt


BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
_QWEN = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
_QWEN_END = "<|im_end|>\n<|im_start|>assistant\n"

_BY_CHAT = ("chat", "chat-no-think", "memagent")
Template = Callable[[str, Any], str]
"""Problem and tokenizer -> prompt."""


def bare_question(problem: str) -> str:
    """The memory agent's wording for a question without anything to read."""
    instruction = "Answer the problem below and put the answer in \\boxed{}."
    return f"{instruction}\n\n<problem>\n{problem}\n</problem>\n\nYour answer:"


def _chat(text: str, tokenizer: Any, thinking: bool | None = None) -> str:
    others = ", ".join(name for name in TEMPLATES if name not in _BY_CHAT)
    lacks, otherwise = "the checkpoint's tokenizer has no chat template", "name a template with --prompt-type"
    return user_prompt(tokenizer, text, lacks, thinking=thinking, otherwise=f"{otherwise}: {others}")


def _fixed(before: str, after: str) -> Template:
    return lambda problem, _: before + problem + after


TEMPLATES: Mapping[str, Template] = {
    "chat": lambda problem, tokenizer: _chat(f"{problem}\n{BOXED}", tokenizer),
    "chat-no-think": lambda problem, tokenizer: _chat(f"{problem}\n{BOXED}", tokenizer, thinking=False),
    "memagent": lambda problem, tokenizer: _chat(bare_question(problem), tokenizer),
    # v0.2 begins with the token of the sequence's beginning, v0.3 has the same name and does not: scores differ.
    "r1-distilled-qwen": _fixed(
        "<\uff5cbegin\u2581of\u2581sentence\uff5c><\uff5cUser\uff5c>", f"\n{BOXED}<\uff5cAssistant\uff5c><think>\n"
    ),
    "r1-distilled-qwen-v0.3": _fixed("<\uff5cUser\uff5c>", f"\n{BOXED}<\uff5cAssistant\uff5c><think>\n"),
    "AReaL-boba": _fixed("<\uff5cUser\uff5c>", f"\n{BOXED}<\uff5cAssistant\uff5c><think>\n"),
    "qwen-boxed": _fixed(_QWEN, f"\n{BOXED}{_QWEN_END}"),
    "qwen25-math-cot": _fixed(f"<|im_start|>system\n{BOXED}<|im_end|>\n<|im_start|>user\n", _QWEN_END),
    "qwen3-think": _fixed("<|im_start|>user\n", f"\n{BOXED}/think{_QWEN_END}<think>"),
    "qwen3-think-pure": _fixed("<|im_start|>user\n", f"\n/think{_QWEN_END}<think>"),
    "plain": _fixed("", f"\n{BOXED}\n"),
    "none": _fixed("", ""),
}
"""none: the problem as it stands, for data whose prompts carry their marks already, as AReaL's training data do."""


def template_named(name: str) -> Template:
    """The template of that name; auto is chat. Raises UserError, with the nearest names, for an unknown one."""
    if name == "auto":
        return TEMPLATES["chat"]
    if name not in TEMPLATES:
        near = get_close_matches(name, TEMPLATES, n=2, cutoff=0.5)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise UserError(f"there is no prompt template '{name}'.{hint}\nTemplates: auto, {', '.join(TEMPLATES)}")
    return TEMPLATES[name]
