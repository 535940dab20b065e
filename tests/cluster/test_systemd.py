"""`clusterkit setup` on hosts whose PID 1 is systemd: Docker as its service, with proxies, over a reboot."""

from __future__ import annotations

from pathlib import Path

import pytest
from setup_command import Operator, assert_ready
from testbed import Testbed
from testbed_runtime import put_on_storage

from clusterkit.provision.images.identity import Image

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def test_docker_is_a_service_that_comes_back_after_a_reboot(testbed: Testbed, cpu_image: Image, tmp_path: Path) -> None:
    testbed.reset()
    pair = testbed.nodes[:2]
    node = pair[0]  # one with systemd and one without, in one cluster
    node.reset(systemd=True)
    put_on_storage(testbed, cpu_image)
    operator = Operator(testbed, tmp_path, cpu_image)
    assert node.exec("cat /proc/1/comm").stdout == "systemd\n"

    first = operator.setup(hosts=pair)
    assert_ready(first, pair)
    assert node.exec("systemctl is-enabled docker && systemctl is-active docker").stdout == "enabled\nactive\n"
    assert operator.setup(hosts=pair).changes == 0

    # Settings that the engine has to be restarted for go through systemd: its container is ours, so it may be stopped.
    before = node.exec("systemctl show -p MainPID --value docker").stdout
    proxied = operator.setup("--http-proxy", "http://127.0.0.1:9", "--no-proxy", "*", hosts=pair)
    assert_ready(proxied, pair)
    assert node.exec("systemctl show -p MainPID --value docker").stdout != before
    assert "http://127.0.0.1:9" in node.exec("systemctl show -p Environment --value docker").stdout

    node.kill()
    node.start()
    assert operator("ray-status").exit_code != 0
    again = operator.setup(hosts=pair)
    assert_ready(again, pair)
    assert again.row(node)["steps"]["docker"] == "ok", again.report

    # A service that cannot start: its last words come from the journal.
    node.exec("systemctl stop docker.service docker.socket && echo '{\"no-such-key\": 1}' >/etc/docker/daemon.json")
    broken = operator.setup(hosts=pair)
    failure = broken.failure(node)
    assert "no-such-key" in "\n".join([failure["message"], *failure["last_lines"]]), failure
    node.exec("rm /etc/docker/daemon.json")
    assert_ready(operator.setup(hosts=pair), pair)
