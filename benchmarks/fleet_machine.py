"""The GPU of a stand-in server: what its requests take, from measured rates (clusterkit/capacity/speed.py)."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Answer = Callable[[int, bool, float, float], None]
"""Called at a request's end with the tokens sampled, whether it was cut off, its seconds, and seconds by which the call
is late."""

LOAD_SPREAD = 0.2
"""By as much more of its time at most a server loads the same weights than others do."""


def load_factor(name: str) -> float:
    """Of a server, by its name: how long it loads weights over what it should."""
    return 1 + LOAD_SPREAD * random.Random(name).random()


@dataclass(frozen=True)
class Rates:
    """What a server takes how long for, in seconds, and what it answers.

    prompt: for a prompt's token that is in no cache. context: for each token before such a one, beside that. weights:
    for a step of decoding. cached: for a token of context in such a step. load: for a version of the weights. mean: of
    a response's length, as a share of its limit. ids: that responses are made of. end: the ids that they end with, the
    end token last.
    """

    prompt: float
    context: float
    weights: float
    cached: float
    load: float
    mean: float
    ids: tuple[int, ...]
    end: tuple[int, ...]


@dataclass(order=True, slots=True)
class _Job:
    """A request being sampled. target, began: the machine's steps at its end and at its beginning."""

    target: float
    number: int
    began: float = field(compare=False)
    prompt: int = field(compare=False)
    arrived: float = field(compare=False)
    answer: Answer = field(compare=False)


def replayed(rates: Rates, servers: Sequence[Sequence[Sequence[tuple[int, int, int]]]]) -> float:
    """The servers' own time: seconds until the last of them has answered a client that takes no time.

    servers: for each, its trajectories, for each, its turns: tokens of the prompt, those that are computed, and those
    that are sampled.
    """
    return max((_own(rates, trajectories) for trajectories in servers), default=0.0)


def _own(rates: Rates, trajectories: Sequence[Sequence[tuple[int, int, int]]]) -> float:
    machine, end = Machine(rates), 0.0

    def ask(turns: Sequence[tuple[int, int, int]], number: int) -> None:
        if number < len(turns):
            machine.add(end, *turns[number], lambda *_: ask(turns, number + 1))

    for turns in trajectories:
        ask(turns, 0)
    while machine.due < math.inf:
        end = machine.due
        machine.run(end)
    return end


class Machine:
    """Reads the prompts that wait, then samples a token for every request, and so on.

    A step takes `weights`, and `cached` for every token of all requests' contexts, which grow by one token each. It is
    told the time and never waits: `run` answers what has ended by then, `due` is the time of the next end.
    """

    def __init__(self, rates: Rates, now: float = 0.0) -> None:
        self.rates = rates
        self.busy = 0.0
        self._now, self._steps, self._context, self._reading = now, 0.0, 0.0, 0.0
        self._jobs: list[_Job] = []
        self._numbers = itertools.count()

    def add(self, now: float, prompt: int, computed: int, tokens: int, answer: Answer) -> float:
        """Take a request that samples `tokens`; of its prompt's tokens `computed` are in no cache.

        Returns:
            When the prompt will have been read.
        """
        self.run(now)
        self._reading += computed * (self.rates.prompt + self.rates.context * (prompt - computed / 2))
        self._context += prompt
        heapq.heappush(self._jobs, _Job(self._steps + tokens, next(self._numbers), self._steps, prompt, now, answer))
        return now + self._reading

    @property
    def due(self) -> float:
        """When the next request ends; infinity where there is none."""
        if not self._jobs:
            return math.inf
        return self._now + self._reading + self._seconds(max(0.0, self._jobs[0].target - self._steps))

    def run(self, now: float) -> None:
        """Go on until `now`, and answer what has ended by then."""
        while (end := self.due) <= now:
            self._go_on(end - self._now)
            job = heapq.heappop(self._jobs)
            self._context -= job.prompt + job.target - job.began
            job.answer(round(job.target - job.began), False, end - job.arrived, now - end)
        self._go_on(now - self._now)

    def cut_off(self, now: float) -> None:
        """End all requests with what they have sampled."""
        self.run(now)
        jobs, self._jobs, self._reading, self._context = self._jobs, [], 0.0, 0.0
        for job in jobs:
            job.answer(int(self._steps - job.began), True, now - job.arrived, 0.0)

    def _go_on(self, seconds: float) -> None:
        self._now += seconds
        if not self._jobs:
            self._context = 0.0
            return
        self.busy += seconds
        read = min(seconds, self._reading)
        self._reading -= read
        steps = self._steps_in(seconds - read)
        self._steps += steps
        self._context += steps * len(self._jobs)

    def _seconds(self, steps: float) -> float:
        r = self.rates
        return steps * (r.weights + r.cached * (self._context + len(self._jobs) * steps / 2))

    def _steps_in(self, seconds: float) -> float:
        """The inverse of `_seconds`."""
        r = self.rates
        first, growth = r.weights + r.cached * self._context, r.cached * len(self._jobs) / 2
        # The root in the form that loses no digits where the growth is small.
        return 2 * seconds / (first + math.sqrt(first * first + 4 * growth * seconds)) if seconds else 0.0
