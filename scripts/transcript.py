"""Write docs/cluster-transcript.md: what a newcomer types, and what the terminal shows, on three real hosts.

    python scripts/transcript.py docs/cluster-transcript.md

It wants root and ten minutes. The hosts are those of the cluster tests (tests/cluster/testbed.py), bare when it begins;
CLUSTERKIT_TESTBED_SYSTEM names what they run. A fourth one is their mirror of the public registry.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

from record_terminal import frames

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests/cluster"), str(ROOT / "tests")]

from testbed import Node, Testbed  # noqa: E402 (the test-bed is no package)
from testbed_registry import base_mirror  # noqa: E402

COLUMNS, ROWS = 120, 300
LONGEST_S = 1800
HOSTS = 3


@dataclass
class Operator:
    """Somebody with a home of their own, and keys and names of hosts in its .ssh."""

    home: Path
    name: str = "you"

    def prepare(self, testbed: Testbed, hosts: list[Node]) -> None:
        """Give them an SSH key that opens the hosts, and the hosts' names."""
        ssh = self.home / ".ssh"
        ssh.mkdir(mode=0o700)
        (ssh / "id_ed25519").write_bytes(testbed.key.read_bytes())
        (ssh / "id_ed25519").chmod(0o600)
        lines = [f"Host {node.name}\n  HostName {node.address}\n  User root\n" for node in hosts]
        (ssh / "config").write_text("".join(lines))

    def type(self, command: str) -> tuple[list[str], float]:
        """Run a command in a terminal; what it shows at the end, and how many seconds that took."""
        kept = (
            "PATH",
            "LANG",
            "LC_ALL",
            "SSL_CERT_FILE",
            "PIP_CERT",
            "http_proxy",
            "https_proxy",
            "no_proxy",
            "PYTHONPATH",
        )
        environment = {name: os.environ[name] for name in kept if name in os.environ}
        environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "LANG": "C.UTF-8"}
        environment |= {"HOME": str(self.home), "USER": self.name, "LOGNAME": self.name}
        environment |= {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
        words = ["env", "-i", "-C", str(self.home), *(f"{key}={value}" for key, value in environment.items())]
        *_, last = frames([*words, "sh", "-c", command], COLUMNS, ROWS, LONGEST_S)
        lines = ["".join(piece for piece, _, _ in line).rstrip() for line in last.lines]
        while lines and not lines[-1]:
            lines.pop()
        return [line.replace(str(self.home), f"/home/{self.name}") for line in lines], last.seconds


def commands(testbed: Testbed) -> list[tuple[str, str]]:
    """Each command with the sentence that stands before it."""
    # Docker's own repository may be out of reach here, and what else the site needs is told as a user would.
    site = " ".join(["--docker-source distribution", *_pairs(testbed.site.options())])
    return [
        ("Three bare hosts become a cluster. The second line says where packages come from here.",
         f"clusterkit setup --hostnames node[1-{HOSTS}] \\\n    {site}"),
        ("The command that `setup` printed last: no host has a GPU, so it is the tiny preset.",
         "clusterkit train --preset tiny --cluster default"),
        ("How it is, or was, doing:", "clusterkit status"),
        ("What it learned:", "clusterkit eval --model-path tiny-recall/run1"),
    ]  # fmt: skip


def _pairs(words: list[str]) -> list[str]:
    return [" ".join(words[i : i + 2]) for i in range(0, len(words), 2)]


def page(testbed: Testbed, told: list[tuple[str, str, list[str], float]]) -> str:
    """The page: each command under its sentence, with what it printed and the time that it took."""
    system = testbed.nodes[0].exec('. /etc/os-release && echo "$PRETTY_NAME"').stdout.strip()
    docker = testbed.nodes[0].exec("docker version --format '{{.Server.Version}}'").stdout.strip()
    about = (
        f"Written on {time.strftime('%Y-%m-%d')} by `python scripts/transcript.py docs/cluster-transcript.md`. The "
        f"three hosts have {system} (Docker {docker} after set-up), no GPU and no service manager, and share the "
        f"{os.cpu_count()} cores of one machine. They are bare, but for the address of a registry's mirror in "
        "`/etc/docker/daemon.json`; who types has their names and a key in `~/.ssh`. Each block is what a terminal of "
        f"{COLUMNS} columns shows when the command has ended."
    )
    parts = ["# The first minutes on a cluster, as printed", "", *textwrap.wrap(about, 160)]
    for sentence, command, lines, seconds in told:
        parts += ["", sentence, "", "```text", f"$ {command}", *lines, "```", "", f"({duration(seconds)})"]
    return "\n".join(parts) + "\n"


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def main() -> int:
    """Write the page; 1 where a command did not work."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    with Testbed.start(nodes=HOSTS + 1) as testbed, tempfile.TemporaryDirectory() as home:
        *hosts, mirror = testbed.nodes
        told = []
        with base_mirror(testbed, mirror) as address:
            daemon_json = json.dumps({"registry-mirrors": [address]}).encode()
            for node in hosts:
                node.exec("mkdir /etc/docker && cat >/etc/docker/daemon.json", stdin=daemon_json)
            operator = Operator(Path(home))
            operator.prepare(testbed, hosts)
            for sentence, command in commands(testbed):
                lines, seconds = operator.type(command)
                print(f"$ {command}", *lines, f"({duration(seconds)})", sep="\n", flush=True)
                told.append((sentence, command, lines, seconds))
        out.write_text(page(testbed, told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
