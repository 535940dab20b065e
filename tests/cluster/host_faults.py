"""Faults of hosts for the length of a block, and what is looked at on hosts and in what `setup` and `check` print."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from setup_command import Done
from testbed import Node


@contextlib.contextmanager
def repaired(node: Node, spoil: str, repair: str) -> Iterator[None]:
    """A fault for the time of a block: shell scripts that bring it and take it away."""
    node.exec(spoil)
    try:
        yield
    finally:
        node.exec(repair)


@contextlib.contextmanager
def stand_in(node: Node, program: str, script: str) -> Iterator[None]:
    """A program that is found before the real one of that name."""
    path = f"/usr/local/bin/{program}"
    node.exec(f"cat >{path} && chmod 755 {path}", stdin=f"#!/bin/sh\n{script}\n".encode())
    try:
        yield
    finally:
        node.exec(f"rm {path}")


@contextlib.contextmanager
def other_processor(node: Node) -> Iterator[None]:
    """Whoever asks, by the program or by the file that newer kernels have, is told of another processor."""
    arch = "/proc/sys/kernel/arch"
    over = f"[ ! -e {arch} ] || {{ echo aarch64 >/tmp/arch && mount --bind /tmp/arch {arch}; }}"
    asked = 'if [ "$1" = -m ]; then echo aarch64; else exec /bin/uname "$@"; fi'
    with stand_in(node, "uname", asked), repaired(node, over, f"[ ! -e {arch} ] || umount {arch}"):
        yield


@contextlib.contextmanager
def package_lock_held(node: Node) -> Iterator[object]:
    """Another apt, in the middle of an installation, until the yielded function is called."""
    until = "touch /tmp/in-the-middle; while ! [ -e /tmp/go-on ]; do sleep 0.1; done"
    words = f"apt-get install -y -q --no-install-recommends -o DPkg::Pre-Invoke::={shlex.quote(until)} jq"
    node.exec(f"rm -f /tmp/go-on; setsid {words} >/tmp/other-apt.log 2>&1 </dev/null &")
    node.exec("timeout 60 sh -c 'until [ -e /tmp/in-the-middle ]; do sleep 0.1; done'", timeout=70)
    try:
        yield lambda: node.exec("touch /tmp/go-on")
    finally:
        node.exec("touch /tmp/go-on", check=False)


@contextlib.contextmanager
def bad_link(*nodes: Node, round_trip_ms: float = 300.0, loss: float = 0.15) -> Iterator[None]:
    """Each packet to or from these hosts takes half of the round trip, and of what they send a part is lost."""
    shaper, half, running = Path(__file__).with_name("badlink.py"), round_trip_ms / 2, []
    try:
        for seed, node in enumerate(nodes):
            for queue, chain, device, part in ((1, "OUTPUT", "-o", loss), (2, "INPUT", "-i", 0.0)):
                words = [*node.in_network(), sys.executable, str(shaper), *map(str, (queue, half, part, seed))]
                running.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True))
                stdout = running[-1].stdout
                assert stdout is not None
                assert stdout.readline() == "ready\n"
                node.network_command(
                    *("iptables", "-w", "30", "-A", chain, device, "eth0", "-j", "NFQUEUE", "--queue-num", str(queue))
                )
        yield
    finally:
        for node in nodes:
            for chain in ("OUTPUT", "INPUT"):
                node.network_command("iptables", "-w", "30", "-F", chain)
        for process in running:
            process.kill()
            process.communicate()


@contextlib.contextmanager
def untouched(*nodes: Node) -> Iterator[None]:
    """No file of the nodes is written by the block, but for what logging in leaves behind by itself."""
    for node in nodes:
        node.exec("touch /tmp/before")
    yield
    for node in nodes:
        new = node.exec("find / -xdev -newer /tmp/before ! -type d").stdout.split()
        logins = ("/var/log/lastlog", "/var/log/wtmp", "/var/log/btmp", "/var/log/faillog", "/var/lib/sudo/")
        logins += ("/home/admin/.sudo_as_admin_successful",)
        assert [path for path in new if not path.startswith(logins)] == []
        assert node.exec("ls -A /storage").stdout == ""


def users_files(node: Node) -> str:
    """Checksums of files that are the user's: package sources, Docker's settings, keys, home folders."""
    folders = (
        "/etc/apt/sources.list* /etc/docker /etc/environment /etc/fstab /etc/hosts /etc/ssh /etc/sudoers* /home /root"
    )
    found = node.exec(f"find {folders} -type f ! -name 'clusterkit-*' -exec sha256sum {{}} + | sort -k 2").stdout
    assert "/etc/docker/daemon.json" in found
    assert "/root/.ssh/authorized_keys" in found
    return found


@contextlib.contextmanager
def unmet(*nodes: Node) -> Iterator[None]:
    """Nobody connects to the SSH servers of the nodes."""

    def said(node: Node) -> str:
        words = node.testbed.engine.argv("logs", node.container)
        return subprocess.run(words, capture_output=True, text=True, timeout=300, check=True).stderr

    before = [said(node) for node in nodes]
    yield
    assert [said(node) for node in nodes] == before


def own_authority(folder: Path) -> bytes:
    """A certificate of nobody's."""
    words = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=test"
    subprocess.run([*words.split(), "-keyout", "key.pem", "-out", "own.pem"], cwd=folder, check=True, timeout=300)
    return (folder / "own.pem").read_bytes()


def assert_through(done: Done, *nodes: Node) -> None:
    """These hosts went all the way to Ray."""
    for node in nodes:
        row = done.row(node)
        assert row["failure"] is None, row
        assert row["steps"]["ray"] in {"ok", "changed"}, row


def assert_fault(done: Done, node: Node, step: str, *said: str, fix: str) -> None:
    """The report tells where the host failed, what happened, and what to do; so do the lines for people."""
    failure = done.failure(node)
    assert failure["step"] == step, failure
    told = "\n".join([failure["message"], *failure["last_lines"]])
    for words in said:
        assert words in told, failure
    assert fix in failure["fix"], failure
    assert f"{node.address}  {step}: FAILED" in done.stderr


def verdict(done: Done, host: Node | str) -> str:
    """What `check` thinks of a host."""
    return str(done.report["hosts"][host if isinstance(host, str) else host.address]["verdict"])


def finding(done: Done, host: Node | str, check: str) -> str:
    """What `check` found there, and what to do about it."""
    findings = done.report["hosts"][host if isinstance(host, str) else host.address]["findings"]
    told = [f"{found['message']}\n{found['fix']}" for found in findings if found["check"] == check]
    assert told, findings
    return "\n".join(told)
