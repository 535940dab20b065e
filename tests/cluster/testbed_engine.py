"""A Docker Engine of the tests' own, beside any that the machine may run: own data, own socket, no rules in common."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LABEL = "clusterkit.testbed"
NEEDED = {"dockerd": "docker.io", "debootstrap": "debootstrap", "ssh-keygen": "openssh-client", "iptables": "iptables"}
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


class TestbedError(Exception):
    """The testbed cannot be had on this machine, or a part of it failed."""

    __test__ = False


def find(program: str) -> str | None:
    """Where a program is; the folders of system programs count, whatever PATH says."""
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin:/usr/bin:/bin")


def command(*words: str | Path, stdin: bytes = b"", timeout: float = 120.0, check: bool = True) -> str:
    """Run a program of this machine and return what it wrote to stdout.

    Raises:
        TestbedError: it failed (and `check` is on) or ran past `timeout` seconds.
    """
    text = [str(word) for word in words]
    try:
        done = subprocess.run(text, input=stdin, capture_output=True, timeout=timeout, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TestbedError(f"{' '.join(text)[:300]}: {error}") from error
    if check and done.returncode:
        output = (done.stderr or done.stdout).decode(errors="replace")[-2000:]
        raise TestbedError(f"{' '.join(text)[:300]}: exit code {done.returncode}\n{output}")
    return done.stdout.decode(errors="replace")


def install_missing() -> None:
    """Install what the testbed is made of, with apt.

    Raises:
        TestbedError: not root, no apt, or the installation failed.
    """
    if os.geteuid() != 0:
        raise TestbedError("the cluster tests start a Docker Engine of their own: run them as root")
    packages = [package for program, package in NEEDED.items() if find(program) is None]
    packages += [] if KEYRING.exists() else ["debian-archive-keyring"]
    if not packages:
        return
    if find("apt-get") is None:
        raise TestbedError(f"install {', '.join(packages)}: the cluster tests need them")
    # A policy of 101 keeps the package from starting an engine of its own where there was none.
    policy = Path("/usr/sbin/policy-rc.d")
    ours = not policy.exists()
    if ours:
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
    apt = ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-q", "-o", "DPkg::Lock::Timeout=120"]
    try:
        command(*apt, "update", timeout=300)
        command(*apt, "install", "-y", "--no-install-recommends", *packages, timeout=600)
    finally:
        if ours:
            policy.unlink(missing_ok=True)


def cache_folder() -> Path:
    """Where images are kept from one test run to the next."""
    chosen = os.environ.get("CLUSTERKIT_TEST_CACHE")
    folder = Path(chosen) if chosen else Path.home() / ".cache" / "clusterkit-tests"
    folder.mkdir(parents=True, exist_ok=True)
    return folder.resolve()


class Engine:
    """`dockerd` with its data in `folder`. One process may use the folder at a time; others wait for their turn."""

    def __init__(self, folder: Path, wait: float = 900.0) -> None:
        self.folder = folder
        # A Unix socket's path holds 107 bytes, and the cache may be anywhere.
        self.state = Path("/run") / f"clusterkit-testbed-{hashlib.sha256(str(folder).encode()).hexdigest()[:10]}"
        self.socket = self.state / "docker.sock"
        self.log = self.folder / "dockerd.log"
        self._wait = wait
        self._lock: int | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process ID of our engine."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Take the folder, end what an earlier run left behind, start the engine and wait until it answers."""
        self._take_turn()
        try:
            self._end_leftover()
            self.state.mkdir(mode=0o700, exist_ok=True)
            self._launch()
            self.remove_all()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Remove containers, networks and volumes, end the engine; images stay for the next run."""
        try:
            if self._process is not None and self._process.poll() is None:
                with contextlib.suppress(TestbedError):
                    self.remove_all()
                self._process.terminate()
                try:
                    self._process.wait(60)
                except subprocess.TimeoutExpired:
                    self._process.kill()
                    self._process.wait(10)
        finally:
            self._process = None
            self._remove_state()
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

    def docker(self, *words: str | Path, stdin: bytes = b"", timeout: float = 120.0, check: bool = True) -> str:
        """Run `docker` against this engine and return its stdout."""
        return command(*self.argv(*words), stdin=stdin, timeout=timeout, check=check)

    def argv(self, *words: str | Path) -> list[str]:
        """The `docker` command line for this engine."""
        return [find("docker") or "docker", "-H", f"unix://{self.socket}", *(str(word) for word in words)]

    def inspect(self, kind: str, name: str) -> dict[str, Any] | None:
        """`docker KIND inspect NAME`; None where there is no such thing."""
        text = self.docker(kind, "inspect", name, check=False)
        found = json.loads(text or "[]")
        return dict(found[0]) if found else None

    def remove_all(self) -> None:
        """Remove every container, network and volume that carries the testbed's label."""
        mine = f"label={LABEL}"
        if containers := self.docker("ps", "-aq", "--filter", mine).split():
            self.docker("rm", "-f", "-v", *containers, timeout=180)
        if networks := self.docker("network", "ls", "-q", "--filter", mine).split():
            self.docker("network", "rm", *networks)
        if volumes := self.docker("volume", "ls", "-q", "--filter", mine).split():
            self.docker("volume", "rm", "-f", *volumes, timeout=600)

    def _take_turn(self) -> None:
        lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + self._wait
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    os.close(lock)
                    raise TestbedError(f"{self.folder} is in use by another test run for {self._wait:.0f} s") from None
                time.sleep(0.5)
            else:
                self._lock = lock
                return

    def _end_leftover(self) -> None:
        """End the engine of a run that was killed: the one with our data folder in its command line, no other."""
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                if words[0].endswith("dockerd") and str(self.folder / "data") in words:
                    os.kill(int(entry.name), signal.SIGTERM)
                    _wait_gone(int(entry.name), 60)
        self._remove_state()

    def _remove_state(self) -> None:
        """Remove the run-time folder, with what the engine left mounted in it.

        Processes that end with the engine may write there for another moment.
        """
        deadline = time.monotonic() + 30
        while True:
            for line in Path("/proc/self/mountinfo").read_text().splitlines():
                if line.split()[4].startswith(f"{self.state}/"):
                    command("umount", "-l", line.split()[4], check=False)
            shutil.rmtree(self.state, ignore_errors=True)
            if not self.state.exists() or time.monotonic() > deadline:
                return
            time.sleep(0.2)

    def _launch(self) -> None:
        # No bridge and no rules of its own: a dockerd that manages iptables rewrites the chains of every other one.
        words = [find("dockerd") or "dockerd", "--data-root", str(self.folder / "data")]
        words += ["--exec-root", str(self.state / "exec"), "--pidfile", str(self.state / "docker.pid")]
        words += ["-H", f"unix://{self.socket}", "--config-file", str(self.state / "daemon.json")]
        words += ["--bridge", "none", "--iptables=false", "--ip-masq=false", "--storage-driver", "overlay2"]
        # Where the machine has a containerd for its own Docker, ours must not look into the same drawer.
        words += [
            "--containerd-namespace",
            "clusterkit-testbed",
            "--containerd-plugins-namespace",
            "clusterkit-plugins",
        ]
        (self.state / "daemon.json").write_text("{}\n")
        # A test run that is killed outright takes its engine with it.
        words = [find("setpriv") or "setpriv", "--pdeathsig", "TERM", *words]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + 60
        while not self.docker("version", "--format", "{{.Server.Version}}", check=False).strip():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise TestbedError(f"dockerd does not come up:\n{self.log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.1)


def process_runs(pid: int) -> bool:
    """Whether there is such a process that has not ended; whoever inherited it may be slow to take note of its end."""
    try:
        # "PID (name) state parent …", and the name may hold anything.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (OSError, IndexError):
        return False


def _wait_gone(pid: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while process_runs(pid):
        if (late := time.monotonic() - deadline) > 0:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if late > 30:
            raise TestbedError(f"process {pid} does not end, not even by SIGKILL")
        time.sleep(0.1)


@contextlib.contextmanager
def engine(folder: Path) -> Iterator[Engine]:
    """A running engine, ended whatever happens."""
    it = Engine(folder)
    it.start()
    try:
        yield it
    finally:
        it.stop()
