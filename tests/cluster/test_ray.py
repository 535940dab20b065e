"""`clusterkit setup` on bare hosts, and Ray there: what it shows to whom, who notices its death, what `down` takes."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from typing import Any

import pytest
from setup_command import Done, Operator, assert_ready, files_of
from testbed import Node, Testbed
from testbed_runtime import put_on_storage

from clusterkit.provision.images.identity import Image
from clusterkit.provision.ray.model import token_file
from clusterkit.provision.ray.ports import Ports

CLUSTER = "default"
# Set-up's own work on a bare host, in order.
CHANGED = ["packages", "docker", "image", "ray"]
RESTART = "restart the Ray"


@dataclass(frozen=True)
class First:
    """The set-up of bare hosts. untouched: what stood on them before a dry run stood there after it. refused: what
    others who came meanwhile were told.
    """

    untouched: bool
    planned: Done
    process: int
    refused: list[Done]
    done: Done


@pytest.fixture(scope="module")
def operator(testbed: Testbed, cpu_image: Image, tmp_path_factory: pytest.TempPathFactory) -> Operator:
    """Three bare nodes, and the image's archive on their storage."""
    testbed.reset()
    put_on_storage(testbed, cpu_image)
    return Operator(testbed, tmp_path_factory.mktemp("operator"), cpu_image)


@pytest.fixture(scope="module")
def first(testbed: Testbed, operator: Operator) -> First:
    """Set them up, with a dry run before and rivals meanwhile; then somebody else's container on the second."""
    nodes = testbed.nodes
    before = [files_of(testbed, node) for node in nodes]
    planned = operator.setup("--dry-run")
    untouched = [files_of(testbed, node) for node in nodes] == before
    running = operator.start(*operator.setup_words())
    operator.await_log(nodes[0], "== packages: ", running)
    rival = Operator(testbed, operator.folder / "rival", operator.image)
    # The same machine is kept out by its lock, another one by the lease on the head.
    refused = [operator.setup(), operator("down", "-y"), rival.setup()]
    done = operator.finish(running)
    assert_ready(done, nodes)
    foreign = "docker run -d --name neighbour --label clusterkit.cluster=other --network host"
    nodes[1].exec(f"{foreign} {operator.image.reference} sleep 1d", timeout=60)
    return First(untouched, planned, running.pid, refused, done)


@pytest.fixture
def cluster(first: First, operator: Operator) -> Operator:
    """The operator of a cluster that stands."""
    return operator


@pytest.fixture
def head(cluster: Operator, testbed: Testbed) -> Node:
    return testbed.nodes[0]


@pytest.fixture
def worker(cluster: Operator, testbed: Testbed) -> Node:
    return testbed.nodes[1]


@pytest.fixture
def token(cluster: Operator) -> str:
    (file,) = (cluster.folder / "config").rglob("ray_token")
    assert file.stat().st_mode & 0o777 == 0o600
    return file.read_text().strip()


def name(role: str) -> str:
    return f"clusterkit-{CLUSTER}-{role}"


def http_code(node: Node, url: str, header: str = "") -> str:
    """Status code as seen from the node; 000: no connection. The header goes over stdin."""
    config = f'header = "{header}"\n' if header else "\n"
    command = f"curl -s -m 10 -o /dev/null -w '%{{http_code}}' -K - '{url}'"
    return node.exec(command, stdin=config.encode(), check=False).stdout.strip()


def test_a_dry_run_writes_nothing_and_names_what_is_then_done(first: First, testbed: Testbed) -> None:
    assert first.untouched
    assert first.planned.exit_code == 0, first.planned.text
    for node in testbed.nodes:
        planned, row = first.planned.row(node)["changes"], first.done.row(node)
        assert "install docker.io" in " ".join(planned)
        assert [step for step in CHANGED if row["steps"][step] == "changed"] == CHANGED
        # How the image comes is known only then.
        assert {c for c in planned if "image" not in c and "make /storage" not in c} <= set(row["changes"])
        assert node.exec("git lfs version && docker info >/dev/null").returncode == 0
    assert first.done.report["wall_seconds"] <= 1.3 * first.done.report["slowest_host_seconds"]


def test_others_are_kept_out_meanwhile(first: First) -> None:
    for done in first.refused:
        assert done.exit_code == 2, done.text
        assert "cluster default is being worked on by `clusterkit setup` of " in done.stderr
        assert f"(process {first.process})" in done.stderr


def test_all_nodes_are_alive_with_the_same_versions(cluster: Operator, testbed: Testbed) -> None:
    code, state = ray_status(cluster)
    assert code == 0, state
    assert state["ready"] is True
    assert [node["role"] for node in state["nodes"]] == ["head", "worker", "worker"]
    assert {node["address"] for node in state["nodes"]} == {node.address for node in testbed.nodes}
    assert {node["ray_state"] for node in state["nodes"]} == {"ALIVE"}
    assert len({(node["ray"], node["python"], node["image_id"]) for node in state["nodes"]}) == 1
    table = cluster("ray-status")
    assert table.exit_code == 0
    assert "3 of 3 nodes" in table.stdout


def test_second_run_changes_nothing(cluster: Operator, testbed: Testbed) -> None:
    before = [node.exec("docker ps -aq --no-trunc").stdout for node in testbed.nodes]
    assert cluster.setup().changes == 0
    assert [node.exec("docker ps -aq --no-trunc").stdout for node in testbed.nodes] == before


def test_api_asks_for_the_token(head: Node, token: str) -> None:
    url = f"http://127.0.0.1:{Ports().dashboard}/api/version"
    assert http_code(head, url) == "401"
    assert http_code(head, url, "Authorization: Bearer " + "0" * 64) in {"401", "403"}
    assert http_code(head, url, f"Authorization: Bearer {token}") == "200"


def test_dashboard_is_reached_on_the_head_only(head: Node, worker: Node, token: str) -> None:
    url = f"http://{head.address}:{Ports().dashboard}/api/version"
    assert http_code(worker, url, f"Authorization: Bearer {token}") == "000"
    # The same question to a port that is meant for the other nodes gets through.
    worker.exec(f"bash -c 'exec 3<>/dev/tcp/{head.address}/{Ports().gcs}'")


def test_only_pinned_ports_listen(cluster: Operator, testbed: Testbed) -> None:
    ports = Ports()
    for index, node in enumerate(testbed.nodes):
        lines = node.exec("ss -H -l -t -n").stdout.splitlines()
        listening = {int(line.split()[3].rpartition(":")[2]) for line in lines}
        wanted = set(ports.listening(head=index == 0).values())
        assert wanted <= listening, f"{node.name}: {sorted(wanted - listening)} do not listen"
        strange = listening - wanted - {22} - set(range(ports.first_worker, ports.last_worker + 1))
        assert not {port for port in strange if port < 32768}, node.name


def test_token_is_nowhere_to_be_seen(cluster: Operator, testbed: Testbed, token: str) -> None:
    for node in testbed.nodes:
        seen = node.exec(
            "docker inspect $(docker ps -aq); docker logs $(docker ps -q --filter label=clusterkit.role) 2>&1;"
            "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null | tr '\\0' ' '"
        ).stdout
        assert "RAY_AUTH_TOKEN_PATH" in seen
        assert token not in seen
        assert node.exec(f"stat -c '%a %U' {token_file(CLUSTER)}").stdout.strip() == "600 root"
        assert node.exec(f"cat {token_file(CLUSTER)}").stdout == token
    assert token not in cluster.kept()


def test_ray_is_the_main_process(worker: Node) -> None:
    words = json.loads(worker.exec(f"docker inspect -f '{{{{json .Config.Cmd}}}}' {name('worker')}").stdout)
    assert words[:2] == ["start", "--block"]
    host = json.loads(worker.exec(f"docker inspect -f '{{{{json .HostConfig}}}}' {name('worker')}").stdout)
    assert host["Privileged"] is False
    assert host["NetworkMode"] == "host"
    assert host["ShmSize"] > 1 << 30


def test_ray_that_dies_ends_its_container(cluster: Operator, worker: Node) -> None:
    worker.exec("pkill -9 raylet")
    wait_until_dead(worker, name("worker"))
    assert restarts(cluster.setup()) == {worker.address: [f"{RESTART} worker (its container is exited)"]}
    assert_all_well(cluster)


def test_a_killed_worker_is_noticed_and_repaired(cluster: Operator, testbed: Testbed, worker: Node) -> None:
    others = [node.exec("docker ps -q --no-trunc --filter label=clusterkit.role").stdout for node in testbed.nodes]
    worker.exec(f"docker kill {name('worker')}")
    code, state = ray_status(cluster)
    assert code == 1
    (wrong,) = [node for node in state["nodes"] if node["problem"]]
    assert wrong["name"] == worker.address
    assert "exited (137)" in wrong["problem"]
    assert wrong["log"]
    assert restarts(cluster.setup()) == {worker.address: [f"{RESTART} worker (its container is exited)"]}
    assert_all_well(cluster)
    after = [node.exec("docker ps -q --no-trunc --filter label=clusterkit.role").stdout for node in testbed.nodes]
    assert [old == new for old, new in zip(others, after, strict=True)] == [True, False, True]


def test_head_that_died_takes_its_workers_along_and_comes_back(cluster: Operator, testbed: Testbed, head: Node) -> None:
    head.exec(f"docker kill {name('head')}")
    assert ray_status(cluster)[0] == 1
    planned = cluster.setup("--dry-run").report
    assert [host["changes"] for host in planned["hosts"]] == [
        [f"{RESTART} head (its container is exited)"],
        [f"{RESTART} worker (the head is a new one)"],
        [f"{RESTART} worker (the head is a new one)"],
    ]
    assert restarts(cluster.setup()) == {host["host"]: host["changes"] for host in planned["hosts"]}
    code, state = ray_status(cluster)
    assert code == 0, state


def test_other_settings_replace_running_containers_only_when_asked(cluster: Operator, head: Node) -> None:
    job = head.exec(
        f"docker exec {name('head')} ray job submit --no-wait --address http://127.0.0.1:{Ports().dashboard} "
        "--submission-id long-one -- sleep 600",
        timeout=120,
    )
    assert "long-one" in job.stdout
    assert ray_status(cluster)[1]["jobs"] == ["long-one"]
    before = head.exec("docker ps -q --no-trunc").stdout
    refused = cluster.setup("--privileged")
    assert refused.exit_code in {1, 3}
    failure = refused.report["hosts"][0]["failure"]
    assert "other settings" in failure["message"]
    assert "--recreate" in failure["fix"]
    assert head.exec("docker ps -q --no-trunc").stdout == before
    assert ray_status(cluster)[1]["jobs"] == ["long-one"]


def test_down_needs_a_yes(cluster: Operator, testbed: Testbed) -> None:
    """The job of the tests above was not submitted by clusterkit: nobody knows whose it is, so it has to be named."""
    foreign = cluster("down", "-y")
    assert foreign.exit_code == 2
    assert "long-one of unknown. Nothing was removed" in foreign.stderr
    done = cluster("down", "--user", "unknown")
    assert done.exit_code == 2
    assert "-y" in done.stderr
    assert name("worker") in done.stderr  # what it would remove is shown
    assert_all_well(cluster)


def test_down_takes_all_that_is_ours_and_nothing_else(cluster: Operator, testbed: Testbed, worker: Node) -> None:
    """The last test of this file: the cluster is gone afterwards."""
    worker.exec("mkdir -p /storage/theirs && echo mine >/storage/theirs/file")
    unreachable, *_ = testbed.nodes[2:]
    unreachable.freeze()
    try:
        partly = cluster("down", "-y", "--user", "unknown", "--connect-timeout", "3", "--json")
    finally:
        unreachable.start()
    assert partly.exit_code == 3
    assert list(partly.report["failed"]) == [unreachable.address]
    done = cluster("down", "-y", "--json")
    assert done.exit_code == 0, done.text
    assert list(done.report["removed"]) == [unreachable.address]
    for node in testbed.nodes:
        names = node.exec("docker ps -a --format '{{.Names}}'").stdout.split()
        assert names == (["neighbour"] if node is worker else [])
        assert node.exec("ls -d /etc/clusterkit", check=False).returncode != 0
        assert node.exec("pgrep -f '[r]aylet|[g]cs_server'", check=False).stdout == ""
    assert worker.exec("cat /storage/theirs/file").stdout == "mine\n"
    assert worker.exec("docker inspect -f '{{.State.Running}}' neighbour").stdout.strip() == "true"
    assert list((testbed.storage / "images").iterdir())
    assert not list((cluster.folder / "config").rglob("ray_token"))
    again = cluster("down", "-y", "--json")
    assert again.exit_code == 0
    assert again.report["removed"] == {}
    assert "nothing of cluster default" in cluster("down", "-y").text
    assert ray_status(cluster)[0] == 1


def ray_status(cluster: Operator) -> tuple[int, dict[str, Any]]:
    """Exit code and what it says."""
    done = cluster("ray-status", "--json")
    return done.exit_code, done.report


def restarts(done: Done) -> dict[str, list[str]]:
    """What a set-up changed, by host, less the further starts of a Ray that ended while it started: Ray allows itself
    30 s for that, too few on a busy machine. Each is noted and looks like a restart of what has exited.
    """
    assert done.exit_code == 0, done.text
    found = {}
    for row in done.report["hosts"]:
        first, more = row["changes"][:1], row["changes"][1:]
        noted = f"{row['host']}: Ray ended while it started and was started again" in done.report["notes"]
        assert not more or noted, (row["changes"], done.report["notes"])
        assert all(re.fullmatch(rf"{RESTART} (head|worker) \(its container is exited\)", title) for title in more), more
        if first:
            found[row["host"]] = first
    return found


def assert_all_well(cluster: Operator) -> None:
    code, state = ray_status(cluster)
    assert code == 0, state


def wait_until_dead(node: Node, container: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while node.exec(f"docker inspect -f '{{{{.State.Running}}}}' {container}").stdout.strip() == "true":
        assert time.monotonic() < deadline, f"{container} still runs"
        time.sleep(0.2)
