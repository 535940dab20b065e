r"""Prompt templates of problems, by name: what stands around a problem, and where the response begins.

Names are AReaL's where it has the template. The text is tokenised as it is, with no further token before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from trainer.agents.template import user_prompt
from trainer.errors import UserError

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
