"""The testbed itself: nodes are separate hosts, lose and keep what real ones would, and nothing stays behind."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from testbed import Node, Testbed
from testbed_engine import Engine, command, process_runs


def ssh(testbed: Testbed, node: Node, *words: str) -> subprocess.CompletedProcess[str]:
    known = testbed.folder / "known_hosts"
    known.write_text(testbed.known_hosts())
    options = ["-i", str(testbed.key), "-o", f"UserKnownHostsFile={known}", "-o", "StrictHostKeyChecking=yes"]
    options += ["-o", "ConnectTimeout=2", "-o", "BatchMode=yes", "-p", str(node.ssh_port)]
    command = ["ssh", "-F", "none", *options, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_nodes_are_hosts_of_their_own_that_share_one_folder(testbed: Testbed, nodes: list[Node]) -> None:
    seen = {ssh(testbed, node, f"root@{node.address}", "hostname; cat /etc/machine-id").stdout for node in nodes}
    assert len(seen) == 3
    nodes[0].exec("echo hello >/storage/note")
    assert nodes[1].exec("cat /storage/note").stdout == "hello\n"
    for account, sudo in {"admin": False, "deploy": True, "guest": False}.items():
        assert (ssh(testbed, nodes[0], f"{account}@{nodes[0].address}", "sudo -n true").returncode == 0) is sudo
    assert nodes[0].exec("command -v docker", check=False).returncode != 0


def test_a_killed_node_keeps_its_disk_and_a_reset_one_does_not(testbed: Testbed, nodes: list[Node]) -> None:
    node = nodes[0]
    node.exec("echo here >/root/mark; echo gone >/run/mark")
    node.kill()
    with pytest.raises(OSError, match=r"route|refused|timed out"):
        socket.create_connection((node.address, node.ssh_port), 1.0)
    node.start()
    assert node.exec("cat /root/mark; ls /run/mark", check=False).stdout == "here\n"
    key = node.host_key
    node.reset()
    assert node.exec("ls /root/mark", check=False).returncode != 0
    assert node.host_key == key
    node.reset(new_host_key=True)
    assert node.host_key != key
    assert ssh(testbed, node, f"root@{node.address}", "true").returncode == 0


def test_a_frozen_node_accepts_connections_and_says_nothing(nodes: list[Node]) -> None:
    nodes[0].freeze()
    with socket.create_connection((nodes[0].address, 22), 2.0) as peer:
        peer.settimeout(0.3)
        with pytest.raises(TimeoutError):
            peer.recv(1)
    nodes[0].start()
    assert nodes[0].exec("echo back").stdout == "back\n"


def test_storage_can_be_own_read_only_or_missing_and_a_disk_can_be_small(nodes: list[Node]) -> None:
    nodes[0].reset(storage="own", docker_disk="16m")
    nodes[1].reset(storage="read-only")
    nodes[2].reset(storage="none")
    nodes[0].exec("echo mine >/storage/mine")
    assert nodes[1].exec("ls /storage/mine || touch /storage/x", check=False).returncode != 0
    assert nodes[2].exec("test -e /storage", check=False).returncode != 0
    assert "No space left" in nodes[0].exec("head -c 20m /dev/zero >/var/lib/docker/x", check=False).stderr


def test_a_run_that_was_killed_leaves_nothing_once_the_next_one_started(tmp_path: Path) -> None:
    script = (
        "import sys, time; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\n"
        "from testbed_engine import LABEL, Engine\n"
        "engine = Engine(Path(sys.argv[2])); engine.start()\n"
        "engine.docker('volume', 'create', '--label', f'{LABEL}=1', 'leftover')\n"
        "print(engine.pid, flush=True); time.sleep(600)\n"
    )
    words = [sys.executable, "-c", script, str(Path(__file__).parent), str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        dockerd = int(child.stdout.readline())
        child.kill()
    engine = Engine(tmp_path)
    engine.start()
    try:
        assert engine.pid != dockerd
        assert not process_runs(dockerd)
        assert engine.docker("volume", "ls", "-q") == ""
    finally:
        engine.stop()
    assert not engine.state.exists()
    assert all(str(tmp_path) not in line for line in command("ps", "-eo", "args").splitlines() if "dockerd" in line)
