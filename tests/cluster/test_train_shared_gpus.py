"""A run whose servers share the ranks' GPUs on three real hosts, and hosts that are lost in the middle of it.

The hosts have no GPUs: a `docker` in front of the real one tells Ray that each has one. SGLang is a stand-in, too
(tests/sharedgpus.py). After test_train.py, whose image and hosts are used where they are there.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import runs
from cluster_training import base_of, preset, run_folder
from host_faults import stand_in
from setup_command import Operator
from sharedgpus import assert_went_on, go_through_a_loss, put_sglang, settings
from testbed import Node, Testbed

from clusterkit.config.presets import leaves

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]

ONE_GPU = """
for word do
  shift
  [ "$word" != --num-gpus=0 ] || word=--num-gpus=1
  set -- "$@" "$word"
done
exec /usr/bin/docker "$@"
"""

Again = Callable[[], None]
"""Runs `clusterkit setup` once more, as somebody does whose hosts are back."""


@pytest.fixture(scope="module")
def again(testbed: Testbed, operator: Operator) -> Iterator[Again]:
    """Three hosts with the image that trains, each with a GPU that Ray believes in."""
    first = operator.setup(*preset(operator), hosts=testbed.nodes, timeout=1200)
    assert first.exit_code == 0, first.text

    def again() -> None:
        words = ("--image", "none", "--image-base", base_of(testbed), "--shm", "300m", "--recreate")
        done = operator.setup(*words, hosts=testbed.nodes)
        assert done.exit_code == 0, done.text

    with contextlib.ExitStack() as stack:
        for node in testbed.nodes:
            stack.enter_context(stand_in(node, "docker", ONE_GPU))
        again()
        yield again


@pytest.fixture(scope="module")
def python(testbed: Testbed, again: Again) -> str:
    """Interpreter that has the stand-in for SGLang, on the storage."""
    return put_sglang(testbed.storage / "sglang", Path("/storage/sglang"))


def train(operator: Operator, trial: str, hosts: int, python: str) -> Path:
    """Start a run and return the folder of its records."""
    values = {key: value for key, value in leaves(runs.SETTINGS) if not key.endswith("_name")}
    values |= dict(leaves(settings(hosts))) | {"trial_name": trial, "servers.python": python}
    words = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    begun = operator("train", "--preset", "tiny", *words, "--cluster", "default", "--detach")
    assert begun.exit_code == 0, begun.text
    return run_folder(operator, trial)


def placed(folder: Path) -> list[list[str]]:
    """Addresses of the ranks' hosts, for every attempt."""
    lines = (folder / "main.log").read_text().splitlines()
    return [line.split("ranks run on ")[1].split(", ") for line in lines if "ranks run on" in line]


def test_two_hosts_are_lost_at_once_and_the_run_goes_on_when_they_are_back(
    operator: Operator, testbed: Testbed, again: Again, python: str
) -> None:
    head, *workers = testbed.nodes
    folder = train(operator, "two-lost", 3, python)

    def bring_back() -> None:
        testbed.each(Node.start, workers)
        again()

    go_through_a_loss(folder, lambda: testbed.each(Node.kill, workers), bring_back)

    assert_went_on(folder)
    first, *_, last = placed(folder)
    assert first == last == [*(node.address for node in workers), head.address]


def test_a_host_is_lost_and_another_takes_its_place(
    operator: Operator, testbed: Testbed, again: Again, python: str
) -> None:
    """The head is spared until there is no other."""
    head, kept, lost = testbed.nodes
    folder = train(operator, "one-lost", 2, python)
    try:
        go_through_a_loss(folder, lost.kill)
        assert_went_on(folder)
    finally:
        lost.start()
    first, *_, last = placed(folder)
    assert (first, last) == ([kept.address, lost.address], [kept.address, head.address])
