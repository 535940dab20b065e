"""`clusterkit setup` on an Ubuntu host beside a Debian one: other packages, another Docker, one image and one Ray.

The other tests of this folder run on Ubuntu alone where CLUSTERKIT_TESTBED_SYSTEM says so.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from setup_command import Operator
from testbed import Testbed
from testbed_runtime import put_on_storage
from testbed_systems import DEBIAN, SYSTEMS

from clusterkit.provision.images.identity import Image

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


def test_debian_and_ubuntu_make_one_cluster(testbed: Testbed, cpu_image: Image, tmp_path: Path) -> None:
    testbed.reset()
    pair = testbed.nodes[:2]
    pair[0].reset(system=DEBIAN)
    pair[1].reset(system=SYSTEMS["ubuntu-24.04"], systemd=True)
    put_on_storage(testbed, cpu_image)
    operator = Operator(testbed, tmp_path, cpu_image)
    own_sources = ("--apt-mirror", "none")  # one mirror would not serve both
    done = operator.setup(*own_sources, hosts=pair)
    assert done.exit_code == 0, done.text[-4000:]
    assert done.report["ray"]["ready"] is True
    engines = [node.exec("docker version --format '{{.Server.Version}}'").stdout for node in pair]
    assert engines[0] != engines[1]
    again = operator.setup(*own_sources, "--dry-run", hosts=pair)
    assert (again.exit_code, again.changes) == (0, 0), again.text[-4000:]
    again = operator.setup(*own_sources, hosts=pair)
    assert (again.exit_code, again.changes) == (0, 0), again.text[-4000:]
