"""Commands over a bad link: every packet takes 150 ms each way, and 30 % of what hosts send is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from host_faults import bad_link, finding, verdict
from realparts import require
from setup_command import Operator, assert_ready
from testbed import Node, Testbed
from testbed_runtime import put_on_storage

from clusterkit.provision.images.identity import Image

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def test_bare_hosts_are_set_up_checked_and_found_ready(
    testbed: Testbed, nodes: list[Node], cpu_image: Image, tmp_path: Path
) -> None:
    queue = Path("/proc/net/netfilter/nfnetlink_queue")
    require(queue.exists(), f"needs a kernel that hands packets to programs (NFQUEUE): there is no {queue}")
    put_on_storage(testbed, cpu_image)
    operator, chosen = Operator(testbed, tmp_path, cpu_image), nodes[:2]
    with bad_link(chosen[0]):
        done = operator.setup(hosts=chosen)
        assert_ready(done, chosen)
        looked = operator.check(hosts=chosen)
        assert [verdict(looked, node) for node in chosen] == ["ok", "ok"], looked.text
        assert operator("ray-status").exit_code == 0
        # A link that is worse than the patience: which option gives more is said.
        hasty = operator.check("--connect-timeout", "0.2", hosts=chosen)
        assert hasty.exit_code == 1
        assert "--connect-timeout 0.8" in finding(hasty, chosen[0], "connection") or "firewall" in hasty.text
