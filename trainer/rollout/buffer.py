"""Which groups are under way, and which are taken next: staleness bounded by how many there may be, not by a filter.

With B groups a step and a staleness limit of η versions, at most B·(η + 1) groups are admitted and not yet trained,
those in training included: a whole step's groups can be generated while the step before is trained. A group that was
admitted under version v must be taken, at the latest, by the step that starts from version v + η. Let the next step
start from version V. If groups are taken strictly in the order of their admission, none is ever late: of those
outstanding at most B·(k + 1) are due by version V + k, for every k, since the newest are due last of all, by V + η, and
there are at most B·(η + 1) together. A finished group may overtake older ones only where this stays true of what it
leaves behind. So no group is ever too old, and none has to be thrown away. η = 0 means that a step's groups, all of
them, are under way, and none beside them, which is synchronous training.

The window is that of MiniMax's windowed FIFO: strictly the oldest first would let one slow document hold up everybody,
any finished one first would learn from short documents before long ones. Of W groups that follow one another, the
oldest among them, any may be taken.

A run begins with nothing to train on. All that is allowed ahead, begun at once, would share the servers, and the judge
of its scores, with the first step's groups and make the trainer wait for all of it together. So only a step's groups
are being generated at a time until as many are generated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from trainer.types import Group

WINDOW_SHARE = 0.3


@dataclass(slots=True, eq=False)
class Slot:
    """A group under way or finished. number: of its task. version: of the weights when it was admitted. order: it is
    the so manieth that was admitted. generated: nothing but scores is missing.
    """

    number: int
    version: int
    order: int
    group: Group | None = None
    generated: bool = False


class WorkBuffer:
    """The groups of a run that were admitted and are not trained yet. Not safe for several threads.

    Args:
        batch: groups of a step. staleness: largest age in versions, η. window: W, see above; 0: three tenths of a
            batch, 1 without staleness. numbers: of the tasks, in order, without end. first_alone: the first step's
            groups are not held up by those after them, see above.
    """

    def __init__(
        self, batch: int, staleness: int, window: int, numbers: Iterator[int], first_alone: bool = False
    ) -> None:
        wanted = window or max(1, int(WINDOW_SHARE * batch))
        self.batch, self.staleness = batch, staleness
        self.window = min(wanted, batch) if staleness else 1
        self.capacity = batch * (staleness + 1)
        self.slots: list[Slot] = []
        self.dropped: list[int] = []
        self._numbers = numbers
        self._upcoming = deque[int]()
        self._in_training = 0
        self._admitted = 0
        self._first_alone = first_alone

    @property
    def running(self) -> list[Slot]:
        """Groups that are not finished, the oldest first."""
        return [slot for slot in self.slots if slot.group is None]

    def admit(self, version: int) -> list[Slot]:
        """Slots for new groups, as many as there is room for, each with the number of its task."""
        room = self.capacity - self._in_training - len(self.slots)
        if self._first_alone:
            generating = sum(slot.group is None and not slot.generated for slot in self.slots)
            if len(self.slots) - generating >= self.batch:
                self._first_alone = False
            else:
                room = min(room, self.batch - generating)
        numbers = self.upcoming(max(room, 0))
        fresh = [Slot(number, version, order) for order, number in enumerate(numbers, self._admitted)]
        for _ in fresh:
            self._upcoming.popleft()
        self._admitted += len(fresh)
        self.slots += fresh
        return fresh

    def upcoming(self, count: int) -> list[int]:
        """Numbers of the tasks that are admitted next, in order."""
        self._upcoming.extend(islice(self._numbers, max(0, count - len(self._upcoming))))
        return list(islice(self._upcoming, count))

    def drop(self, slot: Slot) -> None:
        """Leave a group out; another is admitted in its place."""
        self.slots.remove(slot)
        self.dropped.append(slot.number)

    def take(self, version: int) -> list[Slot] | None:
        """The groups of the step that starts from `version`; None while they are not finished."""
        chosen = self._choose(version, lambda slot: slot.group is not None)
        if chosen is not None:
            self.slots = [slot for slot in self.slots if slot not in chosen]
            self._in_training += self.batch
        return chosen

    def lacks_only_scores(self, version: int) -> bool:
        """Whether a step's groups could be taken if all that is generated were scored."""
        return self._choose(version, lambda slot: slot.group is not None or slot.generated) is not None

    def _choose(self, version: int, finished: Callable[[Slot], bool]) -> list[Slot] | None:
        left, chosen = list(self.slots), list[Slot]()
        while len(chosen) < self.batch:
            end = left[0].order + self.window if left else 0
            slot = next((slot for slot in left if slot.order < end and finished(slot)), None)
            if slot is None:
                return None
            left.remove(slot)
            chosen.append(slot)
        # Of those left behind the first B must last until the next step, the B after them until the one after that, ….
        lasts = (slot.version + self.staleness - version for slot in left)
        return chosen if all(last > place // self.batch for place, last in enumerate(lasts)) else None

    def trained(self) -> None:
        """The groups that were taken are learned from, and the new version is out: there is room for as many."""
        self._in_training = 0


class Cursor:
    """Which tasks a run has consumed, by number: all below `next_task`, and `ahead` of it those in `taken`.

    usable: whether a number is a task of the run (the rest of an epoch that fills no step is left out).
    """

    def __init__(self, next_task: int, taken: tuple[int, ...], usable: Callable[[int], bool]) -> None:
        self.next_task = next_task
        self._ahead = set(taken)
        self._usable = usable

    @property
    def taken(self) -> tuple[int, ...]:
        """Consumed numbers above `next_task`, in order."""
        return tuple(sorted(self._ahead))

    def numbers(self) -> Iterator[int]:
        """Numbers to go on with, in order, without end. A copy of the present state: consuming does not change it."""
        number, done = self.next_task, frozenset(self._ahead)
        while True:
            if number not in done and self._usable(number):
                yield number
            number += 1

    def consume(self, numbers: list[int]) -> None:
        """Note that these tasks are done with."""
        self._ahead.update(numbers)
        while self.next_task in self._ahead or not self._usable(self.next_task):
            self._ahead.discard(self.next_task)
            self.next_task += 1
