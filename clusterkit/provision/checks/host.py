"""Verdicts on one host by itself: system, root, memory, disks, package manager, Docker, ports, addresses."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterator

from clusterkit.common.finding import Finding, Level
from clusterkit.hosts.model import Cluster, Host
from clusterkit.provision.checks.needs import GIB, Needs
from clusterkit.provision.facts.model import Disk, Facts
from clusterkit.provision.ray.model import LABEL_CLUSTER, running_containers
from clusterkit.provision.ray.ports import Ports
from clusterkit.provision.steps.step import Refused
from clusterkit.provision.steps.systems import system_of

LEAST_MEMORY = 2 * GIB
COMFORTABLE_MEMORY = 4 * GIB
LEAST_INODES = 50_000
COMFORTABLE_INODES = 500_000
DOCKER_ROOT, CONTAINERD_ROOT = "/var/lib/docker", "/var/lib/containerd"


def judge_host(host: Host, facts: Facts, cluster: Cluster, needs: Needs) -> Iterator[Finding]:
    """Yield the verdicts that need no other host."""
    for check, verdicts in (
        ("system", _system(facts)),
        ("root", _root(facts)),
        ("memory", _memory(facts)),
        ("disk", _disks(facts, needs, cluster)),
        ("storage", _storage(facts, needs, cluster)),
        ("packages", _packages(facts)),
        ("docker", _docker(facts)),
        ("ports", _ports(facts, cluster, host)),
        ("address", _address(facts, cluster, host)),
    ):
        for level, message, fix in verdicts:
            yield Finding(host.name, check, level, message, fix)


_Verdicts = Iterator[tuple[Level, str, str]]


def _system(facts: Facts) -> _Verdicts:
    try:
        system = system_of(facts)
    except Refused as refused:
        yield Level.FAIL, refused.message, refused.fix
    else:
        yield Level.OK, f"{system.name} {facts.os.arch}", ""


def _root(facts: Facts) -> _Verdicts:
    ways = {"root": "logged in as root", "nopasswd": "sudo without a password", "password": "sudo with a password"}
    if facts.sudo in ways:
        yield Level.OK, ways[facts.sudo], ""
        return
    reason = facts.extra.get("sudo_error") or "the login user is not root and cannot become it"
    fix = facts.extra.get("sudo_fix") or "Log in as root (--username root), or as a user whom sudo lets run everything."
    yield Level.FAIL, f"root is needed: {reason}", fix


def _memory(facts: Facts) -> _Verdicts:
    amount = f"{facts.memory / GIB:.1f} GiB of memory"
    gpu_memory = sum(gpu.memory for gpu in facts.gpus)
    if facts.memory < LEAST_MEMORY:
        message = f"only {amount}; {LEAST_MEMORY // GIB} GiB are the least that Ray works in"
        yield Level.FAIL, message, "Use a larger host."
    elif facts.memory < COMFORTABLE_MEMORY:
        yield Level.WARN, f"only {amount}", "Expect Ray to spill to disk; 4 GiB or more are better."
    elif facts.memory < gpu_memory // 2:
        message = f"{amount} beside {gpu_memory / GIB:.0f} GiB on the GPUs: loading and saving models may run out"
        yield Level.WARN, message, "Use hosts with at least half as much memory as their GPUs have."
    else:
        yield Level.OK, amount, ""


def _disks(facts: Facts, needs: Needs, cluster: Cluster) -> _Verdicts:
    space = needs.gpu_image_space if facts.gpus else needs.image_space
    # Docker 29 keeps images in containerd's folder, so both count. Where our container runs, setup adds no image.
    has_image = any(LABEL_CLUSTER in container.labels for container in facts.docker.containers)
    seen: set[tuple[str, int]] = set()
    for path in dict.fromkeys((facts.docker.root or DOCKER_ROOT, CONTAINERD_ROOT, "/tmp")):
        disk = facts.disks.get(path)
        if disk is None or path == cluster.storage or (disk.source, disk.size) in seen:
            continue
        seen.add((disk.source, disk.size))
        required = GIB if path == "/tmp" or has_image else space
        yield from judge_disk(disk, required, f"Free space on {disk.source or path}, or move Docker's data-root.")


def judge_disk(disk: Disk, needed: int, fix: str) -> _Verdicts:
    """Yield verdicts on a file system: does it answer, can it be written, has it `needed` bytes and enough inodes."""
    free = f"{disk.free / GIB:.1f} GiB free at {disk.path}"
    if disk.timed_out:
        message = f"{disk.path} gave no answer within 5 seconds: a network mount whose server is gone"
        yield Level.FAIL, message, f"Bring its server back, or `umount -l {disk.path}` and mount it again."
    elif disk.size == 0:
        yield Level.WARN, f"the size of the file system at {disk.path} is unknown", f"Run `df {disk.path}` there."
    elif disk.read_only:
        message = f"{disk.path} is mounted read-only ({disk.source})"
        yield Level.FAIL, message, f"Look at `dmesg` for disk errors, then `mount -o remount,rw` {disk.path}."
    elif disk.free < needed:
        yield Level.FAIL, f"only {free}; {needed / GIB:.0f} GiB are needed", fix
    elif disk.inodes_free is not None and disk.inodes_free < LEAST_INODES:
        yield Level.FAIL, f"only {disk.inodes_free} inodes left at {disk.path}, so few more files", fix
    elif disk.inodes_free is not None and disk.inodes_free < COMFORTABLE_INODES:
        yield Level.WARN, f"only {disk.inodes_free} inodes left at {disk.path}", fix
    else:
        yield Level.OK, free, ""


def _storage(facts: Facts, needs: Needs, cluster: Cluster) -> _Verdicts:
    disk = facts.disks.get(cluster.storage)
    if disk is None:
        return
    if not disk.exists and not disk.timed_out:
        if len(cluster.hosts) == 1:
            yield Level.OK, f"{cluster.storage} is not there: setup would create it", ""
        else:
            message = f"{cluster.storage} is not there: setup would create it as a folder of this host alone"
            yield Level.WARN, message, f"Mount the file system that all hosts share at {cluster.storage}."
        return
    yield from judge_disk(disk, needs.data_space, f"Free space under {cluster.storage}, or choose another (--storage).")


def _packages(facts: Facts) -> _Verdicts:
    if facts.lock_holder:
        message = f"the package manager is busy: {facts.lock_holder} holds its lock"
        yield Level.WARN, message, "setup waits for it; unattended upgrades of a fresh host take minutes."
    else:
        yield Level.OK, "the package manager is free", ""


def _docker(facts: Facts) -> _Verdicts:
    docker = facts.docker
    if docker.daemon_json is not None:
        try:
            json.loads(docker.daemon_json or "{}")
        except ValueError as error:
            message = f"/etc/docker/daemon.json is no JSON ({error}), so Docker cannot start"
            yield Level.FAIL, message, "Repair the file, or move it away; `dockerd --validate` tells more."
            return
    if not docker.client and docker.pid is None:
        yield Level.OK, "not installed: setup installs it", ""
    elif docker.server:
        yield Level.OK, f"Docker {docker.server}", ""
    elif "docker.service: failed" in docker.error:
        yield Level.FAIL, f"Docker is broken: {docker.error}", "Its own words: `journalctl -u docker -n 50`."
    elif docker.pid is None and "Cannot connect to the Docker daemon" in docker.error:
        yield Level.WARN, f"Docker {docker.client} is installed but does not run", "setup starts it."
    elif facts.sudo == "none":
        yield Level.WARN, f"not known without root: {docker.error}", "Give a user who may become root."
    else:
        yield Level.FAIL, f"Docker is broken: {docker.error}", "Make `docker info` work on the host, then check again."


def _ports(facts: Facts, cluster: Cluster, host: Host) -> _Verdicts:
    ports = Ports()
    required = ports.listening(head=host.name == cluster.head_host.name)
    taken = []
    for name, port in required.items():
        if port in facts.listening and not _is_ours(facts, port, cluster):
            taken.append(port)
            message = f"port {port} ({name} of Ray) is taken by {_owner(facts, port)}"
            if _may_be_ours(facts, port):
                yield Level.WARN, f"{message} in a container", "It may be Ray's own: Docker does not say whose it is."
                continue
            yield Level.FAIL, message, f"End it or give it another port; `ss -ltnp 'sport = :{port}'` shows it."
    others = [
        port
        for port in facts.listening
        if ports.first_worker <= port <= ports.last_worker and not _is_ours(facts, port, cluster)
    ]
    if others:
        shown = ", ".join(map(str, others[:5])) + (" …" if len(others) > 5 else "")
        message = f"{shown} of the ports {ports.first_worker}-{ports.last_worker} for Ray's workers are taken"
        yield Level.WARN, message, "Ray takes others of the range; move these services if its workers fail to start."
    if not taken and not others:
        yield Level.OK, "all ports of Ray are free or Ray's", ""


def _is_ours(facts: Facts, port: int, cluster: Cluster) -> bool:
    ours = running_containers(facts, cluster.name)
    listener = facts.extra.get("listeners", {}).get(str(port))
    if listener is None:  # unknown listener (no ss, no root): take it for our container
        return bool(ours)
    return any(container.id == listener["container"] for container in ours)


def _may_be_ours(facts: Facts, port: int) -> bool:
    """Return whether a container listens and Docker does not answer, so that nobody knows whose it is."""
    listener = facts.extra.get("listeners", {}).get(str(port))
    return bool(facts.docker.client) and not facts.docker.server and bool(listener and listener["container"])


def _owner(facts: Facts, port: int) -> str:
    listener = facts.extra.get("listeners", {}).get(str(port))
    if listener is None:
        return "another process"
    process = f"{listener['process']} (pid {listener['pid']})"
    inside = next((found for found in facts.docker.containers if found.id == listener["container"]), None)
    if inside is None:
        return process
    other = inside.labels.get(LABEL_CLUSTER)
    return f"{process} in container {inside.name}" + (f" of cluster {other}" if other else "")


def _address(facts: Facts, cluster: Cluster, host: Host) -> _Verdicts:
    if len(cluster.hosts) == 1:
        return
    route = host.private_address or facts.route_to_head
    if _is_loopback(route) and not _is_loopback(facts.ssh_address):
        route = facts.ssh_address or route  # as node_address chooses
    if _is_loopback(route):
        message = f"the way to the head node leaves from {route}, where no other host can answer"
        fix = f"Give {cluster.head_host.name} a private_address in the inventory that all hosts reach it at."
        yield Level.WARN, message, fix
    public = sorted(
        (address, interface)
        for interface, addresses in facts.addresses.items()
        for address in addresses
        if _is_public(address)
    )
    if public:
        address, interface = public[0]
        message = f"{address} on {interface or 'an interface'} is a public address"
        fix = "Ray runs what it is sent: close its ports to the outside with a firewall, and use private addresses."
        yield Level.WARN, message, fix
    elif not _is_loopback(route):
        yield Level.OK, f"reaches the head node from {route}" if route else "no public address", ""


def _is_loopback(text: str) -> bool:
    return text.startswith("127.") or text == "::1"


def _is_public(text: str) -> bool:
    try:
        return ipaddress.ip_address(text.partition("%")[0]).is_global
    except ValueError:
        return False
