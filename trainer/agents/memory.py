"""The structured memory of Mem-alpha (Wang et al. 2025): one core text and two stores of entries, changed by calls.

Every call is answered: with what it did, or with why it did nothing. Nothing that a model writes can raise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from trainer.agents.tool_calls import ToolCall

INSERT, UPDATE, DELETE = "new_memory_insert", "memory_update", "memory_delete"
STORES = {"semantic": "sem", "episodic": "epi"}
"""Stores by name, with what the ids of their entries begin with."""

MOST_CHARACTERS = 50_000
"""Longest entry; responses within the usual limits are shorter."""


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """What a call did.

    ok: it was carried out.
    message: the answer to the call.
    store: core, semantic or episodic; "" where the call names none of them.
    memory_id, content: id and text of the entry that was written.
    """

    tool: str
    ok: bool
    message: str
    store: str = ""
    memory_id: str = ""
    content: str = ""


class _RefusedError(Exception):
    """A call that cannot be carried out; its text is the answer."""


@dataclass(slots=True)
class Memory:
    """The memory of one trajectory.

    cut: shortens a core text to its limit.
    core: one text.
    stores: entries by id in the order in which they were made, by store.
    made: number of entries ever made, by store.
    """

    cut: Callable[[str], str] = lambda text: text
    core: str = ""
    stores: dict[str, dict[str, str]] = field(default_factory=lambda: {name: {} for name in STORES})
    made: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STORES, 0))

    def apply(self, call: ToolCall) -> CallOutcome:
        """Carry a call out, or answer why not. Changes nothing where it is refused."""
        if call.problem:
            return CallOutcome("", False, call.problem)
        tool = {INSERT: self._insert, UPDATE: self._update, DELETE: self._delete}.get(call.name)
        if tool is None:
            name = call.name[:80]
            return CallOutcome(name, False, f"there is no tool {name}: use {INSERT}, {UPDATE} or {DELETE}")
        try:
            return tool(call.arguments)
        except _RefusedError as refused:
            return CallOutcome(call.name, False, str(refused))

    def texts(self) -> list[str]:
        """Everything that the memory holds: the core text where there is one, then all entries."""
        entries = [text for store in self.stores.values() for text in store.values()]
        return [self.core, *entries] if self.core else entries

    def as_dict(self) -> dict[str, Any]:
        """For the record and the reward."""
        return {"core": self.core, **{name: dict(entries) for name, entries in self.stores.items()}}

    def _insert(self, arguments: dict[str, Any]) -> CallOutcome:
        store = _store(arguments, core=False)
        content = _text(arguments, "content")
        entries = self.stores[store]
        for known, text in entries.items():
            if text == content:
                raise _RefusedError(f"{known} says exactly that already")
        self.made[store] += 1
        memory_id = f"{STORES[store]}_{self.made[store]:04d}"
        entries[memory_id] = content
        return CallOutcome(INSERT, True, f"kept as {memory_id}", store, memory_id, content)

    def _update(self, arguments: dict[str, Any]) -> CallOutcome:
        store = _store(arguments, core=True)
        content = _text(arguments, "new_content")
        if store == "core":
            if content == self.core:
                raise _RefusedError("core says exactly that already")
            self.core = self.cut(content)
            cut = "" if self.core == content else f"; cut to {len(self.core)} of {len(content)} characters"
            return CallOutcome(UPDATE, True, f"core is replaced{cut}", "core", "", self.core)
        memory_id = self._known(store, arguments)
        entries = self.stores[store]
        if content in entries.values():
            raise _RefusedError(f"an entry of {store} says exactly that already")
        entries[memory_id] = content
        return CallOutcome(UPDATE, True, f"{memory_id} is replaced", store, memory_id, content)

    def _delete(self, arguments: dict[str, Any]) -> CallOutcome:
        store = _store(arguments, core=True)
        if store == "core":
            if not self.core:
                raise _RefusedError("core is empty already")
            self.core = ""
            return CallOutcome(DELETE, True, "core is emptied", "core")
        memory_id = self._known(store, arguments)
        del self.stores[store][memory_id]
        return CallOutcome(DELETE, True, f"{memory_id} is removed", store, memory_id)

    def _known(self, store: str, arguments: dict[str, Any]) -> str:
        memory_id = arguments.get("memory_id")
        if not isinstance(memory_id, str):
            raise _RefusedError(f"memory_id must be a text such as {STORES[store]}_0001, not {_kind(memory_id)}")
        if memory_id not in self.stores[store]:
            raise _RefusedError(f"{store} has no entry {memory_id[:40]}")
        return memory_id


def _store(arguments: dict[str, Any], *, core: bool) -> str:
    value = arguments.get("memory_type")
    name = value.strip().lower().removesuffix("_memory") if isinstance(value, str) else ""
    allowed = ("core", *STORES) if core else tuple(STORES)
    if name not in allowed:
        shown = repr(value[:40]) if isinstance(value, str) else _kind(value)
        raise _RefusedError(f"memory_type must be {' or '.join(allowed)}, not {shown}")
    return name


def _text(arguments: dict[str, Any], key: str) -> str:
    value = arguments.get(key)
    if not isinstance(value, str):
        raise _RefusedError(f"{key} must be a text, not {_kind(value)}")
    text = value.strip()
    if not text:
        raise _RefusedError(f"{key} is empty")
    if len(text) > MOST_CHARACTERS:
        raise _RefusedError(f"{key} has {len(text)} characters; {MOST_CHARACTERS} is the most")
    return text


def _kind(value: Any) -> str:
    kinds = {type(None): "missing", bool: "a boolean", int: "a number", float: "a number", list: "a list"}
    return kinds.get(type(value), "an object")


_ID = {"memory_id": {"type": "string", "description": "Id of the entry; not for core."}}


def _tool(name: str, description: str, stores: list[str], where: str, properties: dict[str, Any]) -> dict[str, Any]:
    """A tool's schema; the store and a new text are required, the id of an entry is not."""
    store = {"memory_type": {"type": "string", "enum": stores, "description": where}}
    parameters = {
        "type": "object",
        "properties": {**store, **properties},
        "required": ["memory_type", *(key for key in properties if key not in _ID)],
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS: tuple[dict[str, Any], ...] = (
    _tool(
        INSERT, "Add an entry to semantic or episodic memory.", list(STORES), "The store to add to.",
        {"content": {"type": "string", "description": "The entry; it must be clear on its own."}},
    ),
    _tool(
        UPDATE, "Replace an entry, or the whole core memory.", ["core", *STORES], "Where it is.",
        {"new_content": {"type": "string", "description": "What stands there from now on."}, **_ID},
    ),
    _tool(DELETE, "Remove an entry, or empty the core memory.", ["core", *STORES], "Where it is.", _ID),
)  # fmt: skip
"""The tools as chat templates want them."""
