"""Examples as rows of token ids: one row for every answer, with all that came before it as the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainer.agents.template import encode
from trainer.config import RunConfig
from trainer.errors import UserError
from trainer.tasks.examples import ASSISTANT, Example
from trainer.types import Row

Message = tuple[str, str]


class Encoder:
    """Makes rows in the wording that the model will be asked in later: its chat template, or the tiny model's words.

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

    def rows(self, example: Example, number: int) -> list[Row]:
        """A row for every answer; the loss is on the answer and its end token. number: of the example in its step."""
        return [
            self._row(example.messages[:place], content, example, number)
            for place, (role, content) in enumerate(example.messages)
            if role == ASSISTANT and place and content.strip()
        ]

    def _row(self, before: Sequence[Message], answer: str, example: Example, number: int) -> Row:
        prompt = encode(self.tokenizer, self._prompt(before, example))
        response = [*encode(self.tokenizer, answer), self.tokenizer.eos_token_id]
        return Row(prompt, response, [0.0] * len(response), advantage=1.0, weight=0.0, trajectory=number)

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
