"""The timer of benchmarks/fleet.py's stand-in servers, against times worked out by hand."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from fleet_machine import Machine, Rates, replayed

PLAIN = Rates(prompt=0.001, context=0.0, weights=0.01, cached=0.0, load=1.0, mean=0.5, ids=(5,), end=(2,))


class Ended:
    """What a machine answered: (name, tokens, cut off, seconds on the machine)."""

    def __init__(self) -> None:
        self.answers: list[tuple[str, int, bool, float]] = []

    def __call__(self, name: str) -> object:
        return lambda tokens, cut, seconds, _late: self.answers.append((name, tokens, cut, seconds))


def test_a_request_takes_the_reading_of_its_prompt_and_a_step_for_each_token() -> None:
    machine, ended = Machine(PLAIN), Ended()
    read = machine.add(0.0, 500, 300, 20, ended("one"))  # 200 tokens are in the cache

    assert read == pytest.approx(0.3)
    assert machine.due == pytest.approx(0.3 + 20 * 0.01)
    machine.run(machine.due + 1.0)
    assert ended.answers == [("one", 20, False, pytest.approx(0.5))]
    assert machine.busy == pytest.approx(0.5)


def test_tokens_of_all_contexts_slow_every_step_down() -> None:
    """Context of 100 + 200 at first, growing by two a step: Σ of ten steps of 0.01 + 0.0001 * context."""
    machine, ended = Machine(Rates(**{**vars(PLAIN), "prompt": 0.0, "cached": 0.0001})), Ended()
    for name, prompt in (("one", 100), ("two", 200)):
        machine.add(0.0, prompt, prompt, 10, ended(name))

    expected = 10 * 0.01 + 0.0001 * (10 * 300 + 2 * 10**2 / 2)
    machine.run(100.0)
    assert [(name, seconds) for name, _, _, seconds in ended.answers] == [
        ("one", pytest.approx(expected)),
        ("two", pytest.approx(expected)),
    ]


def test_a_prompt_that_comes_in_the_middle_holds_the_others_up() -> None:
    machine, ended = Machine(PLAIN), Ended()
    machine.add(0.0, 0, 0, 100, ended("first"))
    machine.add(0.5, 1000, 1000, 10, ended("second"))  # a second of reading

    machine.run(10.0)
    assert ended.answers == [("second", 10, False, pytest.approx(1.1)), ("first", 100, False, pytest.approx(2.0))]


def test_what_is_cut_off_has_what_was_sampled_until_then() -> None:
    machine, ended = Machine(PLAIN), Ended()
    machine.add(0.0, 0, 0, 100, ended("one"))
    machine.cut_off(0.255)
    assert ended.answers == [("one", 25, True, pytest.approx(0.255))]
    assert machine.due == float("inf")


def test_the_servers_own_time_is_that_of_the_slowest_with_turns_one_after_the_other() -> None:
    turn = (100, 100, 10)  # a tenth of a second of reading and as long of sampling
    assert replayed(PLAIN, [[[turn, turn]], [[turn, turn, turn]]]) == pytest.approx(0.6)
    # Two at once: both prompts are read, then both are sampled in the same steps.
    assert replayed(PLAIN, [[[turn, turn], [turn, turn]]]) == pytest.approx(0.6)


@pytest.mark.parametrize("seed", range(5))
def test_how_often_it_is_asked_changes_nothing(seed: int) -> None:
    rates = Rates(**{**vars(PLAIN), "cached": 1e-5, "context": 1e-6})
    draw = random.Random(seed)
    requests = sorted((draw.uniform(0, 3), draw.randint(1, 3000), draw.randint(1, 200)) for _ in range(30))

    def answers(looks: list[float]) -> list[tuple[str, int, bool, float]]:
        machine, ended = Machine(rates), Ended()
        events = sorted([(at, n) for n, (at, _, _) in enumerate(requests)] + [(at, -1) for at in looks])
        for at, number in events:
            machine.run(at)
            if number >= 0:
                _, prompt, tokens = requests[number]
                machine.add(at, prompt, prompt // 2, tokens, ended(str(number)))
        machine.run(1000.0)
        return ended.answers

    often = answers([draw.uniform(0, 30) for _ in range(300)])
    assert [one[:3] for one in often] == [one[:3] for one in answers([])]
    assert [one[3] for one in often] == pytest.approx([one[3] for one in answers([])])
