"""Real SSH servers on loopback: OpenSSH with keys and configuration of its own, as many as a test wants."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import pytest
from realparts import require

from clusterkit.hosts.model import Host
from clusterkit.ssh.api import HostError
from clusterkit.ssh.connection import connect
from clusterkit.ssh.options import SshOptions
from clusterkit.ssh.session import SshSession


def require_sshd() -> None:
    """Have sshd, ssh-keygen and sudo at hand: install them where that is allowed, else skip or fail."""
    wanted = {"sshd": "openssh-server", "ssh-keygen": "openssh-client", "sudo": "sudo"}
    missing = [package for command, package in wanted.items() if which(command) is None]
    if missing and os.geteuid() == 0 and which("apt-get"):
        command = ["apt-get", "install", "-y", "--no-install-recommends", *missing]
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(command, check=False, capture_output=True, timeout=300, env=environment)
        missing = [package for command, package in wanted.items() if which(command) is None]
    require(not missing, f"not installed: {', '.join(missing)}")


def which(command: str) -> str | None:
    """Path of a command; sshd is not on everybody's PATH."""
    return shutil.which(command, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


def make_key(path: Path, kind: str = "ed25519", passphrase: str = "") -> Path:
    """A new private key, its public half beside it."""
    bits = ["-b", "2048"] if kind == "rsa" else []
    command = ["ssh-keygen", "-q", "-t", kind, *bits, "-N", passphrase, "-C", path.name, "-f", str(path)]
    subprocess.run(command, check=True, timeout=300)
    return path


def fingerprint_of(key: Path) -> str:
    """SHA256:… of a key."""
    command = ["ssh-keygen", "-lf", str(key)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout.split()[1]


def wait_for_port(address: str, port: int, seconds: float = 20.0) -> None:
    """Wait until a server answers with its SSH banner."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            with socket.create_connection((address, port), timeout=5) as sock:
                if sock.recv(4):
                    return
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.02)


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Wait for a condition; whether it came true."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def free_port(address: str = "127.0.0.1") -> int:
    """A port that nobody listens on."""
    with socket.socket() as sock:
        sock.bind((address, 0))
        return int(sock.getsockname()[1])


@dataclass
class Sshd:
    """One server. Its files are in `folder`; it runs until `stop`, and `start` brings it back on the same port."""

    folder: Path
    authorized_keys: Path
    host_key: Path
    address: str = "127.0.0.1"
    port: int = 0
    settings: tuple[str, ...] = ()
    use_pam: bool = False
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self) -> Sshd:
        """Start and wait until it answers."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.port = self.port or free_port(self.address)
        config = self.folder / "sshd_config"
        lines = [
            f"ListenAddress {self.address}:{self.port}",
            f"HostKey {self.host_key}",
            f"AuthorizedKeysFile {self.authorized_keys}",
            f"PidFile {self.folder / 'pid'}",
            *self.settings,
            "StrictModes no",
            "PermitRootLogin yes",
            f"UsePAM {'yes' if self.use_pam else 'no'}",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "PrintMotd no",
            "MaxStartups 100",
            # bash takes us for a shell within a shell and leaves out ~/.bashrc, which on a developer's machine is slow.
            "SetEnv SHLVL=2",
        ]
        config.write_text("".join(f"{line}\n" for line in lines))
        Path("/run/sshd").mkdir(exist_ok=True)
        command = [which("sshd") or "sshd", "-D", "-e", "-f", str(config)]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        wait_for_port(self.address, self.port)
        return self

    def stop(self) -> None:
        """Stop listening; connections that are open stay."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def children(self) -> list[int]:
        """Process ids of its connections and of all that runs in them."""
        parents = {int(p.name): _parent(p) for p in Path("/proc").iterdir() if p.name.isdigit()}
        found = [self._process.pid] if self._process else []
        for process in found:
            found += [child for child, parent in parents.items() if parent == process]
        return found[1:]

    def kill_connections(self, how: signal.Signals = signal.SIGKILL) -> None:
        """Kill, stop or continue every process of every open connection."""
        # Servers before their commands: else one may still tell how its command has ended.
        for process in self.children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, how)

    def log(self) -> str:
        """What the server has written."""
        return (self.folder / "log").read_text(errors="replace")

    def host(self, name: str = "", **fields: object) -> Host:
        """The server as clusterkit names it."""
        values = {"name": name or f"{self.address}:{self.port}", "address": self.address, "port": self.port}
        return Host.model_validate(values | fields)

    def __enter__(self) -> Sshd:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill_connections(signal.SIGCONT)
        self.kill_connections()
        self.stop()


def _parent(process: Path) -> int:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return 0


class SshdFactory:
    """Makes servers that trust one key of the test, and ends them all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)  # sshd reads authorized_keys as the user who logs in
        self.key = make_key(folder / "client_key")
        self.authorized_keys = folder / "authorized_keys"
        self.authorized_keys.write_text(self.key.with_suffix(".pub").read_text())
        self.host_key = make_key(folder / "host_key")
        self._stack = contextlib.ExitStack()
        self._count = 0

    def __call__(
        self,
        *settings: str,
        address: str = "127.0.0.1",
        port: int = 0,
        host_key: Path | None = None,
        authorized_keys: Path | None = None,
        use_pam: bool = False,
    ) -> Sshd:
        """A running server. settings: lines of sshd_config, which go before our own."""
        self._count += 1
        server = Sshd(
            self.folder / f"sshd{self._count}",
            authorized_keys or self.authorized_keys,
            host_key or self.host_key,
            address,
            port,
            settings,
            use_pam,
        )
        return self._stack.enter_context(server)

    def trust(self, key: Path) -> None:
        """Let one more key in, on all servers."""
        public = key.with_name(key.name + ".pub")
        with self.authorized_keys.open("a") as file:
            file.write(public.read_text())

    def close(self) -> None:
        """End all servers."""
        self._stack.close()


@contextlib.contextmanager
def tarpit(address: str = "127.0.0.1", *, closes: bool = False) -> Iterator[int]:
    """A port that takes connections and never says a word (or, closes: drops them at once). Yields the port."""
    with socket.socket() as listener:
        listener.bind((address, 0))
        listener.listen(64)
        held: list[socket.socket] = []

        def serve() -> None:
            while True:
                try:
                    sock, _ = listener.accept()
                except OSError:
                    return
                if closes:
                    sock.close()
                else:
                    held.append(sock)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield int(listener.getsockname()[1])
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(timeout=10)
            for sock in held:
                sock.close()


@dataclass(frozen=True)
class Account:
    """A user of this machine made for a test."""

    name: str
    password: str


@contextlib.contextmanager
def account(*, sudo: str = "", shell: str = "/bin/sh") -> Iterator[Account]:
    """A user with a password, removed afterwards. sudo: "" none, "password", "nopasswd"."""
    require(os.geteuid() == 0, "test users can only be made by root")
    user = Account(f"ck{secrets.token_hex(4)}", secrets.token_urlsafe(9))
    rule = Path("/etc/sudoers.d") / user.name
    subprocess.run(["useradd", "-m", "-s", shell, user.name], check=True, capture_output=True, timeout=300)
    try:
        line = f"{user.name}:{user.password}\n".encode()
        subprocess.run(["chpasswd"], input=line, check=True, capture_output=True, timeout=300)
        if sudo:
            tag = "NOPASSWD: " if sudo == "nopasswd" else ""
            rule.write_text(f"{user.name} ALL=(ALL) {tag}ALL\n")
            rule.chmod(0o440)
        yield user
    finally:
        rule.unlink(missing_ok=True)
        _end_processes_of(user.name)
        subprocess.run(["userdel", "-r", user.name], check=False, capture_output=True, timeout=300)


def _end_processes_of(name: str) -> None:
    uid = pwd.getpwnam(name).pw_uid
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if process.name.isdigit() and process.stat().st_uid == uid:
                os.kill(int(process.name), signal.SIGKILL)


@contextlib.contextmanager
def ssh_agent(*keys: Path) -> Iterator[str]:
    """A running ssh-agent that holds keys; yields the path of its socket."""
    path = Path(f"/tmp/ck-agent-{secrets.token_hex(6)}")  # a socket's path must be short
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", str(path)], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 10
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        for key in keys:
            command = ["ssh-add", "-q", str(key)]
            subprocess.run(command, check=True, env=os.environ | {"SSH_AUTH_SOCK": str(path)}, timeout=300)
        yield str(path)
    finally:
        agent.kill()
        agent.wait()
        path.unlink(missing_ok=True)


T = TypeVar("T")


class Ssh:
    """A test's own world: servers, a home folder and a configuration folder that nobody else has."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "home"
        (self.home / ".ssh").mkdir(parents=True, mode=0o700)
        self.known_hosts = folder / "config" / "known_hosts"
        self.servers = SshdFactory(folder / "servers")
        self.key = self.servers.key

    def options(self, **fields: Any) -> SshOptions:
        """Options with the key that all servers let in."""
        return SshOptions(**{"private_key_files": (str(self.key),), "connect_timeout": 10.0} | fields)

    @contextlib.asynccontextmanager
    async def session(self, host: Host | Sshd, options: SshOptions | None = None) -> AsyncIterator[SshSession]:
        """A connection, closed afterwards."""
        target = host.host() if isinstance(host, Sshd) else host
        session = await connect(target, options or self.options())
        try:
            yield session
        finally:
            await session.close()

    def with_session(
        self, host: Host | Sshd, work: Callable[[SshSession], Awaitable[T]], options: SshOptions | None = None
    ) -> T:
        """Connect, do the work, close."""

        async def scenario() -> T:
            async with self.session(host, options) as session:
                return await work(session)

        return asyncio.run(scenario())

    def failure(self, host: Host | Sshd, options: SshOptions | None = None) -> HostError:
        """The error that connecting ends with."""
        with pytest.raises(HostError) as caught:
            self.with_session(host, lambda session: session.run("true"), options)
        return caught.value


def on_terminal(program: str, question: str, answers: list[str]) -> str:
    """Run Python on a terminal of its own and type an answer each time the question comes; all that is shown."""
    child, terminal = pty.fork()
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-c", program])
    shown, given = "", 0
    with contextlib.suppress(OSError):  # the other side is closed
        while piece := os.read(terminal, 4096):
            shown += piece.decode()
            if given < len(answers) and shown.count(question) > given and shown.endswith(": "):
                os.write(terminal, answers[given].encode() + b"\n")
                given += 1
    os.waitpid(child, 0)
    os.close(terminal)
    return shown
