"""Host keys: look up the known ones, and save those of new hosts.

clusterkit writes to a file of its own and only reads the user's. A host whose key has changed is refused under every
policy: a person has to remove the old key with ssh-keygen.
"""

from __future__ import annotations

import fcntl
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import asyncssh

from clusterkit.hosts.folders import write_private
from clusterkit.ssh.api import ErrorKind, HostError
from clusterkit.ssh.endpoint import Endpoint
from clusterkit.ssh.keys import fingerprint
from clusterkit.ssh.options import SshOptions


@dataclass(frozen=True)
class Known:
    """Keys of one host."""

    keys: tuple[tuple[asyncssh.SSHKey, Path], ...]  # each with its file
    authorities: tuple[asyncssh.SSHKey, ...]  # that may sign for the host
    revoked: tuple[asyncssh.SSHKey, ...]

    @property
    def trusted(self) -> list[asyncssh.SSHKey]:
        """The keys without their files."""
        return [key for key, _ in self.keys]

    def for_asyncssh(self, endpoint: Endpoint) -> tuple[list[asyncssh.SSHKey], ...]:
        """Return trusted keys, authorities and revoked keys. Where a key is pinned, no other is trusted."""
        if endpoint.host_key:
            return [], [], list(self.revoked)
        return self.trusted, list(self.authorities), list(self.revoked)


def lookup(endpoint: Endpoint, options: SshOptions) -> Known:
    """Return what the known_hosts files say about a host. Raises HostError: clusterkit's own file cannot be read."""
    try:
        options.known_hosts.open("rb").close()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise _unwritable(endpoint, options, error) from None
    keys: list[tuple[asyncssh.SSHKey, Path]] = []
    authorities: list[asyncssh.SSHKey] = []
    revoked: list[asyncssh.SSHKey] = []
    for path in (options.known_hosts, *options.trusted_known_hosts):
        # The name includes the port, as in ssh. asyncssh alone would also look for the name under port 22, and refuse
        # this host because of another one on that port.
        found = _parsed(path).match(endpoint.known_as, "", None)
        keys += [(key, path) for key in found[0]]
        authorities += found[1]
        revoked += found[2]
    return Known(tuple(keys), tuple(authorities), tuple(revoked))


def judge(endpoint: Endpoint, options: SshOptions, known: Known, key: asyncssh.SSHKey) -> HostError | None:
    """Return the error that refuses a key that is in no known_hosts file; None where it may be accepted."""
    shown = f"{fingerprint(key.public_data)} ({key.get_algorithm()})"
    if endpoint.host_key:
        if endpoint.host_key == fingerprint(key.public_data):
            return None
        return HostError(
            endpoint.name,
            ErrorKind.HOST_KEY,
            f"the host shows the key {shown}; the inventory wants {endpoint.host_key}",
            "If the host was set up anew, compare the fingerprint on its console (ssh-keygen -lf "
            "/etc/ssh/ssh_host_ed25519_key.pub) and correct host_key in the inventory. If not, somebody may be in "
            "between: do not go on.",
        )
    if known.keys:
        return _changed(endpoint, known, shown)
    if options.host_key_policy == "strict":
        return HostError(
            endpoint.name,
            ErrorKind.HOST_KEY,
            f"the host is not known; it shows the key {shown}",
            f"Compare the fingerprint on its console, then: {_scan(endpoint)} >> {_quoted(options.known_hosts)}\n"
            "or let first keys be accepted: --host-key-policy accept-new",
        )
    return None


def remember(endpoint: Endpoint, options: SshOptions, key: asyncssh.SSHKey) -> None:
    """Save the first key of a host in clusterkit's own file. Several processes may do so at once.

    Raises:
        HostError: the file cannot be written, or another process has just saved another key of this host.
    """
    path = options.known_hosts
    try:
        with _locked(path):
            known = lookup(endpoint, options)
            if any(key.public_data == other.public_data for other in known.trusted):
                return
            if known.keys:
                raise _changed(endpoint, known, f"{fingerprint(key.public_data)} ({key.get_algorithm()})")
            text = path.read_text(encoding="utf-8") if path.exists() else ""
            line = " ".join([endpoint.known_as, *key.export_public_key("openssh").decode().split()[:2]])
            write_private(path, text + ("" if not text or text.endswith("\n") else "\n") + line + "\n")
    except OSError as error:
        raise _unwritable(endpoint, options, error) from None


def _changed(endpoint: Endpoint, known: Known, shown: str) -> HostError:
    was = sorted({f"{fingerprint(key.public_data)} ({key.get_algorithm()}) in {path}" for key, path in known.keys})
    removals = dict.fromkeys(
        f"ssh-keygen -R {shlex.quote(endpoint.known_as)} -f {_quoted(path)}" for _, path in known.keys
    )
    return HostError(
        endpoint.name,
        ErrorKind.HOST_KEY,
        f"the host key has changed: it is now {shown}; known is {', '.join(was)}",
        "Either the host was set up anew, or somebody is in between. Compare the fingerprint on its console "
        "(ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub); if it is right, forget the old key:\n"
        + "\n".join(removals),
    )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _parsed(path: Path) -> asyncssh.SSHKnownHosts:
    try:
        status = path.stat()
    except OSError:
        return asyncssh.import_known_hosts("")
    return _parse(path, status.st_mtime_ns, status.st_size, status.st_ino)


@lru_cache(maxsize=64)
def _parse(path: Path, *_version: int) -> asyncssh.SSHKnownHosts:
    hosts = asyncssh.import_known_hosts("")
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return hosts
    for line in lines:
        try:
            hosts.load(line)
        except ValueError:  # as in ssh, a bad line is skipped
            continue
    return hosts


def _unwritable(endpoint: Endpoint, options: SshOptions, error: OSError) -> HostError:
    return HostError(
        endpoint.name,
        ErrorKind.HOST_KEY,
        f"{options.known_hosts} cannot be used: {error.strerror}",
        "Host keys are kept there. Make it writable for you, or set CLUSTERKIT_CONFIG to another folder, on a disk "
        "with file locks.",
    )


def _scan(endpoint: Endpoint) -> str:
    return f"ssh-keyscan -p {endpoint.port} {shlex.quote(endpoint.address)}"


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
