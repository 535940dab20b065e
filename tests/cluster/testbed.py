"""A real cluster on one machine: nodes with their own sshd, Docker Engine and disk, a shared /storage, one network.

    with Testbed.start(nodes=3) as testbed:
        testbed.nodes[0].exec("id -u").stdout      # as root, past SSH
        ssh -i {testbed.key} root@{node.address}   # as clusterkit does it

A node is a container of an engine that the testbed starts and ends itself. It has no Docker yet, no systemd, and the
accounts root (key only), admin (sudo asks for `PASSWORD`), deploy (sudo asks nothing) and guest (no sudo). It runs
Debian 12, or what CLUSTERKIT_TESTBED_SYSTEM names (testbed_systems.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import ipaddress
import json
import shutil
import socket
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from testbed_engine import LABEL, Engine, TestbedError, cache_folder, command, find, install_missing
from testbed_images import PASSWORD, Site, base_archive, base_image, node_image, systemd_image
from testbed_systems import DEBIAN, System, chosen

__all__ = ["PASSWORD", "Node", "Testbed", "TestbedError"]

# What an inner Docker Engine needs. Not --privileged: a machine without CAP_SYS_RESOURCE cannot grant it.
CAPABILITIES = "SYS_ADMIN NET_ADMIN NET_RAW SYS_PTRACE SYS_CHROOT MKNOD IPC_LOCK DAC_READ_SEARCH SYS_NICE SYSLOG"
DISKS = ("/var/lib/docker", "/var/lib/containerd")  # where Docker keeps images; since 29 in the second
HOMES = {"root": 0, "home/admin": 1000, "home/deploy": 1001, "home/guest": 1002}  # and the user ID of their owner


@dataclass
class Node:
    """One host: `name` is also its host name, `address` is where its sshd listens on `ssh_port`."""

    name: str
    address: str
    testbed: Testbed = field(repr=False)
    ssh_port: int = 22

    @property
    def container(self) -> str:
        """Its name in the testbed's engine."""
        return f"testbed-{self.name}"

    @property
    def host_key(self) -> str:
        """Its public host key: type and key."""
        return " ".join(self._host_key_file.with_suffix(".pub").read_text().split()[:2])

    def exec(
        self, script: str, *, stdin: bytes = b"", timeout: float = 60.0, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a shell script on the node as root, without SSH.

        Raises:
            TestbedError: it failed and `check` is on.
        """
        words = self.testbed.engine.argv("exec", "-i", self.container, "sh", "-c", script)
        done = subprocess.run(words, input=stdin, capture_output=True, timeout=timeout, check=False)
        out, err = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
        if check and done.returncode:
            raise TestbedError(f"{self.name}: {script[:200]}: exit code {done.returncode}\n{(err or out)[-2000:]}")
        return subprocess.CompletedProcess(script, done.returncode, out, err)

    def kill(self) -> None:
        """The power fails: every process of the node ends at once. `start` brings it back with its disk."""
        self.testbed.engine.docker("kill", self.container)

    def start(self) -> None:
        """Power on after `kill`, or go on after `freeze`; returns when sshd answers."""
        state = self.testbed.engine.inspect("container", self.container)
        paused = state is not None and state["State"]["Paused"]
        self.testbed.engine.docker("unpause" if paused else "start", self.container)
        self._await_sshd()

    def freeze(self) -> None:
        """Every process stops: TCP connections are still accepted (by the kernel), and nobody answers."""
        self.testbed.engine.docker("pause", self.container)

    def network_command(self, *words: str | Path, timeout: float = 60.0) -> str:
        """Run a program of this machine in the node's network."""
        return command(*self.in_network(), *words, timeout=timeout)

    def in_network(self) -> list[str]:
        """Words before a command of this machine that run it in the node's network."""
        state = self.testbed.engine.inspect("container", self.container)
        if state is None or not state["State"]["Running"]:
            raise TestbedError(f"{self.name} does not run")
        return [find("nsenter") or "nsenter", "--target", str(state["State"]["Pid"]), "--net"]

    def reset(
        self,
        *,
        storage: str = "shared",
        docker_disk: str = "",
        new_host_key: bool = False,
        systemd: bool = False,
        fuse: bool = False,
        system: System | None = None,
    ) -> None:
        """Make it a bare host again: nothing installed, nothing on its disks (the shared storage is left alone).

        storage: what /storage is: "shared", "own" (a folder that only this node has), "read-only", or "none".
        docker_disk: size of the disks under DISKS ("300m"), to see them run full; empty: the machine's.
        new_host_key: as after a new installation; without it the node keeps its key.
        systemd: its PID 1 is systemd, which starts sshd and, once installed, Docker; else there is no service manager.
        fuse: it may mount file systems of user space; named with storage="none".
        system: what it runs, where that is not what the testbed's nodes run.
        """
        engine = self.testbed.engine
        self.remove()
        if new_host_key or not self._host_key_file.exists():
            _new_key(self._host_key_file)
        words = ["create", "--name", self.container, "--hostname", self.name, "--label", f"{LABEL}=1"]
        words += ["--tmpfs", "/run/lock", "--env", "container=docker"] if systemd else ["--init"]
        words += ["--device", "/dev/fuse"] if fuse else []
        words += ["--network", self.testbed.network, "--ip", self.address, "--shm-size", "1g"]
        words += ["--security-opt", "seccomp=unconfined", "--security-opt", "apparmor=unconfined"]
        words += ["--cgroupns", "host", "-v", "/sys/fs/cgroup:/sys/fs/cgroup:rw", "--tmpfs", "/run:mode=755,exec"]
        words += [word for name in CAPABILITIES.split() for word in ("--cap-add", name)]
        if docker_disk:
            words += [word for disk in DISKS for word in ("--tmpfs", f"{disk}:size={docker_disk},exec")]
        else:
            # On the container's own layer, an overlay, the engine inside could not stack its own.
            words += [word for disk in DISKS for word in ("-v", disk)]
        if storage == "own":
            own = self.testbed.folder / f"storage-{self.name}"
            own.mkdir(exist_ok=True)
            words += ["-v", f"{own}:/storage"]
        elif storage != "none":
            words += ["-v", f"{self.testbed.storage}:/storage" + (":ro" if storage == "read-only" else "")]
        engine.docker(*words, self.testbed.node_image(system or self.testbed.system, systemd=systemd))
        engine.docker("cp", "-", f"{self.container}:/", stdin=self._identity())
        engine.docker("start", self.container)
        self._await_sshd()

    def remove(self) -> None:
        """Take the node and its disks away."""
        self.testbed.engine.docker("rm", "-f", "-v", self.container, timeout=600, check=False)

    @property
    def _host_key_file(self) -> Path:
        return self.testbed.folder / f"host-key-{self.name}"

    def _identity(self) -> bytes:
        """A tar of what makes this node itself: host key, machine ID, who may log in."""
        authorized = self.testbed.key.with_suffix(".pub").read_bytes()
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            _add(tar, "etc/machine-id", hashlib.sha256(self.name.encode()).hexdigest()[:32].encode() + b"\n", 0o444)
            _add(tar, "etc/ssh/ssh_host_ed25519_key", self._host_key_file.read_bytes(), 0o600)
            _add(tar, "etc/ssh/ssh_host_ed25519_key.pub", self._host_key_file.with_suffix(".pub").read_bytes(), 0o644)
            for home, uid in HOMES.items():
                _add(tar, f"{home}/.ssh", None, 0o700, uid)
                _add(tar, f"{home}/.ssh/authorized_keys", authorized, 0o600, uid)
        return buffer.getvalue()

    def _await_sshd(self, seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(OSError), socket.create_connection((self.address, self.ssh_port), 1.0) as peer:
                peer.settimeout(2.0)
                if peer.recv(4) == b"SSH-":
                    return
            if time.monotonic() > deadline:
                log = self.testbed.engine.docker("logs", "--tail", "20", self.container, check=False)
                raise TestbedError(f"{self.name}: sshd does not answer at {self.address}:{self.ssh_port}\n{log}")
            time.sleep(0.05)


class Testbed:
    """Nodes, the engine that holds them, the key that opens them and the folder that they share."""

    __test__ = False

    def __init__(self, engine: Engine, cache: Path) -> None:
        self.engine, self.cache, self.site, self.system = engine, cache, Site.here(), chosen()
        self.folder = cache / "run"
        self.storage = self.folder / "storage"
        self.key = self.folder / "id_ed25519"
        self.base_archive = base_archive(cache, self.site, DEBIAN)
        """A tar of a minimal Debian, for `docker import`: the base of images where no registry is at hand."""
        self.network = "testbed"
        self.nodes: list[Node] = []

    @classmethod
    @contextlib.contextmanager
    def start(cls, nodes: int = 3) -> Iterator[Testbed]:
        """A running testbed with bare nodes node1, node2, …; taken down whatever happens.

        Raises:
            TestbedError: this machine cannot have one.
        """
        install_missing()
        cache = cache_folder()
        engine = Engine(cache)
        engine.start()
        try:
            _remove_rules(engine.state.name)
            _clear(cache / "run")
            testbed = cls(engine, cache)
            testbed._raise(nodes)
            yield testbed
        finally:
            engine.stop()
            _remove_rules(engine.state.name)
            _clear(cache / "run")

    def reset(self) -> None:
        """All nodes bare, the shared storage empty."""
        self.each(Node.remove)
        _clear(self.storage)
        self.storage.mkdir(mode=0o777)
        self.each(Node.reset)

    def each(self, what: Callable[[Node], object], nodes: Iterable[Node] | None = None) -> None:
        """Do something with all nodes at once; the first failure is raised when all are done."""
        chosen = list(self.nodes if nodes is None else nodes)
        with ThreadPoolExecutor(max(1, len(chosen))) as pool:
            for outcome in [pool.submit(what, node) for node in chosen]:
                outcome.result()

    def node_image(self, system: System, *, systemd: bool) -> str:
        """The image of bare nodes, with systemd as their PID 1 or without; built where it is first asked for."""
        base = base_image(self.engine, base_archive(self.cache, self.site, system))
        image = node_image(self.engine, base, self.site, system)
        return systemd_image(self.engine, image, self.site) if systemd else image

    def known_hosts(self) -> str:
        """Lines of a known_hosts file that has every node."""
        return "".join(f"{node.address} {node.host_key}\n" for node in self.nodes)

    def _raise(self, nodes: int) -> None:
        self.storage.mkdir(parents=True)
        self.storage.chmod(0o777)
        _new_key(self.key)
        self.node_image(self.system, systemd=False)
        subnet = _free_subnet()
        words = ["network", "create", "--label", f"{LABEL}=1", "--subnet", str(subnet)]
        self.engine.docker(*words, "--gateway", str(subnet[1]), self.network)
        _add_rules(subnet, self.engine.state.name)
        self.nodes = [Node(f"node{n}", str(subnet[10 + n]), self) for n in range(1, nodes + 1)]
        self.each(Node.reset)


def _add(tar: tarfile.TarFile, name: str, content: bytes | None, mode: int, uid: int = 0) -> None:
    entry = tarfile.TarInfo(name)
    entry.mode, entry.uid, entry.gid = mode, uid, uid
    entry.type = tarfile.DIRTYPE if content is None else tarfile.REGTYPE
    entry.size = len(content or b"")
    tar.addfile(entry, io.BytesIO(content or b""))


def _new_key(path: Path) -> None:
    path.unlink(missing_ok=True)
    command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "testbed", "-f", path)


def _clear(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _free_subnet() -> ipaddress.IPv4Network:
    routes = [route.get("dst", "") for route in json.loads(command("ip", "-json", "-4", "route") or "[]")]
    taken = [ipaddress.ip_network(text, strict=False) for text in routes if text and text != "default"]
    for third in range(256):
        subnet = ipaddress.ip_network(f"10.213.{third}.0/24")
        if isinstance(subnet, ipaddress.IPv4Network) and not any(subnet.overlaps(other) for other in taken):
            return subnet
    raise TestbedError("every network of 10.213.0.0/16 is in use on this machine")


def _add_rules(subnet: ipaddress.IPv4Network, name: str) -> None:
    """Let the nodes out, and nothing else changed: three rules that carry the name of this testbed."""
    mark = ["-m", "comment", "--comment", name]
    words = ["iptables", "-w", "30"]
    command(*words, "-t", "nat", "-I", "POSTROUTING", "-s", subnet, "!", "-d", subnet, *mark, "-j", "MASQUERADE")
    command(*words, "-I", "FORWARD", "-s", subnet, *mark, "-j", "ACCEPT")
    command(*words, "-I", "FORWARD", "-d", subnet, *mark, "-j", "ACCEPT")


def _remove_rules(name: str) -> None:
    for table in ("nat", "filter"):
        for rule in command("iptables", "-w", "30", "-t", table, "-S", check=False).splitlines():
            if f"--comment {name} " in rule.replace('"', ""):
                words = rule.replace('"', "").split()
                command("iptables", "-w", "30", "-t", table, "-D", *words[1:], check=False)
