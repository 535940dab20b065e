"""`clusterkit ask`: print the memory as it changes, and the answer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from clusterkit.backends.base import Say
from clusterkit.common.text_plot import duration
from clusterkit.evaluate.ask import STDIN, Question
from clusterkit.evaluate.ask import ask as ask_question
from clusterkit.evaluate.process import require_evaluator
from clusterkit.ui import output
from trainer.errors import UserError

FIRST_ESTIMATE = 5
EVERY_ESTIMATE = 50
"""Sections after which the time that is left is told."""
SHORT_SECONDS = 30.0
"""Less is not told."""


def ask(typed: dict[str, Any], *, as_json: bool, shown: bool) -> None:
    """Have the files read and print the answer. typed: fields of `Question`; without files, standard input is read."""
    question = Question(**{**typed, "files": typed["files"] or (STDIN,)})
    if STDIN in question.files and sys.stdin.isatty():
        raise UserError("there is nothing to read: name text files, or send a text to standard input")
    require_evaluator()
    say: Say = output.note if shown and not as_json else lambda _: None

    spent = 0.0

    def show(event: dict[str, Any]) -> None:
        nonlocal spent
        for line in warnings_of(event):
            output.note(line)
        if as_json:
            output.line_json(event)
            return
        spent += event["seconds"] if event["event"] == "section" else 0.0
        for line in (*lines_of(event), *time_left(event, spent)):
            say(line)
        if event["event"] == "answer":
            output.result(event["answer"])

    ask_question(question, say, show)


def warnings_of(event: dict[str, Any]) -> Iterator[str]:
    """What makes an answer worthless, shown whatever else is."""
    unknown = {name: words for name, words in event.get("unknown_words", {}).items() if words["count"]}
    for name, words in unknown.items():
        more = ", …" if words["count"] > len(words["first"]) else ""
        number = f"{words['count']} {'word' if words['count'] == 1 else 'words'}"
        yield f"warning: the model does not know {number} of the {name}: {', '.join(words['first'])}{more}"
    if unknown:
        yield (
            "It reads all of them as one and the same, so do not trust the answer. Its tokenizer has the words of its "
            "training only (clusterkit trace --heldout shows some): ask about those, or name a checkpoint of a model "
            "that knows any text, such as one of clusterkit train --preset 135M, with --model-path"
        )


def time_left(event: dict[str, Any], spent: float) -> Iterator[str]:
    """Yield how long a long reading still takes, now and then. spent: seconds of the sections until now."""
    if event["event"] != "section" or not (event["number"] == FIRST_ESTIMATE or event["number"] % EVERY_ESTIMATE == 0):
        return
    left = spent / event["number"] * (event["sections"] - event["number"])
    if left >= SHORT_SECONDS:
        yield f"about {duration(left)} left"


def lines_of(event: dict[str, Any]) -> Iterator[str]:
    """What is shown of an event beside the answer."""
    if event["event"] == "document":
        sections = f"{event['sections']} {'section' if event['sections'] == 1 else 'sections'}"
        yield f"{event['tokens']} tokens in {sections}, read by {event['model_path']}"
        if event["left_out_tokens"]:
            yield f"of these, {event['left_out_tokens']} tokens in the middle are left out (agent.max_chunks)"
    elif event["event"] == "section":
        cut = ", cut at agent.max_memory_tokens" if event["truncated"] else ""
        changed = f"{event['memory_tokens']} tokens{cut}" if event["changed"] else "unchanged"
        yield f"section {event['number']} of {event['sections']}: memory {changed}"
        if event["changed"]:
            lines = event["memory"].splitlines() if event["memory"].strip() else ["(blank)"]
            yield from (f"    {line}" for line in lines)
    elif event["truncated"]:
        yield "the answer was cut at agent.max_final_tokens"
