"""`clusterkit setup` on real hosts, killed at any moment and begun anew (test_ray.py: left alone)."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from pathlib import Path

import pytest
from setup_command import Operator, assert_ready
from testbed import Node, Testbed
from testbed_runtime import put_on_storage

from clusterkit.provision.images.identity import Image

KILLS = int(os.environ.get("CLUSTERKIT_TEST_KILLS") or 3)
"""How often set-up is killed before it is left alone; more find rarer moments, and take 10 s each."""
FURTHER = 3
"""Actions that a set-up begins on a host before it is killed, at most; the next set-up begins with the last of them."""
LATER_S = 2.0
"""From the beginning of an action to the blow, at most."""


@pytest.fixture
def operator(testbed: Testbed, nodes: list[Node], cpu_image: Image, tmp_path: Path) -> Operator:
    """Bare nodes, and the image's archive on their storage."""
    put_on_storage(testbed, cpu_image)
    return Operator(testbed, tmp_path, cpu_image)


def containers(node: Node) -> list[str]:
    """Names and labels of all containers of the node's own engine."""
    listed = node.exec("docker ps -a --no-trunc --format '{{.Names}} {{.State}} {{.Label \"clusterkit.cluster\"}}'")
    return sorted(listed.stdout.split("\n")[:-1])


@pytest.mark.long
def test_killed_again_and_again_it_converges(nodes: list[Node], operator: Operator) -> None:
    rng = random.Random(7)
    reached = set()
    for _ in range(KILLS):
        node, begun = rng.choice(nodes), rng.randint(0, FURTHER)
        running = operator.start(*operator.setup_words())
        while running.poll() is None and "== ray: " not in (log := operator.new_log(node)):
            if len(re.findall(r"^\S+ == ", log, re.MULTILINE)) >= begun:
                break
            time.sleep(0.05)
        time.sleep(rng.uniform(0, LATER_S))  # where in it the blow falls; what it leaves is looked at below
        ended = running.poll() is not None
        running.send_signal(signal.SIGKILL)
        operator.finish(running)
        reached.update(re.findall(r"== (\w+): ", "".join(operator.log(node) for node in nodes)))
        if ended:
            break
    assert reached, "no blow fell while a step ran"

    done = operator.setup(timeout=900)
    assert_ready(done, nodes)
    for node in nodes:
        assert len(containers(node)) == 1
        assert node.exec("dpkg --audit").stdout == ""
        sources = node.exec("cat /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null", check=False).stdout
        lines = [line for line in sources.splitlines() if line.strip()]
        assert len(lines) == len(set(lines)), "a repository is listed twice"
    again = operator.setup()
    assert_ready(again, nodes)
    assert again.changes == 0
