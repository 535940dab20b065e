"""Examples of a JSON-lines file: prompt and answer, a chat's messages, or what to remember; which are held out.

{"prompt": "Where do herons nest?", "answer": "In trees near the water."}
{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}
{"problem": "Where do herons nest?", "context": "Document 1:\nHeron\n…", "answer": "in trees",
 "evidence": [["Heron", "They nest in trees."]]}

The last is a trace: a document is read section by section, the memory is to hold the evidence, titles with sentences,
as far as it was read, and the answer comes from the memory. Without a context it is the last turn alone. It may have
"distractors", a list like the evidence, what misleads most first: they stand in the memories that turns are shown while
there is room, and no turn learns to add one. "sentences": of such a memory, at most (2).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.config_tasks import SftConfig
from trainer.errors import UserError
from trainer.seeding import shuffled_numbers, unit_interval
from trainer.tasks.evidence import MOST_SENTENCES
from trainer.tasks.jsonl import Row as Line
from trainer.tasks.jsonl import kind, read_rows

ASSISTANT = "assistant"
NOTHING = "none so far"
"""What a memory says that knows nothing yet, in traces."""


@dataclass(frozen=True, slots=True)
class Trace:
    """What an agent with a memory is to keep of a document.

    evidence, distractors: (title, sentence). sentences: of a memory that has distractors, at most.
    """

    problem: str
    context: str
    evidence: tuple[tuple[str, str], ...]
    answer: str
    distractors: tuple[tuple[str, str], ...] = ()  # what misleads most first
    sentences: int = MOST_SENTENCES


@dataclass(frozen=True, slots=True)
class Example:
    """One line. messages: (role, content) in order; `plain` where it was a prompt and an answer; a trace has its own.

    id: hash of the text; of a trace: of its problem, so that a problem is on one side whatever is around it.
    """

    id: str
    messages: tuple[tuple[str, str], ...]
    plain: bool
    trace: Trace | None = None


@dataclass(frozen=True)
class Examples:
    """The two sides of a file, each in the file's order. path: of the file."""

    path: Path
    train: Sequence[Example]
    heldout: Sequence[Example]

    def order(self, seed: int, epoch: int) -> list[int]:
        """Numbers of the training examples in the order of an epoch."""
        return shuffled_numbers(len(self.train), "sft-epoch", seed, epoch)


def load_examples(config: SftConfig) -> Examples:
    """Read the file that `task.path` (and `task.dataset`) name and hold out a share of it by the hash of the text.

    Raises:
        UserError: there is no such file, a line is no example, or too few are left to train on.
    """
    path = examples_file(config)
    found = [_example(line) for line in read_rows(path)]
    shares = {example.id: unit_interval("sft-split", example.id) for example in found}
    # At least one: the smallest share of a short file.
    bound = max(config.eval_fraction, min(shares.values()))
    heldout = [e for e in found if shares[e.id] < config.eval_fraction] or [e for e in found if shares[e.id] <= bound]
    out = {example.id for example in heldout}
    train = [example for example in found if example.id not in out]
    if not train:
        raise UserError(
            f"{path}: all {len(found)} examples are held out: give it more, or lower task.eval_fraction="
            f"{config.eval_fraction}"
        )
    return Examples(path, train[: config.train_size], heldout)


def examples_file(config: SftConfig) -> Path:
    """Where the examples are. Raises UserError where the settings do not say."""
    if not config.path:
        raise UserError(
            "task.path is empty: name a JSON-lines file of examples, each with prompt and answer or with messages: "
            "task.path=FILE.jsonl"
        )
    path = Path(config.path).expanduser()
    if config.dataset:
        return path / config.dataset
    if path.is_dir():
        raise UserError(f"task.path={config.path} is a folder: name the file within it with task.dataset=FILE.jsonl")
    return path


def _example(line: Line) -> Example:
    if "problem" in line.fields and "evidence" in line.fields:
        return _traced(line)
    if "messages" in line.fields:
        messages, plain = _messages(line), False
    else:
        messages, plain = (("user", line.text("prompt")), (ASSISTANT, line.text("answer"))), True
    digest = hashlib.sha256(json.dumps(messages).encode()).hexdigest()[:16]
    return Example(digest, messages, plain)


def _traced(line: Line) -> Example:
    evidence, distractors = _pairs(line, "evidence"), _pairs(line, "distractors")
    context = line.text("context", default="")
    sentences = line.fields.get("sentences", MOST_SENTENCES)
    if not isinstance(sentences, int) or isinstance(sentences, bool) or sentences < 1:
        raise line.error("column 'sentences' must be a whole number above 0")
    trace = Trace(line.text("problem"), context, evidence, line.text("answer"), distractors, sentences)
    kept = " ".join(text for pair in (*evidence, *distractors) for text in (f"{pair[0]}:", *pair))
    # All of its words, for a model that is built from them, and its length.
    messages = (("user", f"{trace.problem} {trace.context}"), (ASSISTANT, f"{NOTHING} {kept} {trace.answer}"))
    return Example(hashlib.sha256(trace.problem.encode()).hexdigest()[:16], messages, plain=False, trace=trace)


def _pairs(line: Line, name: str) -> tuple[tuple[str, str], ...]:
    pairs = line.fields.get(name, [])
    if not isinstance(pairs, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) and text.strip() for text in pair)
        for pair in pairs
    ):
        raise line.error(f"column '{name}' must be a list of [title, sentence], both texts")
    return tuple((title, sentence) for title, sentence in pairs)


def _messages(line: Line) -> tuple[tuple[str, str], ...]:
    value = line.fields["messages"]
    if not isinstance(value, list) or not value:
        raise line.error(f"column 'messages' must be a list of messages, not {kind(value)}")
    found = []
    for number, message in enumerate(value, start=1):
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if not isinstance(role, str) or not isinstance(content, str):
            raise line.error(f"message {number} must have a role and a content, both texts")
        found.append((role, content))
    if not any(role == ASSISTANT and content.strip() for role, content in found[1:]):
        raise line.error("no message with role assistant answers another: there is nothing to learn")
    return tuple(found)
