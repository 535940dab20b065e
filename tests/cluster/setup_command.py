"""The person who runs `clusterkit` against the testbed: the real command, with a home and configuration of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from testbed import Node, Testbed

from clusterkit.provision.images.identity import Image

SUDO_PASSWORD = "CLUSTERKIT_SUDO_PASSWORD"


@dataclass(frozen=True)
class Done:
    """A command that has ended. seconds: wall time."""

    words: tuple[str, ...]
    exit_code: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def text(self) -> str:
        """All that it printed."""
        return self.stdout + self.stderr

    @cached_property
    def report(self) -> dict[str, Any]:
        """What it printed with --json."""
        assert self.stdout.startswith("{"), self.text[-4000:]
        return dict(json.loads(self.stdout))

    @property
    def changes(self) -> int:
        """How much `setup` changed, on all hosts."""
        return int(self.report["changes"])

    @property
    def failed(self) -> list[str]:
        """Names of the hosts on which `setup` failed."""
        return list(self.report["failed"])

    def row(self, node: Node | str) -> dict[str, Any]:
        """What `setup` reports of one host: steps, seconds, changes, failure, log."""
        name = node if isinstance(node, str) else node.address
        (row,) = [row for row in self.report["hosts"] if row["host"] == name]
        return dict(row)

    def failure(self, node: Node | str) -> dict[str, Any]:
        """How a host failed: step, message, command, last_lines, fix."""
        found = self.row(node)["failure"]
        assert found is not None, self.report
        return dict(found)


class Operator:
    """Runs `clusterkit`; what it keeps lies in `folder`: `folder/config`, `folder/state`.

    image: what `setup` is told to run. username, key, sudo_password: how it logs in and becomes root.
    """

    def __init__(
        self, testbed: Testbed, folder: Path, image: Image, *, username: str = "root", sudo_password: str = ""
    ) -> None:
        self.testbed, self.folder, self.image = testbed, folder, image
        self.username, self.key = username, testbed.key
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("CLUSTERKIT_")},
            "CLUSTERKIT_CONFIG": str(folder / "config"),
            "CLUSTERKIT_STATE": str(folder / "state"),
            "HOME": str(folder),
        }
        self.environment.pop("SSH_AUTH_SOCK", None)
        if sudo_password:
            self.environment[SUDO_PASSWORD] = sudo_password
        self._earlier: set[Path] = set()

    def __call__(
        self,
        *words: str,
        timeout: float = 600.0,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> Done:
        """Run `clusterkit WORDS` to its end."""
        began = time.monotonic()
        done = subprocess.run(
            self.command(*words),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            env={**self.environment, **(environment or {})},
            cwd=cwd,
            check=False,
        )
        return Done(words, done.returncode, done.stdout, done.stderr, time.monotonic() - began)

    def start(self, *words: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Begin `clusterkit WORDS`; end it with `finish`, or kill it."""
        self._earlier = set(self._logs("*", "*"))
        return subprocess.Popen(
            self.command(*words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**self.environment, **(environment or {})},
            start_new_session=True,
        )

    @staticmethod
    def finish(running: subprocess.Popen[str], timeout: float = 600.0) -> Done:
        """Wait for what `start` began."""
        began = time.monotonic()
        stdout, stderr = running.communicate(timeout=timeout)
        assert isinstance(running.args, list)
        words = tuple(str(word) for word in running.args[3:])
        return Done(words, running.returncode, stdout, stderr, time.monotonic() - began)

    @staticmethod
    def command(*words: str) -> list[str]:
        """The command line."""
        return [sys.executable, "-m", "clusterkit.cli.main", *words]

    def login(self, hosts: Iterable[Node | str] | None = None) -> list[str]:
        """Options that name hosts (the testbed's) and how to log in to them."""
        chosen = self.testbed.nodes if hosts is None else hosts
        names = [host if isinstance(host, str) else host.address for host in chosen]
        return ["--hostnames", *names, "--private-key-file", str(self.key), "--username", self.username]

    def wishes(self) -> list[str]:
        """Options of `setup` for what it is to install, and from where."""
        # Docker's own repository may be out of reach where tests run.
        return ["--image", self.image.reference, "--docker-source", "distribution", *self.testbed.site.options()]

    def setup_words(self, *more: str, hosts: Iterable[Node | str] | None = None) -> list[str]:
        """All words of `setup --json`. Of an option that is given twice, the later one (in `more`) counts."""
        return ["setup", *self.login(hosts), *self.wishes(), "--json", *more]

    def setup(
        self,
        *more: str,
        hosts: Iterable[Node | str] | None = None,
        timeout: float = 600.0,
        environment: Mapping[str, str] | None = None,
    ) -> Done:
        """Run `setup --json` to its end, whatever that is."""
        return self(*self.setup_words(*more, hosts=hosts), timeout=timeout, environment=environment)

    def check(
        self, *more: str, hosts: Iterable[Node | str] | None = None, environment: Mapping[str, str] | None = None
    ) -> Done:
        """Run `check --json` to its end."""
        return self("check", *self.login(hosts), "--json", *more, environment=environment)

    def log(self, node: Node | str, *, cluster: str = "*") -> str:
        """What the newest run has logged of a host; empty where there is no log."""
        logs = self._logs(node if isinstance(node, str) else node.address, cluster)
        return logs[-1].read_text(errors="replace") if logs else ""

    def new_log(self, node: Node) -> str:
        """What the command that the last `start` began has logged of a host so far."""
        new = [path for path in self._logs(node.address, "*") if path not in self._earlier]
        return new[-1].read_text(errors="replace") if new else ""

    def await_log(self, node: Node, text: str, running: subprocess.Popen[str], seconds: float = 180.0) -> None:
        """Wait until what `running`, begun by the last `start`, has logged of a host holds `text`.

        Raises:
            AssertionError: the command ended, or time is over, before that.
        """
        deadline = time.monotonic() + seconds
        while True:
            log = self.new_log(node)
            if text in log:
                return
            assert running.poll() is None, f"it ended before {text!r}: {running.communicate()}"
            assert time.monotonic() < deadline, f"no {text!r} within {seconds:.0f} s:\n{log[-2000:]}"
            time.sleep(0.05)

    def _logs(self, name: str, cluster: str) -> list[Path]:
        found = (self.folder / "state").glob(f"{cluster}/logs/*/{name}.log")
        return sorted(found, key=lambda path: path.stat().st_mtime_ns)

    def kept(self) -> str:
        """All that lies in its folder, secrets' own files left out."""
        files = [path for path in self.folder.rglob("*") if path.is_file() and path.name != "ray_token"]
        return "\n".join(path.read_text(errors="replace") for path in files)


def assert_ready(done: Done, nodes: list[Node]) -> None:
    assert done.stdout.startswith("{"), done.text[-4000:]
    assert done.exit_code == 0, [done.row(name)["failure"] for name in done.failed]
    ray = done.report["ray"]
    assert ray["ready"] is True
    assert sorted(node["name"] for node in ray["nodes"]) == sorted(node.address for node in nodes)
    assert len({(node["ray"], node["python"], node["image_id"]) for node in ray["nodes"]}) == 1


def files_of(testbed: Testbed, node: Node) -> set[str]:
    """Every path of the node's disk that is not as in its image, as its engine sees it, and all of the storage."""
    changed = testbed.engine.docker("diff", node.container).splitlines()
    # Logging in leaves its own traces, whatever is done then.
    quiet = (line for line in changed if not re.search(r"^. (/var/log|/var/log/\w+|/tmp|/root|/run)(/.*)?$", line))
    shared = {f"storage {path.relative_to(testbed.storage)}" for path in testbed.storage.rglob("*")}
    return {*quiet, *shared}
