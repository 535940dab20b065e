"""Shared storage over FUSE: the second host mounts the head's folder with sshfs, whose locks stay on the host."""

from __future__ import annotations

from pathlib import Path

import pytest
from host_faults import finding
from setup_command import Operator, assert_ready
from testbed import Node, Testbed
from testbed_runtime import put_on_storage

from clusterkit.provision.images.identity import Image

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

MOUNT = "sshfs -o StrictHostKeyChecking=no,allow_other root@{head}:/storage /storage"


def mount(node: Node, head: Node) -> None:
    """Mount the head's folder with sshfs on a host that has no storage of its own."""
    node.exec("apt-get update -q && apt-get install -y -q --no-install-recommends sshfs", timeout=300)
    node.exec("umask 077 && cat >/root/.ssh/id_ed25519 && mkdir -m 755 /storage", stdin=node.testbed.key.read_bytes())
    node.exec(MOUNT.format(head=head.address))


def test_sshfs_is_one_folder_and_its_locks_are_warned_about(testbed: Testbed, cpu_image: Image, tmp_path: Path) -> None:
    if not Path("/dev/fuse").exists():  # no package brings it
        pytest.skip("needs a kernel with FUSE: there is no /dev/fuse")
    testbed.reset()
    head, worker = pair = testbed.nodes[:2]
    worker.reset(storage="none", fuse=True)
    mount(worker, head)
    put_on_storage(testbed, cpu_image)
    operator = Operator(testbed, tmp_path, cpu_image)

    done = operator.setup(hosts=pair)
    assert_ready(done, pair)
    assert f"a file lock of {head.address} does not hold here" in done.text, done.text

    looked = operator.check(hosts=pair)
    assert looked.exit_code == 0, looked.text
    for where in ("storage", "container storage"):
        assert "one host alone" in finding(looked, worker, where)

    # Its server is silent for a moment: an error in words.
    worker.exec("pkill -STOP sshfs")
    dead = operator.check(hosts=pair)
    worker.exec("pkill -CONT sshfs")
    assert dead.exit_code != 0
    assert "answer" in dead.text, dead.text
    assert operator.setup(hosts=pair).changes == 0
