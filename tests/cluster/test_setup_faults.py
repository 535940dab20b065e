"""`clusterkit setup` and `check` on hosts that something is wrong with: who is named, what to do, who gets through.

The tests go from bare hosts to a cluster (`ready`, whose three runs have faults of their own) and then spoil it, one
host with one fault each, several hosts in one run. Two faults cannot be had for real in a node, which is a container:
another clock and another processor. There a stand-in (for `date`, for `uname` and its file) says what they would be.
"""

from __future__ import annotations

import contextlib
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from host_faults import (
    assert_fault,
    assert_through,
    finding,
    other_processor,
    own_authority,
    package_lock_held,
    repaired,
    stand_in,
    unmet,
    untouched,
    users_files,
    verdict,
)
from setup_command import SUDO_PASSWORD, Done, Operator
from testbed import PASSWORD, Node, Testbed
from testbed_runtime import put_on_storage

from clusterkit.provision.images.identity import Image

pytestmark = pytest.mark.long

NEIGHBOUR = "neighbour"
USERS_DAEMON_JSON = '{"log-level": "warn"}'
WRONG_PASSWORD = "not the password of these hosts"
FILL = "dd if=/dev/zero bs=4k status=none"


# -- bare hosts -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bare(testbed: Testbed) -> Testbed:
    """Three bare nodes."""
    testbed.reset()
    return testbed


@pytest.fixture
def stranger(bare: Testbed, cpu_image: Image, tmp_path: Path) -> Operator:
    """Somebody who has never met these hosts."""
    return Operator(bare, tmp_path, cpu_image)


@pytest.mark.parametrize(
    ("hosts", "said", "way_out"),
    [
        (["-oProxyCommand=touch /tmp/owned", "{0}"], "cannot begin with '-'", "Write hosts as"),
        (["{0},root@-oProxyCommand=touch"], "cannot begin with '-'", "Write hosts as"),
        (["{0}", "{1}", "{0}"], "{0}: named twice", "Name every host once"),
        (["{0}", "node_[1"], "a bracket has no partner", "Write hosts as"),
        (["{0}", "{1}:99999"], "'99999' is no port", "Write hosts as"),
        (["{0}", "10.0.0.256"], "is no IP address", "Write hosts as"),
    ],
)
def test_malformed_hosts_are_refused_before_any_is_spoken_to(
    stranger: Operator, hosts: list[str], said: str, way_out: str
) -> None:
    nodes = stranger.testbed.nodes
    addresses = [node.address for node in nodes]
    with untouched(*nodes), unmet(*nodes):
        done = stranger.setup(hosts=[host.format(*addresses) for host in hosts])
    assert done.exit_code == 2, done.text
    assert said.format(*addresses) in done.stderr
    assert way_out in done.stderr
    assert not stranger.kept()
    assert not Path("/tmp/owned").exists()


def test_fewer_hosts_than_the_preset_needs(stranger: Operator) -> None:
    nodes = stranger.testbed.nodes
    with untouched(*nodes), unmet(*nodes):
        done = stranger.setup("--preset", "1.5B_n4")
    assert done.exit_code == 2, done.text
    assert "1.5B_n4 needs 4 hosts; 3 named" in done.stderr
    assert "name more" in done.stderr
    assert not stranger.kept()


def test_wrong_key(stranger: Operator) -> None:
    nodes = stranger.testbed.nodes
    stranger.key = stranger.folder / "other_key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(stranger.key)], check=True)
    with untouched(*nodes):
        done = stranger.setup()
    assert done.exit_code == 1
    for node in nodes:
        assert_fault(done, node, "connect", "did not let root in", "other_key", fix="--private-key-file")


def test_sudo_password(stranger: Operator) -> None:
    admin, guest, root = stranger.testbed.nodes
    hosts = [f"admin@{admin.address}", f"guest@{guest.address}", f"root@{root.address}"]
    with untouched(admin, guest, root):
        wrong = stranger.check("--no-probes", hosts=hosts, environment={SUDO_PASSWORD: WRONG_PASSWORD})
        right = stranger.check("--no-probes", hosts=hosts, environment={SUDO_PASSWORD: PASSWORD})
    assert (wrong.exit_code, right.exit_code) == (1, 1)
    assert "sudo does not accept the password of admin" in finding(wrong, admin, "root")
    assert "--ask-sudo-password" in finding(wrong, admin, "root")
    assert "sudo with a password" in finding(right, admin, "root")
    assert "guest" in finding(right, guest, "root")
    assert [verdict(done, root) in {"ok", "warn"} for done in (wrong, right)] == [True, True]
    assert [verdict(done, node) for done, node in ((wrong, admin), (right, guest))] == ["fail", "fail"]
    assert verdict(right, admin) in {"ok", "warn"}
    assert WRONG_PASSWORD not in wrong.text + stranger.kept()


def test_changed_host_key_and_hosts_that_do_not_answer(stranger: Operator) -> None:
    good, changed, silent = stranger.testbed.nodes
    nobody = good.address.rpartition(".")[0] + ".250"
    assert stranger.check("--no-probes").exit_code == 0
    changed.reset(new_host_key=True)
    silent.freeze()
    try:
        hosts = [good, changed, silent, nobody]
        done = stranger.check("--connect-timeout", "2", hosts=hosts)
    finally:
        silent.start()
    assert done.exit_code == 3, done.text
    assert verdict(done, good) in {"ok", "warn"}
    assert [verdict(done, host) for host in (changed, silent, nobody)] == ["unreachable"] * 3
    assert "no SSH server answered within 2 s" in finding(done, silent, "connection")
    assert done.seconds < 30
    for words in (f"{nobody} port 22", "Is the host up"):
        assert words in finding(done, nobody, "connection")

    told = finding(done, changed, "connection")
    assert "the host key has changed" in told
    # Host keys are never accepted on the quiet: the way out is a command, and it works.
    assert stranger.check("--no-probes", hosts=[changed]).exit_code == 1
    (command,) = [line for line in told.splitlines() if line.startswith("ssh-keygen -R")]
    subprocess.run(shlex.split(command), check=True, capture_output=True, timeout=300)
    assert stranger.check("--no-probes", hosts=[changed]).exit_code == 0


def test_disks_that_are_full_at_three_steps(stranger: Operator) -> None:
    """Of one host the disk of apt's downloads, of one that of /etc, of one the same while Docker is unpacked."""
    downloads, settings, unpacking = stranger.testbed.nodes
    for node in stranger.testbed.nodes:
        node.exec(f"mkdir -p /etc/docker && printf '%s' '{USERS_DAEMON_JSON}' >/etc/docker/daemon.json")
    downloads.exec(f"mount -t tmpfs -o size=1m small /var/cache && {FILL} of=/var/cache/fill || :")
    for node in (settings, unpacking):
        node.exec("mount -t tmpfs -o size=16m,mode=755 small /mnt && cp -a /etc/. /mnt && mount --bind /mnt /etc")
    settings.exec(f"{FILL} of=/mnt/fill || :")
    before = [users_files(node) for node in stranger.testbed.nodes]

    words = ("--image", "no-such-registry.invalid/runtime:1")
    running = stranger.start(*stranger.setup_words(*words))
    stranger.await_log(unpacking, "== docker: install", running)
    unpacking.exec(f"{FILL} of=/mnt/fill || :")
    done = stranger.finish(running)

    assert done.exit_code == 1, done.text
    assert_fault(done, downloads, "packages", "/var/cache", "0 KiB free", fix="make room there")
    assert_fault(done, settings, "connect", "/etc/clusterkit/", "No space left on device", fix="free space")
    assert_fault(done, unpacking, "docker", "/etc (small, 0 KiB free)", fix="make room there")
    assert [users_files(node) for node in stranger.testbed.nodes] == before
    # Nothing is left half done, either: with room, the host goes on to what nobody has, the image.
    unpacking.exec("rm /mnt/fill")
    again = stranger.setup(*words, "--cluster", "alone", hosts=[unpacking])
    assert again.failure(unpacking)["step"] == "image", again.text
    assert set(before[2].splitlines()) <= set(users_files(unpacking).splitlines())


# -- from bare hosts to a cluster, with a fault on every host ---------------------------------------------------------


@dataclass
class Ready:
    """A cluster that is ready, and the three runs that it took, as `admin`, of whom sudo wants a password."""

    operator: Operator
    first: Done
    second: Done
    third: Done
    locked: Done
    """`check` while the package lock was held."""

    @property
    def nodes(self) -> list[Node]:
        """Head and workers."""
        return self.operator.testbed.nodes


@pytest.fixture(scope="module")
def ready(bare: Testbed, cpu_image: Image, tmp_path_factory: pytest.TempPathFactory) -> Ready:
    """Run `setup` three times.

    First run. Head: another apt holds the package lock for a while. Second host: its power fails while packages are
    unpacked. Third host: its disk fills up after it was found large enough.
    Second run, of those that failed. Second host: back again, with half-installed packages. Third host: its /storage
    is a folder of its own.
    Third run. All is repaired.
    """
    head, dying, spoilt = bare.nodes
    bare.reset()
    spoilt.reset(docker_disk="8g")
    put_on_storage(bare, cpu_image)
    operator = Operator(bare, tmp_path_factory.mktemp("operator"), cpu_image, username="admin", sudo_password=PASSWORD)
    head.exec(f"mkdir -p /etc/docker && printf '%s' '{USERS_DAEMON_JSON}' >/etc/docker/daemon.json")
    head.exec("apt-get update -q", timeout=120)
    with package_lock_held(head) as release:
        running = operator.start(*operator.setup_words())
        operator.await_log(spoilt, "== docker: install", running)
        spoilt.exec(f"mount -o remount,size={cpu_image.size // 4} /var/lib/docker")
        operator.await_log(dying, "Unpacking docker.io", running)
        dying.kill()
        operator.await_log(head, "Waiting for cache lock", running)
        locked = operator.check("--no-probes", hosts=[head])
        release()
        first = operator.finish(running)
    dying.start()
    spoilt.exec("mount -o remount,size=8g /var/lib/docker")
    spoilt.exec("mkdir -p /srv/local && mount --bind /srv/local /storage")
    second = operator.setup("--retry")
    spoilt.exec("umount /storage")
    third = operator.setup()
    assert third.exit_code == 0, third.text
    dying.exec(f"docker run -d --init --name {NEIGHBOUR} --network host {cpu_image.reference} sleep 1d", timeout=60)
    return Ready(operator, first, second, third, locked)


def test_package_lock_is_waited_for(ready: Ready) -> None:
    head = ready.nodes[0]
    assert_through(ready.first, head)
    assert ready.first.row(head)["steps"]["packages"] == "changed"
    assert "Waiting for cache lock" in Path(ready.first.row(head)["log"]).read_text()
    assert verdict(ready.locked, head) == "warn"
    assert "the package manager is busy: apt-get" in finding(ready.locked, head, "packages")
    assert "setup waits for it" in finding(ready.locked, head, "packages")
    assert head.exec("dpkg -s jq").returncode == 0  # what held it came to its end, too


def test_host_that_dies_in_the_middle_holds_nobody_up_and_converges_later(ready: Ready) -> None:
    dying = ready.nodes[1]
    assert ready.first.exit_code == 3
    assert_fault(ready.first, dying, "docker", "lost", fix="again")
    assert "docker.io" in ready.first.failure(dying)["command"]
    assert Path(ready.first.row(dying)["log"]).read_text()
    assert_through(ready.second, dying)
    assert dying.exec("dpkg --audit").stdout == ""


def test_full_disk(ready: Ready) -> None:
    spoilt = ready.nodes[2]
    assert_fault(ready.first, spoilt, "image", "no space left on device", fix="make room where Docker keeps its images")


def test_storage_that_is_not_shared(ready: Ready) -> None:
    spoilt = ready.nodes[2]
    assert ready.second.exit_code == 3
    assert [row["host"] for row in ready.second.report["hosts"]] == [node.address for node in ready.nodes[1:]]
    assert ready.second.failed == [spoilt.address]
    assert_fault(ready.second, spoilt, "shared", "/storage is not shared", fix="Mount the same file system")
    assert spoilt.exec("ls -A /srv/local").stdout.split() == ["codes", "datasets", "images", "models", "ray"]


def test_all_is_ready_and_what_was_the_users_is_as_it_was(ready: Ready) -> None:
    assert ready.third.report["ray"]["ready"] is True
    head = ready.nodes[0]
    assert head.exec("cat /etc/docker/daemon.json").stdout == USERS_DAEMON_JSON
    nothing = ready.operator.setup("--retry")
    assert (nothing.exit_code, nothing.report["hosts"]) == (0, []), nothing.text
    again = ready.operator.setup()
    assert (again.exit_code, again.changes) == (0, 0), again.text
    assert PASSWORD not in again.text + ready.operator.kept()


# -- faults on a cluster that runs ------------------------------------------------------------------------------------


def test_unknown_account_key_and_skewed_clock(ready: Ready) -> None:
    _, locked, skewed = ready.nodes
    keys = "/home/admin/.ssh/authorized_keys"
    ahead = 'exec /bin/date -d "+10 minutes" "$@"'
    unknown = repaired(locked, f"mv {keys} {keys}.kept", f"mv {keys}.kept {keys}")
    with spared(ready), unknown, stand_in(skewed, "date", ahead):
        done = ready.operator.setup()
    assert_only(ready, done, locked, skewed)
    assert_fault(done, locked, "connect", "did not let admin in", fix="--private-key-file")
    assert_fault(done, skewed, "check", "clock is 600 s ahead", fix="chrony")


def test_broken_docker_and_wrong_architecture(ready: Ready) -> None:
    _, broken, other = ready.nodes
    fails = "echo 'docker: error while loading shared libraries: libc.so.6' >&2; exit 127"
    with spared(ready), stand_in(broken, "docker", fails), other_processor(other):
        done = ready.operator.setup()
    assert_only(ready, done, broken, other)
    assert_fault(done, broken, "docker", "Docker is installed but broken", "shared libraries", fix="Repair it")
    assert_fault(done, other, "check", "aarch64", "x86_64", fix="--exclude")


def test_read_only_storage_and_invalid_daemon_json(ready: Ready) -> None:
    _, reading, invalid = ready.nodes
    settings = "/etc/docker/daemon.json"
    text = '{"log-level": "warn",}'
    with (
        spared(ready),
        repaired(reading, "mount -o remount,bind,ro /storage", "mount -o remount,bind,rw /storage"),
        repaired(invalid, f"printf '%s' '{text}' >{settings}", f"rm {settings}"),
    ):
        done = ready.operator.setup()
        assert invalid.exec(f"cat {settings}").stdout == text
    assert_only(ready, done, reading, invalid)
    assert_fault(done, reading, "check", "/storage is mounted read-only", fix="remount,rw")
    assert_fault(done, invalid, "daemon", f"{settings} is not valid JSON", "line 1", fix="Correct it by hand")


def test_another_sudo_password_and_a_host_that_never_answers(ready: Ready) -> None:
    _, other, silent = ready.nodes
    silent.freeze()
    try:
        with repaired(other, "echo admin:another | chpasswd", f"echo 'admin:{PASSWORD}' | chpasswd"):
            done = ready.operator.setup("--connect-timeout", "2")
    finally:
        silent.start()
    assert_only(ready, done, other, silent)
    assert_fault(done, other, "check", "sudo does not accept the password of admin", fix="--ask-sudo-password")
    assert_fault(done, silent, "connect", "no SSH server answered within 2 s", fix="may hang")
    assert done.seconds < 30


def test_registry_that_cannot_be_reached(ready: Ready) -> None:
    head, *workers = ready.nodes
    wanted = "no-such-registry.invalid/runtime:1"
    with spared(ready):
        done = ready.operator.setup("--image", wanted)
    assert done.exit_code == 1
    assert_fault(done, head, "image", wanted, "no-such-registry.invalid", fix="reaches the registry")
    for worker in workers:
        assert_fault(done, worker, "image", f"the head node {head.address} failed at image", fix=head.address)


def test_repaired_hosts_are_as_before(ready: Ready) -> None:
    with spared(ready):
        done = ready.operator.setup()
    assert (done.exit_code, done.changes) == (0, 0), done.text
    assert done.report["ray"]["ready"] is True


def test_docker_is_restarted_under_others_only_with_force(ready: Ready, tmp_path: Path) -> None:
    node = ready.nodes[1]
    authorities = tmp_path / "authorities.pem"
    site = ready.operator.testbed.site.ca_bundle
    authorities.write_bytes((site.read_bytes() if site else b"") + own_authority(tmp_path))
    words = ["--ca-bundle", str(authorities), "--limit", node.address]
    with spared(ready):
        done = ready.operator.setup(*words)
    assert done.exit_code == 1
    assert_fault(done, node, "daemon", "would stop containers that are not ours", NEIGHBOUR, fix="--force")
    forced = ready.operator.setup(*words, "--force")
    assert forced.exit_code == 0, forced.text
    assert f"restart Docker (stops {NEIGHBOUR}" in "".join(forced.row(node)["changes"])
    assert node.exec(f"docker inspect -f '{{{{.State.Status}}}}' {NEIGHBOUR}").stdout.strip() == "exited"


def test_port_that_is_taken(ready: Ready) -> None:
    """The last test of this file: it takes the cluster down."""
    head, *workers = ready.nodes
    assert ready.operator("down", "-y").exit_code == 0
    with repaired(head, "/usr/sbin/sshd -p 6379 -o PidFile=/run/second.pid", "kill $(cat /run/second.pid)"):
        done = ready.operator("setup", *ready.operator.wishes())  # the hosts are known by now
    assert done.exit_code == 1, done.text
    assert f"{head.address} failed at check: ports: port 6379 (GCS of Ray) is taken by sshd" in done.stdout
    assert "ss -ltnp 'sport = :6379'" in done.stdout
    for worker in workers:
        assert f"{worker.address} failed at" in done.stdout
        assert f"repair {head.address}" in done.stdout
    assert "3 of 3 hosts failed" in done.stdout
    assert NEIGHBOUR in ready.nodes[1].exec("docker ps -a --format '{{.Names}}'").stdout


@contextlib.contextmanager
def spared(ready: Ready) -> Iterator[None]:
    """Nothing of the user's, and none of the containers that run, is stopped or started anew by the block."""

    def seen(node: Node) -> str:
        docker = "/usr/bin/docker"  # whatever stands before it
        inspect = f"{docker} ps -q --no-trunc | xargs {docker} inspect -f '{{{{.Name}}}} {{{{.State.StartedAt}}}}'"
        return node.exec(f"pidof dockerd; {inspect} | sort; ls -A /storage").stdout

    before = [seen(node) for node in ready.nodes]
    assert NEIGHBOUR in before[1]
    yield
    assert [seen(node) for node in ready.nodes] == before


def assert_only(ready: Ready, done: Done, *nodes: Node) -> None:
    """These hosts failed, and the others got through."""
    assert done.exit_code == 3, done.text
    assert done.failed == [node.address for node in nodes]
    assert_through(done, *(node for node in ready.nodes if node not in nodes))
