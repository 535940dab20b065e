"""Commands over a bad link: every packet takes 150 ms each way, and 15 % of what the head sends is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from host_faults import bad_link
from setup_command import Operator, assert_ready
from testbed import Node, Testbed
from testbed_runtime import put_on_storage

from clusterkit.provision.images.identity import Image

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

PATIENT = ("--connect-timeout", "60")
"""TCP waits twice as long after each loss in a row: 15 s do not always suffice."""


def test_bare_hosts_are_set_up_and_found_ready(
    testbed: Testbed, nodes: list[Node], cpu_image: Image, tmp_path: Path
) -> None:
    queue = Path("/proc/net/netfilter/nfnetlink_queue")
    if not queue.exists():  # no package brings it
        pytest.skip(f"needs a kernel that hands packets to programs (NFQUEUE): there is no {queue}")
    put_on_storage(testbed, cpu_image)
    operator, chosen = Operator(testbed, tmp_path, cpu_image), nodes[:2]
    with bad_link(chosen[0]):
        done = operator.setup(*PATIENT, hosts=chosen)
        assert_ready(done, chosen)
        assert operator("ray-status", *PATIENT).exit_code == 0
