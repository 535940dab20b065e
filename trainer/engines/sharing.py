"""Prefill the common prefix of a group's prompts once, before the prompts themselves are sent.

An engine's prefix cache serves only prefixes that it has already prefilled, so requests that arrive together all miss
it. `PrefixSharing` therefore holds such prompts back, sends their common prefix alone (one token is sampled), and lets
them go when it is in the cache. Common prefixes are found by comparing token ids within a group; a group is all
requests with the same key. An agent that knows how its next prompts begin announces it with `expect`.

This affects speed only. When the prefill fails or takes too long, the prompts are sent as they are.

In this file, to *read* tokens means to prefill them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from trainer.engines.served_stats import EVALUATES

log = logging.getLogger(__name__)

Ids = npt.NDArray[np.int32]

LEAST_SHARED = 64
"""Fewest tokens of a prefix that a prompt waits for: fewer are prefilled again in less time than the wait takes."""
SHARE = 1 / 8
"""Smallest fraction of a prompt that it waits for."""
MOST_WAIT_S = 30.0
"""Longest time in seconds that a prompt waits for prefixes, in all."""
ROUNDS = 3
"""How many prefixes in a row a prompt waits for: new weights or the end of a server cut a prefill off."""
PREFIXES_KEPT = 16
"""Prefixes that are remembered of a group: those of its present turn and some more."""
GROUPS_KEPT = 1024
"""Groups that are remembered."""
SETTLE_S = 0.05
"""Seconds between a request and the next look for announced prefixes to read ahead: requests go first."""

State = Literal["expected", "sent", "reading", "read"]


@dataclass(slots=True, eq=False)
class _Prefix:
    """Token ids that prompts of a group begin with.

    Attributes:
        ids: the tokens, [length].
        state: expected (announced, not read), sent (a whole prompt under way, read at an unknown time), reading, read.
        place: server and weights that have read it; None until then.
        evaluates: whether it was named first by an evaluation, to which reading it is counted.
        announced: the agent announced it, so no other prompt shares what follows it.
        used: another prompt began with at least half of it.
    """

    ids: Ids
    state: State
    place: Hashable = None
    announced: bool = False
    used: bool = False
    job: asyncio.Task[None] | None = None
    evaluates: bool = field(default_factory=EVALUATES.get)

    def is_at(self, place: Hashable) -> bool:
        return self.state == "read" and self.place == place


@dataclass(slots=True)
class _Group:
    """The requests of one key.

    Attributes:
        prefixes: what is known to be read or under way, the oldest first.
        arriving: prompts about which nothing is decided yet.
        shares: whether a later prompt of the last turn shared what its first prompt had.
        guess: the prompt that was last read as a prefix although no other prompt was there to share it.
        last: the prompt that came last, and its ids.
    """

    live: int = 0
    prefixes: list[_Prefix] = field(default_factory=list)
    arriving: list[Ids] = field(default_factory=list)
    shares: bool = False
    guess: _Prefix | None = None
    last: tuple[Sequence[int], Ids] | None = None

    def ids_of(self, prompt: Sequence[int]) -> Ids:
        """Ids as an array of the prompt's own. All trajectories of a group begin with the same prompt: one is made."""
        if self.last is None or (self.last[0] is not prompt and self.last[0] != prompt):
            self.last = prompt, np.array(prompt, dtype=np.int32)
        return self.last[1][:]

    def keep(self, prefix: _Prefix) -> _Prefix:
        self.prefixes.append(prefix)
        if len(self.prefixes) > PREFIXES_KEPT:
            # What is being read is waited for.
            old = next((p for p in self.prefixes if p.state != "reading"), self.prefixes[0])
            self.prefixes.remove(old)
        return prefix


async def at_once() -> None:
    """There is nothing to wait for."""


class PrefixSharing:
    """Decides when a prompt is sent, and which prefix is read before it.

    Args:
        read: reads token ids for a key; returns the place (server and weights) that has read them, None on failure.
        place: the place that a key's requests go to now; None where that is not decided.
        admitted: returns once requests may be sent.
        room: whether the key's server has room for work that no request waits for.

    Attributes:
        enabled: False: every prompt is sent at once.
        holds: whether prompts wait for a prefix. A server that shares prefixes within a batch does not need that.
        ahead: whether announced prefixes are read while the server has room, before a prompt that has them arrives.
        waits: number of waits of prompts for a prefix.
        wait_seconds: sum of their seconds.
    """

    def __init__(
        self,
        read: Callable[[list[int], str], Awaitable[Hashable]],
        place: Callable[[str], Hashable],
        admitted: Callable[[], Awaitable[None]] = at_once,
        room: Callable[[str], bool] = lambda _key: True,
    ) -> None:
        self.enabled = True
        self.holds = True
        self.ahead = False
        self.waits, self.wait_seconds = 0, 0.0
        self._read_ids, self._place, self._admitted, self._room = read, place, admitted, room
        self._groups: OrderedDict[str, _Group] = OrderedDict()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._queue: deque[tuple[str, _Prefix]] = deque()
        self._busy: set[Hashable] = set()
        self._look_due = False

    @contextmanager
    def member(self, key: str) -> Iterator[None]:
        """Count a request of this key for the length of a block. When the last is cancelled, so are its prefills."""
        if not self.enabled or not key:
            yield
            return
        group = self._group(key)
        group.live += 1
        try:
            yield
        except asyncio.CancelledError:
            if group.live == 1:
                self._drop(key, group)
            raise
        finally:
            group.live -= 1

    async def ready(self, prompt: Sequence[int], key: str) -> _Prefix | None:
        """Wait until a prompt should be sent. The result is to be given to `answered`."""
        if not self.enabled or not key or len(prompt) < LEAST_SHARED:
            return None
        if not self.holds:
            self._look_later()
            return None
        group = self._group(key)
        ids = group.ids_of(prompt)
        deadline = time.monotonic() + MOST_WAIT_S
        try:
            for _ in range(ROUNDS):
                paused = time.monotonic()
                await self._admitted()
                deadline += time.monotonic() - paused  # an update of the weights is no wait for another prompt
                group.arriving.append(ids)
                try:  # one turn of the event loop later all that come at this moment are there
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)
                    prefix = self._prefix_to_wait_for(group, ids, key)
                finally:
                    _remove(group.arriving, ids)
                if prefix is None:
                    break
                assert prefix.job is not None
                began = time.monotonic()
                await asyncio.wait({prefix.job}, timeout=max(0.0, deadline - began))
                self.waits += 1
                self.wait_seconds += time.monotonic() - began
                if time.monotonic() >= deadline or prefix.state == "read":
                    break
            return self._note_sent(group, ids, key)
        finally:
            self._look_later()

    def answered(self, sent: _Prefix | None, place: Hashable) -> None:
        """Note that a prompt was answered, and has therefore been read there. sent: what `ready` returned for it."""
        if sent is not None and sent.state == "sent":
            sent.state, sent.place = "read", place

    def expect(self, prefix: Sequence[int], key: str) -> None:
        """Announce how the next prompts of a key begin. Each of its requests may announce the same."""
        if not self.enabled or not (self.holds or self.ahead) or not key or len(prefix) < LEAST_SHARED:
            return
        group, ids = self._group(key), np.array(prefix, dtype=np.int32)
        if any(len(p.ids) == len(ids) and p.announced and np.array_equal(p.ids, ids) for p in group.prefixes):
            return
        made = group.keep(_Prefix(ids, "expected", announced=True))
        if self.ahead:
            self._queue.append((key, made))

    # -- one prompt -------------------------------------------------------------------------------------------------

    def _prefix_to_wait_for(self, group: _Group, ids: Ids, key: str) -> _Prefix | None:
        """The prefix that this prompt should wait for: one that is being read, or whose reading is started here."""
        place, least = self._place(key), least_shared(len(ids))
        shared = [(common_prefix(ids, p.ids), p) for p in group.prefixes]
        for length, prefix in shared:
            prefix.used = prefix.used or 2 * length >= len(prefix.ids)
        known = max((length for length, prefix in shared if prefix.is_at(place)), default=0)
        worth = [pair for pair in shared if pair[1].state == "reading" and pair[0] - known >= least]
        if worth:
            return max(worth, key=lambda pair: pair[0])[1]
        if group.live < 2:
            return None
        announced = [prefix for length, prefix in shared if prefix.announced and length == len(prefix.ids)]
        if announced:
            longest = max(announced, key=lambda prefix: len(prefix.ids))
            return self._start(group, longest, key) if len(longest.ids) - known >= least else None
        others = [common_prefix(ids, other) for other in group.arriving if other is not ids]
        on_their_way = [length for length, prefix in shared if prefix.state == "sent"]
        most = max([*others, *on_their_way], default=0)
        if most - known >= least:
            group.shares = group.shares or most in on_their_way
            return self._start(group, group.keep(_Prefix(ids[:most], "expected", used=True)), key)
        return self._guessed(group, ids, key) if len(ids) - known >= least else None

    def _guessed(self, group: _Group, ids: Ids, key: str) -> _Prefix | None:
        """Read the first prompt of a turn as a prefix, if later prompts of the last turn shared what their first had.

        None where they did not, or where the last prompt that was read in this way was shared by no other.
        """
        if group.guess is not None and not group.guess.used:
            group.shares = False
        if not group.shares:
            return None
        group.guess = group.keep(_Prefix(ids, "expected"))
        return self._start(group, group.guess, key)

    def _note_sent(self, group: _Group, ids: Ids, key: str) -> _Prefix | None:
        """Remember a prompt that is sent now; None where known prefixes cover nearly all that others could share."""
        least, place = least_shared(len(ids)), self._place(key)
        for prefix in group.prefixes:
            length = common_prefix(ids, prefix.ids)
            is_known = prefix.state in ("reading", "sent") or prefix.is_at(place)
            if is_known and (len(ids) - length < least or (prefix.announced and length == len(prefix.ids))):
                return None
        return group.keep(_Prefix(ids, "sent"))

    # -- reading ----------------------------------------------------------------------------------------------------

    def _start(self, group: _Group, prefix: _Prefix, key: str) -> _Prefix:
        prefix.state = "reading"
        prefix.job = asyncio.get_running_loop().create_task(self._read(group, prefix, key))
        return prefix

    async def _read(self, group: _Group, prefix: _Prefix, key: str) -> None:
        EVALUATES.set(prefix.evaluates)  # another request may have had it looked at
        place: Hashable = None
        try:
            place = await self._read_ids(prefix.ids.tolist(), key)
        except Exception as error:
            log.warning("a prefix could not be read ahead: %s: %s", type(error).__name__, error)
        finally:
            if place is not None:
                prefix.state, prefix.place = "read", place
            elif prefix.announced:
                prefix.state = "expected"
            elif prefix in group.prefixes:
                prefix.state = "expected"
                group.prefixes.remove(prefix)

    def _look_later(self) -> None:
        if self._queue and not self._look_due:
            self._look_due = True
            asyncio.get_running_loop().call_later(SETTLE_S, self._look)

    def _look(self) -> None:
        """Read announced prefixes that no prompt has waited for yet, one at a time on each server with room."""
        self._look_due = False
        for _ in range(len(self._queue)):
            key, prefix = self._queue.popleft()
            group, place = self._groups.get(key), self._place(key)
            if group is None or not group.live or prefix.state != "expected" or prefix not in group.prefixes:
                continue
            if place is None or place in self._busy or not self._room(key):
                self._queue.append((key, prefix))
                continue
            self._busy.add(place)
            started = self._start(group, prefix, key)
            assert started.job is not None
            started.job.add_done_callback(lambda _job, place=place: self._read_ahead(place))  # type: ignore[misc]

    def _read_ahead(self, place: Hashable) -> None:
        self._busy.discard(place)
        if self._loop is not None and not self._loop.is_closed():
            self._look()

    # -- groups -----------------------------------------------------------------------------------------------------

    def _group(self, key: str) -> _Group:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # the tasks of the earlier event loop have ended with it
            self._groups.clear()
            self._queue.clear()
            self._busy.clear()
            self._look_due = False
            self._loop = loop
        group = self._groups.setdefault(key, _Group())
        self._groups.move_to_end(key)
        if len(self._groups) > GROUPS_KEPT:
            idle = next((name for name, one in self._groups.items() if not one.live and name != key), None)
            if idle is not None:
                del self._groups[idle]
        return group

    def _drop(self, key: str, group: _Group) -> None:
        for prefix in group.prefixes:
            if prefix.job is not None and prefix.state == "reading":
                prefix.job.cancel()
        self._groups.pop(key, None)


def least_shared(length: int) -> int:
    """Fewest tokens that a prompt of this length waits for."""
    return max(LEAST_SHARED, int(length * SHARE))


def common_prefix(one: Ids, other: Ids) -> int:
    """Length of the common prefix of two prompts, in tokens."""
    size = min(len(one), len(other))
    differs = one[:size] != other[:size]
    first = int(differs.argmax()) if size else 0
    return first if size and differs[first] else size


def common_beginnings(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Length of the prefix that each of several different prompts shares with others, in tokens; 0 for none.

    Neighbours in sorted order belong to one group where they share at least half of the shorter one. The last token of
    a prompt is never part of a shared prefix.
    """
    order = sorted(range(len(prompts)), key=lambda i: list(prompts[i]))
    arrays = [np.array(prompts[i], dtype=np.int32) for i in order]
    found = [0] * len(prompts)
    first, shared = 0, 0
    for place in range(1, len(order) + 1):
        more = 0
        if place < len(order):
            one, other = arrays[place - 1], arrays[place]
            least = min(len(one), len(other))
            length = min(common_prefix(one, other), least - 1)
            more = length if 2 * length >= least else 0
        if more:
            shared = min(shared, more) if place - first > 1 else more
            continue
        if place - first > 1:
            for i in order[first:place]:
                found[i] = min(shared, len(prompts[i]) - 1)
        first, shared = place, 0
    return found


def _remove(arrays: list[Ids], one: Ids) -> None:
    for place, array in enumerate(arrays):
        if array is one:
            del arrays[place]
            return
