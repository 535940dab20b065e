"""One command at a time works on a cluster: a lock on this machine, and a lease on every host that it changes.

The lock keeps two commands of one machine apart and ends with its process. The lease keeps all machines apart: it is a
small file on the host that names one process of one machine, and that process renews it. A lease expires two minutes
after its last renewal, or at once where its process ran on this machine and has ended. A host whose lease cannot be
taken is not changed, and a command that loses a lease stops (as in k0sctl, phase/lock.go).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
import secrets
import socket
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from clusterkit.common.records import json_object
from clusterkit.hosts.folders import state_folder
from clusterkit.provision.ray.model import LEASE_FILE, NODE_FOLDER, node_folder
from clusterkit.runs.directory import user_name
from clusterkit.ssh.api import ErrorKind, HostError, Session
from trainer.disk import file_failure
from trainer.errors import RunError, UserError
from trainer.files import is_full
from trainer.locks import HeldError, hold

STALE_S = 120
"""A lease that was not renewed for so long has expired."""
GIVE_UP_S = 100.0
"""After so long without a renewal a command stops: somebody else may take the lease soon."""
REFRESH_S = 30.0
_REMOTE_S = 20.0
_MACHINE_ID = Path("/etc/machine-id")
_IDENTITY = re.compile(r"[0-9a-f-]+")


class ClusterLockedError(UserError):
    """Another command works on the cluster at this moment."""


class LeaseLostError(RunError):
    """The lease on a host is no longer ours: another command has it (`taken`), or it could not be renewed."""

    def __init__(self, message: str, *, taken: bool) -> None:
        super().__init__(message)
        self.taken = taken


@dataclass(frozen=True)
class LockOwner:
    """The command that holds a cluster's lock and leases."""

    cluster: str
    command: str
    identity: str  # machine, process and a random number: no other command has the same
    who: str
    process: int
    since: str
    birth: str = ""  # boot, process namespace, process and its start, to find out later whether it runs; may be empty

    def line(self) -> str:
        """Return the lease's second line, for people."""
        return f"`clusterkit {self.command}` of {self.who} (process {self.process}), since {self.since}"

    def content(self) -> bytes:
        """Return the content of the lease."""
        return f"{self.identity}\n{self.line()}\n{self.birth}\n".encode()


def new_lock_owner(cluster: str, command: str) -> LockOwner:
    """Return the owner that this process is."""
    process, now = os.getpid(), datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    identity = f"{_machine()}-{process}-{secrets.token_hex(8)}"
    return LockOwner(cluster, command, identity, f"{user_name()}@{socket.gethostname()}", process, now, _birth(process))


@contextmanager
def local_lock(cluster: str, command: str) -> Iterator[LockOwner]:
    """Hold the cluster's lock on this machine.

    Raises:
        ClusterLockedError: another command holds it.
        UserError: the state folder cannot be written to, or its file system has no locks.
        RunError: its disk is full.
    """
    path = state_folder() / cluster / "lock"
    instead = "set CLUSTERKIT_STATE to a folder that is yours, on a disk of this machine"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = open(path, "a+b", opener=lambda name, flags: os.open(name, flags, 0o600))  # noqa: SIM115 (held below)
    except OSError as error:
        raise file_failure(error, path, instead) from None
    with file:
        owner = new_lock_owner(cluster, command)
        try:
            hold(file, json.dumps({"line": owner.line()}) + "\n")
        except HeldError as error:
            holder = (json_object(error.holder) or {}).get("line") or "another clusterkit"
            raise ClusterLockedError(
                f"cluster {cluster} is being worked on by {holder}, with the same state folder {state_folder()}.\n"
                "Wait until it is done, or end that process; the lock ends with it."
            ) from None
        except OSError as error:
            if is_full(error):
                raise file_failure(error, path, instead) from None
            raise UserError(f"{path} cannot be locked: {error.strerror}\nS{instead[1:]}.") from None
        yield owner


@dataclass
class Lease:
    """The lease on one host. `lost` is called once, by the task that renews the lease, when it is no longer ours."""

    owner: LockOwner
    lost: Callable[[LeaseLostError], None]
    refresh_s: float = REFRESH_S
    give_up_s: float = GIVE_UP_S
    _host: Session | None = field(default=None, init=False)
    _renewing: asyncio.Task[None] | None = field(default=None, init=False)
    _renewed: float = field(default=0.0, init=False)

    async def take(self, host: Session) -> None:
        """Take the lease, or keep it over another connection.

        Raises:
            ClusterLockedError: another command holds it.
            HostError: the host is lost, or the lease cannot be locked or written there.
        """
        held = await self._ask(host)
        if held is not None and _is_gone(held):
            held = await self._ask(host, instead=held.splitlines()[1])
        if held is not None:
            raise ClusterLockedError(_remotely(self.owner.cluster, host.host.name, held))
        self._host = host
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.create_task(self._renew())

    async def release(self) -> None:
        """Release the lease where it is held."""
        if self._renewing is None or self._host is None:
            return
        self._renewing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._renewing
        self._renewing = None
        with contextlib.suppress(HostError):
            await self._host.run(_release_script(self.owner), root=True, timeout=_REMOTE_S)

    async def _ask(self, host: Session, instead: str = "", *, renew: bool = False) -> str | None:
        """Take or renew the lease. Where another command holds it, return its age in seconds and its lines."""
        script, began = _take_script(self.owner, instead, renew=renew), _now()
        result = await host.run(script, root=True, stdin=self.owner.content(), timeout=_REMOTE_S)
        if result.ok and result.stdout.startswith("@held "):
            return result.stdout.removeprefix("@held ")
        if not result.ok or not result.stdout.startswith("@taken"):
            folder = node_folder(self.owner.cluster)
            raise HostError(
                host.host.name,
                ErrorKind.WRITE,
                f"the lease in {folder}, by which two commands keep out of each other's way, cannot be taken: "
                f"{result.reason}",
                f"Look at the disk of {folder} on that host: its free space, whether it is read-only, and whether it "
                "has file locks (flock of util-linux must work there).",
            )
        self._renewed = began
        return None

    async def _renew(self) -> None:
        assert self._host is not None
        name = self._host.host.name
        while True:
            await asyncio.sleep(self.refresh_s)
            # After a short failure the next round succeeds. The wait for a free channel counts, too.
            with contextlib.suppress(HostError, TimeoutError):
                async with asyncio.timeout(2 * _REMOTE_S):
                    held = await self._ask(self._host, renew=True)
                if held is not None:
                    holder = _holder(held)
                    message = f"the lease on {name} was lost: {holder} works on cluster {self.owner.cluster} by now"
                    self.lost(LeaseLostError(message, taken=True))
                    return
            if (silent := _now() - self._renewed) > self.give_up_s:
                message = f"the lease on {name} could not be renewed for {silent:.0f} s; somebody else may take it"
                self.lost(LeaseLostError(message, taken=False))
                return


@asynccontextmanager
async def remote_lease(owner: LockOwner, hosts: Iterable[Session]) -> AsyncIterator[dict[str, HostError]]:
    """Hold the leases of hosts, taken in this order, while the block runs. Cancel the block when one is lost.

    Yields:
        The hosts whose lease cannot be taken, and why: nothing may be changed there.

    Raises:
        ClusterLockedError: another command holds one.
        LeaseLostError: one was lost, and the block was cancelled.
    """
    worker, losses, leases, at_work = asyncio.current_task(), list[LeaseLostError](), list[Lease](), True
    assert worker is not None

    def lost(error: LeaseLostError) -> None:
        if at_work and not losses:
            losses.append(error)
            worker.cancel()

    refused: dict[str, HostError] = {}
    try:
        for host in hosts:
            leases.append(Lease(owner, lost))
            try:
                await leases[-1].take(host)
            except HostError as error:
                refused[host.host.name] = error
        yield refused
    except asyncio.CancelledError:
        if not losses:
            raise
        worker.uncancel()
        after = "This command was stopped in the middle. When that is done, run it again: it goes on from there."
        raise LeaseLostError(f"{losses[0]}\n{after}", taken=losses[0].taken) from None
    finally:
        at_work = False
        await asyncio.shield(release(leases))


async def release(leases: Iterable[Lease]) -> None:
    """Release all leases at once."""
    await asyncio.gather(*(lease.release() for lease in leases), return_exceptions=True)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _machine() -> str:
    """Return 16 hexadecimal digits that identify this machine: a hash, as machine-id(5) asks."""
    try:
        text = _MACHINE_ID.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        text = ""
    return hashlib.sha256(f"clusterkit {text or (socket.gethostname(), uuid.getnode())}".encode()).hexdigest()[:16]


def _birth(process: int) -> str:
    """Return boot, process namespace, process and its start; empty where they are unknown or the process has ended.

    The kernel's random number of this boot is safer than a machine id, which may be a copy. A process number means
    nothing in another container, hence the namespace.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        space = Path("/proc/self/ns/pid").stat().st_ino
        # The name of the program, in brackets, may hold blanks.
        started = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
    except OSError:
        return ""
    return f"{boot} {space} {process} {started.split()[19]}"


def _is_gone(held: str) -> bool:
    """Return whether the holder of a lease was a process of this machine, since its last boot, and has ended."""
    lines = held.splitlines()
    theirs, ours = (lines[3] if len(lines) > 3 else "").split(), _birth(os.getpid()).split()
    if len(theirs) != 4 or theirs[:2] != ours[:2] or not theirs[2].isdigit() or not _IDENTITY.fullmatch(lines[1]):
        return False
    try:
        os.kill(int(theirs[2]), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False  # another user's
    now = _birth(int(theirs[2])).split()
    return bool(now) and now != theirs


def _holder(held: str) -> str:
    lines = ["".join(c for c in line if c.isprintable())[:200] for line in held.splitlines()]
    return lines[2] if len(lines) > 2 else "somebody"


def _remotely(cluster: str, host: str, held: str) -> str:
    age = held.split(maxsplit=1)[0]
    return (
        f"cluster {cluster} is being worked on by {_holder(held)}; last heard of {age} s ago by {host}.\n"
        f"Wait until that is done. Should it have been killed, the way is free {STALE_S} s after it was last heard of."
    )


def _locked(folder: str, missing: str) -> str:
    """Return shell, under `set -eu`, that locks a folder until the script ends. missing: runs where there is no folder.

    The previous holder may have removed the folder after we opened it; then we lock the new one.
    """
    return f"""command -v flock >/dev/null || {{ echo 'there is no flock' >&2; exit 1; }}
while :; do
  [ -d {folder} ] || {{ {missing}; }}
  # `command`: a plain exec would end the script where somebody has just removed the folder.
  command exec 9<{folder} || continue
  flock -w 10 9 || {{ echo 'it cannot be locked, or somebody holds its lock for long' >&2; exit 1; }}
  if [ {folder} -ef /proc/self/fd/9 ]; then break; fi
done
"""


def _take_script(owner: LockOwner, instead: str, *, renew: bool) -> str:
    """Return a script that prints "@taken", or "@held AGE" and the lease of another command.

    Args:
        instead: identity of a holder that has ended.
        renew: we held the lease, so another command's lease is valid however old it is.
    """
    folder = node_folder(owner.cluster)
    make = f"umask 022; mkdir -p {NODE_FOLDER}; umask 077; mkdir -p {folder}"
    return f"""set -eu
lease={folder}/{LEASE_FILE}
{_locked(folder, make)}umask 077
identity=
if [ -s "$lease" ]; then read -r identity <"$lease" || :; fi
if [ "$identity" = {owner.identity} ]; then
  touch -c "$lease"
  echo @taken
  exit 0
fi
if [ -n "$identity" ] && [ "$identity" != '{instead}' ]; then
  now=$(date +%s)
  touched=$(stat -c %Y "$lease")
  age=$((now - touched))
  # A lease from the future was written before the clock was set back.
  if {"true" if renew else f'[ "$age" -lt {STALE_S} ] && [ "$age" -gt -{STALE_S} ]'}; then
    echo "@held $age"
    cat "$lease"
    exit 0
  fi
fi
cat >"$lease.new"
mv -f "$lease.new" "$lease"
echo @taken
"""


def _release_script(owner: LockOwner) -> str:
    """Return a script that removes the lease, and the folders that are empty then."""
    folder = node_folder(owner.cluster)
    return f"""set -eu
lease={folder}/{LEASE_FILE}
{_locked(folder, "exit 0")}identity=
if [ -s "$lease" ]; then read -r identity <"$lease" || :; fi
if [ "$identity" = {owner.identity} ]; then rm -f "$lease" "$lease.new"; fi
rmdir {folder} 2>/dev/null || exit 0
rmdir {NODE_FOLDER} 2>/dev/null || :
"""
