"""`clusterkit setup` on real hosts: from nothing to Ray, again without a change, killed at any moment, taken down."""

from __future__ import annotations

import random
import re
import signal
import time
from pathlib import Path

import pytest
from setup_command import Done, Operator
from testbed import Node, Testbed
from testbed_runtime import put_on_storage

from clusterkit.provision.images.identity import Image

KILLS = 10
FURTHER = 3
"""Actions that a set-up begins on a host before it is killed, at most; the next set-up begins with the last of them."""
LATER_S = 2.0
"""From the beginning of an action to the blow, at most."""
# Set-up's own work on a bare host, in order.
CHANGED = ["packages", "docker", "image", "ray"]


@pytest.fixture
def operator(testbed: Testbed, nodes: list[Node], cpu_image: Image, tmp_path: Path) -> Operator:
    """Bare nodes, and the image's archive on their storage."""
    put_on_storage(testbed, cpu_image)
    return Operator(testbed, tmp_path, cpu_image)


def files_of(testbed: Testbed, node: Node) -> set[str]:
    """Every path of the node's disk that is not as in its image, as its engine sees it, and all of the storage."""
    changed = testbed.engine.docker("diff", node.container).splitlines()
    # Logging in leaves its own traces, whatever is done then.
    quiet = (line for line in changed if not re.search(r"^. (/var/log|/var/log/\w+|/tmp|/root|/run)(/.*)?$", line))
    shared = {f"storage {path.relative_to(testbed.storage)}" for path in testbed.storage.rglob("*")}
    return {*quiet, *shared}


def containers(node: Node) -> list[str]:
    """Names and labels of all containers of the node's own engine."""
    listed = node.exec("docker ps -a --no-trunc --format '{{.Names}} {{.State}} {{.Label \"clusterkit.cluster\"}}'")
    return sorted(listed.stdout.split("\n")[:-1])


def assert_ready(done: Done, nodes: list[Node]) -> None:
    assert done.stdout.startswith("{"), done.text[-4000:]
    assert done.exit_code == 0, [done.row(name)["failure"] for name in done.failed]
    ray = done.report["ray"]
    assert ray["ready"] is True
    assert sorted(node["name"] for node in ray["nodes"]) == sorted(node.address for node in nodes)
    assert len({(node["ray"], node["python"], node["image_id"]) for node in ray["nodes"]}) == 1


def test_from_nothing_to_ray_then_nothing_to_do_then_down(
    testbed: Testbed, nodes: list[Node], operator: Operator, tmp_path: Path
) -> None:
    before = {node.name: files_of(testbed, node) for node in nodes}
    planned = operator.setup("--dry-run")
    assert planned.exit_code == 0, planned.text
    assert {node.name: files_of(testbed, node) for node in nodes} == before, "a dry run wrote something"
    assert all("install docker.io" in " ".join(planned.row(node)["changes"]) for node in nodes)

    running = operator.start(*operator.setup_words())
    operator.await_log(nodes[0], "== packages: ", running)
    rival = Operator(testbed, tmp_path / "rival", operator.image)
    for other in (operator, rival):
        # The same machine is kept out by its lock, another one by the lease on the head.
        refused = [other.setup()] if other is rival else [other.setup(), other("down", "-y")]
        for done in refused:
            assert done.exit_code == 2, done.text
            assert "cluster default is being worked on by `clusterkit setup` of " in done.stderr
            assert f"(process {running.pid})" in done.stderr
    first = operator.finish(running)
    assert_ready(first, nodes)
    assert nodes[0].exec("ls /etc/clusterkit/default").stdout == "ray_token\n"
    for node in nodes:
        steps = first.row(node)["steps"]
        assert [step for step in CHANGED if steps[step] == "changed"] == CHANGED
        # What was planned is what was done; how the image comes is known only then.
        done = set(first.row(node)["changes"])
        plan = {
            change for change in planned.row(node)["changes"] if "image" not in change and "make /storage" not in change
        }
        assert plan <= done
        assert node.exec("git lfs version && docker info >/dev/null").returncode == 0
    assert first.report["wall_seconds"] <= 1.3 * first.report["slowest_host_seconds"]

    second = operator("setup", "--json")  # hosts, image and mirrors are kept with the cluster
    assert_ready(second, nodes)
    assert second.changes == 0, [second.row(node)["changes"] for node in nodes]

    head, *_ = nodes
    foreign = "docker run -d --name theirs --entrypoint sleep $(docker image ls -q | head -n 1) 3600"
    head.exec(f"{foreign} && mkdir -p /storage/theirs && echo mine >/storage/theirs/file")
    assert operator("down").exit_code == 2  # nobody there to ask
    down = operator("down", "-y", "--json")
    assert down.exit_code == 0, down.text
    assert containers(head) == ["theirs running "]
    assert [containers(node) for node in nodes[1:]] == [[], []]
    for node in nodes:
        assert node.exec("ls /etc/clusterkit/default 2>/dev/null", check=False).stdout == ""
        assert node.exec("pgrep -f '[r]aylet|[g]cs_server'", check=False).stdout == ""
    assert head.exec("cat /storage/theirs/file").stdout == "mine\n"
    assert "nothing of cluster default" in operator("down", "-y").text


@pytest.mark.long
def test_killed_ten_times_it_converges(nodes: list[Node], operator: Operator) -> None:
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
