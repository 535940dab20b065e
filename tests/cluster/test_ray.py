"""Ray on real hosts: ready after `setup`, what it shows to whom, who notices its death, what `down` takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from testbed import Node, Testbed
from testbed_runtime import put_on_storage

from clusterkit.provision.images.identity import Image
from clusterkit.provision.ray.model import token_file
from clusterkit.provision.ray.ports import Ports

CLUSTER = "lab"


class Cli:
    """`clusterkit` with a configuration of its own, for the hosts of the testbed."""

    def __init__(self, testbed: Testbed, folder: Path, image: Image) -> None:
        self.testbed, self.folder, self.image = testbed, folder, image
        self.environment = {
            **os.environ,
            "CLUSTERKIT_CONFIG": str(folder / "config"),
            "CLUSTERKIT_STATE": str(folder / "state"),
            "HOME": str(folder),
        }
        self.environment.pop("SSH_AUTH_SOCK", None)

    def __call__(self, *words: str, timeout: float = 600.0) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "clusterkit.cli.main", *words]
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            env=self.environment,
            check=False,
        )

    def setup(self, *more: str) -> subprocess.CompletedProcess[str]:
        done = self.try_setup(*more)
        assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-4000:]
        return done

    def try_setup(self, *more: str) -> subprocess.CompletedProcess[str]:
        names = [node.address for node in self.testbed.nodes]
        hosts = ["--hostnames", *names, "--private-key-file", str(self.testbed.key), "--username", "root"]
        words = ["setup", "--cluster", CLUSTER, *hosts, "--image", self.image.reference, "--json"]
        return self(*words, "--docker-source", "distribution", *self.testbed.site.options(), *more)

    def ray_status(self) -> tuple[int, dict]:
        done = self("ray-status", "--cluster", CLUSTER, "--json")
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout)

    def files(self) -> str:
        """All that this operator's machine keeps, the token's own file left out."""
        kept = [path for path in self.folder.rglob("*") if path.is_file() and path.name != "ray_token"]
        return "\n".join(path.read_text(errors="replace") for path in kept)


@pytest.fixture(scope="module")
def cli(testbed: Testbed, cpu_image: Image, tmp_path_factory: pytest.TempPathFactory) -> Cli:
    """Three nodes on which `setup` has run once, with a foreign container on the second."""
    testbed.reset()
    put_on_storage(testbed, cpu_image)
    # The archive on the storage was compressed where zstd is.
    testbed.each(lambda node: node.exec("apt-get install -y -q --no-install-recommends zstd", timeout=120))
    cli = Cli(testbed, tmp_path_factory.mktemp("operator"), cpu_image)
    cli.setup()
    foreign = "docker run -d --name neighbour --label clusterkit.cluster=other --network host"
    testbed.nodes[1].exec(f"{foreign} {cpu_image.reference} sleep 1d", timeout=60)
    return cli


@pytest.fixture
def head(cli: Cli, testbed: Testbed) -> Node:
    return testbed.nodes[0]


@pytest.fixture
def worker(cli: Cli, testbed: Testbed) -> Node:
    return testbed.nodes[1]


@pytest.fixture
def token(cli: Cli) -> str:
    (file,) = (cli.folder / "config").rglob("ray_token")
    assert file.stat().st_mode & 0o777 == 0o600
    return file.read_text().strip()


def name(role: str) -> str:
    return f"clusterkit-{CLUSTER}-{role}"


def changes(done: subprocess.CompletedProcess[str]) -> int:
    return int(json.loads(done.stdout)["changes"])


def http_code(node: Node, url: str, header: str = "") -> str:
    """Status code as seen from the node; 000: no connection. The header goes over stdin."""
    config = f'header = "{header}"\n' if header else "\n"
    command = f"curl -s -m 10 -o /dev/null -w '%{{http_code}}' -K - '{url}'"
    return node.exec(command, stdin=config.encode(), check=False).stdout.strip()


def test_all_nodes_are_alive_with_the_same_versions(cli: Cli, testbed: Testbed) -> None:
    code, state = cli.ray_status()
    assert code == 0, state
    assert state["ready"] is True
    assert [node["role"] for node in state["nodes"]] == ["head", "worker", "worker"]
    assert {node["address"] for node in state["nodes"]} == {node.address for node in testbed.nodes}
    assert {node["ray_state"] for node in state["nodes"]} == {"ALIVE"}
    assert len({(node["ray"], node["python"], node["image_id"]) for node in state["nodes"]}) == 1
    table = cli("ray-status", "--cluster", CLUSTER)
    assert table.returncode == 0
    assert "3 of 3 nodes" in table.stdout


def test_second_run_changes_nothing(cli: Cli, testbed: Testbed) -> None:
    before = [node.exec("docker ps -aq --no-trunc").stdout for node in testbed.nodes]
    assert changes(cli.setup()) == 0
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


def test_only_pinned_ports_listen(cli: Cli, testbed: Testbed) -> None:
    ports = Ports()
    for index, node in enumerate(testbed.nodes):
        lines = node.exec("ss -H -l -t -n").stdout.splitlines()
        listening = {int(line.split()[3].rpartition(":")[2]) for line in lines}
        wanted = set(ports.listening(head=index == 0).values())
        assert wanted <= listening, f"{node.name}: {sorted(wanted - listening)} do not listen"
        strange = listening - wanted - {22} - set(range(ports.first_worker, ports.last_worker + 1))
        assert not {port for port in strange if port < 32768}, node.name


def test_token_is_nowhere_to_be_seen(cli: Cli, testbed: Testbed, token: str) -> None:
    for node in testbed.nodes:
        seen = node.exec(
            "docker inspect $(docker ps -aq); docker logs $(docker ps -q --filter label=clusterkit.role) 2>&1;"
            "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null | tr '\\0' ' '"
        ).stdout
        assert "RAY_AUTH_TOKEN_PATH" in seen
        assert token not in seen
        assert node.exec(f"stat -c '%a %U' {token_file(CLUSTER)}").stdout.strip() == "600 root"
        assert node.exec(f"cat {token_file(CLUSTER)}").stdout == token
    assert token not in cli.files()


def test_ray_is_the_main_process(worker: Node) -> None:
    words = json.loads(worker.exec(f"docker inspect -f '{{{{json .Config.Cmd}}}}' {name('worker')}").stdout)
    assert words[:2] == ["start", "--block"]
    host = json.loads(worker.exec(f"docker inspect -f '{{{{json .HostConfig}}}}' {name('worker')}").stdout)
    assert host["Privileged"] is False
    assert host["NetworkMode"] == "host"
    assert host["ShmSize"] > 1 << 30


def test_ray_that_dies_ends_its_container(cli: Cli, worker: Node) -> None:
    worker.exec("pkill -9 raylet")
    wait_until_dead(worker, name("worker"))
    assert changes(cli.setup()) == 1
    assert_all_well(cli)


def test_killed_worker_is_noticed_and_a_second_run_repairs_it(cli: Cli, testbed: Testbed, worker: Node) -> None:
    others = [node.exec("docker ps -q --no-trunc --filter label=clusterkit.role").stdout for node in testbed.nodes]
    worker.exec(f"docker kill {name('worker')}")
    code, state = cli.ray_status()
    assert code == 1
    (wrong,) = [node for node in state["nodes"] if node["problem"]]
    assert wrong["name"] == worker.address
    assert "exited (137)" in wrong["problem"]
    assert wrong["log"]
    done = json.loads(cli.setup().stdout)
    assert done["changes"] == 1
    assert_all_well(cli)
    after = [node.exec("docker ps -q --no-trunc --filter label=clusterkit.role").stdout for node in testbed.nodes]
    assert [old == new for old, new in zip(others, after, strict=True)] == [True, False, True]


def test_head_that_died_takes_its_workers_along_and_comes_back(cli: Cli, testbed: Testbed, head: Node) -> None:
    head.exec(f"docker kill {name('head')}")
    assert cli.ray_status()[0] == 1
    planned = json.loads(cli.try_setup("--dry-run").stdout)
    assert [host["changes"] for host in planned["hosts"]] == [
        ["restart the Ray head (its container is exited)"],
        ["restart the Ray worker (the head is a new one)"],
        ["restart the Ray worker (the head is a new one)"],
    ]
    assert changes(cli.setup()) == 3
    code, state = cli.ray_status()
    assert code == 0, state


def test_other_settings_replace_running_containers_only_when_asked(cli: Cli, head: Node) -> None:
    job = head.exec(
        f"docker exec {name('head')} ray job submit --no-wait --address http://127.0.0.1:{Ports().dashboard} "
        "--submission-id long-one -- sleep 600",
        timeout=120,
    )
    assert "long-one" in job.stdout
    assert cli.ray_status()[1]["jobs"] == ["long-one"]
    before = head.exec("docker ps -q --no-trunc").stdout
    refused = cli.try_setup("--privileged")
    assert refused.returncode in {1, 3}
    failure = json.loads(refused.stdout)["hosts"][0]["failure"]
    assert "other settings" in failure["message"]
    assert "--recreate" in failure["fix"]
    assert head.exec("docker ps -q --no-trunc").stdout == before
    assert cli.ray_status()[1]["jobs"] == ["long-one"]


def test_down_needs_a_yes(cli: Cli, testbed: Testbed) -> None:
    """The job of the tests above was not submitted by clusterkit: nobody knows whose it is, so it has to be named."""
    foreign = cli("down", "--cluster", CLUSTER, "-y")
    assert foreign.returncode == 2
    assert "long-one of unknown. Nothing was removed" in foreign.stderr
    done = cli("down", "--cluster", CLUSTER, "--user", "unknown")
    assert done.returncode == 2
    assert "-y" in done.stderr
    assert name("worker") in done.stderr  # what it would remove is shown
    assert_all_well(cli)


def test_down_takes_all_that_is_ours_and_nothing_else(cli: Cli, testbed: Testbed, worker: Node) -> None:
    """The last test of this file: the cluster is gone afterwards."""
    unreachable, *_ = testbed.nodes[2:]
    unreachable.freeze()
    try:
        partly = cli("down", "--cluster", CLUSTER, "-y", "--user", "unknown", "--connect-timeout", "3", "--json")
    finally:
        unreachable.start()
    assert partly.returncode == 3
    assert list(json.loads(partly.stdout)["failed"]) == [unreachable.address]
    done = cli("down", "--cluster", CLUSTER, "-y", "--json")
    assert done.returncode == 0, done.stderr
    assert list(json.loads(done.stdout)["removed"]) == [unreachable.address]
    for node in testbed.nodes:
        names = node.exec("docker ps -a --format '{{.Names}}'").stdout.split()
        assert names == (["neighbour"] if node is worker else [])
        assert node.exec("ls -d /etc/clusterkit", check=False).returncode != 0
    assert worker.exec("docker inspect -f '{{.State.Running}}' neighbour").stdout.strip() == "true"
    assert list((testbed.storage / "images").iterdir())
    assert not list((cli.folder / "config").rglob("ray_token"))
    again = cli("down", "--cluster", CLUSTER, "-y", "--json")
    assert again.returncode == 0
    assert json.loads(again.stdout)["removed"] == {}
    assert cli.ray_status()[0] == 1


def assert_all_well(cli: Cli) -> None:
    code, state = cli.ray_status()
    assert code == 0, state


def wait_until_dead(node: Node, container: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while node.exec(f"docker inspect -f '{{{{.State.Running}}}}' {container}").stdout.strip() == "true":
        assert time.monotonic() < deadline, f"{container} still runs"
        time.sleep(0.2)
