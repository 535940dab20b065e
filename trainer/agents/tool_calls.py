"""Tool calls in a response: Qwen's `<tool_call>{…}</tool_call>`, or plain JSON objects where there is no such tag.

A call's JSON is read by a JSON parser from its first brace on, so tags and calls *inside* a string (a document that
holds tool syntax and was copied into an entry) are text and nothing else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_THINK, _THINK_END = "<think>", "</think>"
MOST_UNREAD = 1000
"""Brackets that open no JSON, after which the rest of a response is text: each costs a look at all before it."""
_BRACKET = re.compile(r"[{\[]")
_HALF = re.compile("[\ud800-\udfff]")
_DECODER = json.JSONDecoder(strict=False)  # models write line breaks into strings as they are


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call as the model wrote it. problem: why it cannot be read; name and arguments are then empty."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


def parse_calls(response: str) -> list[ToolCall]:
    """Read the calls of a response, in order; text around them is passed over, and so is what was thought before them.

    What stands after a tag and is no call is one with a `problem`; without tags only objects with a name are calls.
    """
    text = _after_thinking(response)
    return list(_plain(text) if _within_json(text, text.find(OPEN)) else _tagged(text))


def _after_thinking(text: str) -> str:
    """What follows the thoughts. An end of thoughts within a call is text: a document may hold one."""
    end = text.find(_THINK_END)
    if end < 0 or (not text.lstrip().startswith(_THINK) and _within_json(text, end)):
        return text
    return text[end + len(_THINK_END) :]


def _within_json(text: str, place: int) -> bool:
    """Whether a place is inside of JSON that begins before it; true for a place that there is not (-1)."""
    position = unread = 0
    while unread < MOST_UNREAD and 0 <= (start := _next_bracket(text, position)) < place:
        found = _decode(text, start)
        if found is None:
            position, unread = start + 1, unread + 1
        elif found[1] > place:
            return True
        else:
            position = found[1]
    return place < 0


def _tagged(text: str) -> Iterator[ToolCall]:
    position = 0
    while (start := text.find(OPEN, position)) >= 0:
        body = start + len(OPEN)
        found = _decode(text, body)
        if found is None:
            end = text.find(CLOSE, body)
            cut = " (the response ends within it)" if end < 0 else ""
            position = len(text) if end < 0 else end + len(CLOSE)
            yield ToolCall(problem=f"the call is not JSON{cut}")
            continue
        value, position = found
        yield _call(value)


def _plain(text: str) -> Iterator[ToolCall]:
    position = unread = 0
    while unread < MOST_UNREAD and (start := _next_bracket(text, position)) >= 0:
        found = _decode(text, start)
        if found is None:
            position, unread = start + 1, unread + 1
            continue
        value, position = found
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, dict) and "name" in one:
                yield _call(one)


def _next_bracket(text: str, position: int) -> int:
    found = _BRACKET.search(text, position)
    return found.start() if found else -1


def _decode(text: str, position: int) -> tuple[Any, int] | None:
    while position < len(text) and text[position].isspace():
        position += 1
    try:
        value, end = _DECODER.raw_decode(text, position)
    except (ValueError, RecursionError):
        return None
    return value, end


def _whole(value: Any) -> Any:
    """Without halves of surrogate pairs: JSON can spell them, and no tokenizer, file or request can hold them."""
    if isinstance(value, str):
        return _HALF.sub("\ufffd", value)
    if isinstance(value, list):
        return [_whole(one) for one in value]
    if isinstance(value, dict):
        return {_whole(name): _whole(one) for name, one in value.items()}
    return value


def _call(value: Any) -> ToolCall:
    try:
        value = _whole(value)
    except RecursionError:
        return ToolCall(problem="the call is nested too deeply")
    if not isinstance(value, dict):
        return ToolCall(problem="the call is no JSON object")
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters", {}))
    if not isinstance(name, str) or not name:
        return ToolCall(problem="the call has no name")
    if isinstance(arguments, str):
        found = _decode(arguments, 0)
        return _call({"name": name, "arguments": found[0] if found and isinstance(found[0], dict) else None})
    if not isinstance(arguments, dict):
        return ToolCall(problem=f"the arguments of {name[:80]} are no JSON object")
    return ToolCall(name, arguments)
