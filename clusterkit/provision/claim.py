"""One command at a time works on a cluster: a lock on this machine, and a lease on the head node for everybody else.

The lock ends with its process. The lease is a small file that the running command touches; left alone for two minutes
it counts for nothing, so that a command that was killed keeps nobody out for longer, and this machine's own next
command not at all: who holds the lock knows that whoever left a lease of this machine is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import getpass
import json
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from clusterkit.provision.hostlog import state_folder
from clusterkit.raycluster.model import LEASE_FILE, NODE_FOLDER, node_folder
from clusterkit.ssh.api import HostError, Session
from trainer.errors import UserError

STALE_S = 120
"""A lease that was not touched for so long is nobody's."""
REFRESH_S = 30.0
_REMOTE_S = 20.0


class ClaimedError(UserError):
    """Somebody else works on the cluster at this moment."""


@dataclass(frozen=True)
class Claim:
    """Who works on a cluster. place: a random name of this machine's state folder, the same for all its commands."""

    cluster: str
    command: str
    place: str
    who: str
    process: int
    since: str

    def line(self) -> str:
        """What stands in the lease, beneath the place."""
        return f"`clusterkit {self.command}` of {self.who} (process {self.process}), since {self.since}"


@contextmanager
def claimed(cluster: str, command: str) -> Iterator[Claim]:
    """Hold the cluster's lock on this machine.

    Raises:
        ClaimedError: another command has it.
        UserError: the state folder cannot be written to.

    """
    path = state_folder() / cluster / "lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}\nSet CLUSTERKIT_STATE to a folder that is yours.") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ClaimedError(_locally(cluster, _read(path))) from None
        except OSError:
            pass  # a file system without locks: the lease has to do
        place = str(_read(path).get("place") or secrets.token_hex(8))
        now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        claim = Claim(cluster, command, place, f"{_user()}@{socket.gethostname()}", os.getpid(), now)
        # Written in place: the lock is on this very file.
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps({"place": place, "line": claim.line()}).encode() + b"\n", 0)
        yield claim
    finally:
        os.close(descriptor)


class Lease:
    """The claim as it stands on the head node. say: gets what went wrong with it and stops nothing."""

    def __init__(self, claim: Claim, say: Callable[[str], None], refresh_s: float = REFRESH_S) -> None:
        self._claim, self._say, self._refresh_s = claim, say, refresh_s
        self._head: Session | None = None
        self._refreshing: asyncio.Task[None] | None = None

    async def take(self, head: Session) -> None:
        """Take it, or go on with it over another connection. A head that cannot be written to has other troubles.

        Raises:
            ClaimedError: somebody else holds it.

        """
        self._head = head
        try:
            result = await head.run(
                _take_script(self._claim), root=True, stdin=_content(self._claim), timeout=_REMOTE_S
            )
        except HostError as error:
            self._say(f"no lease could be taken on the head node: {error.message}")
            return
        first, _, rest = result.stdout.partition("\n")
        if first.startswith("@held "):
            raise ClaimedError(_remotely(self._claim.cluster, first.split()[1], rest))
        if not result.ok:
            self._say(f"no lease could be taken on the head node: {result.stderr.strip()[-200:]}")
        elif self._refreshing is None:
            self._refreshing = asyncio.create_task(self._refresh())

    async def release(self) -> None:
        """Give it back, if it is held."""
        if self._refreshing is None or self._head is None:
            return
        self._refreshing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._refreshing
        self._refreshing = None
        with contextlib.suppress(HostError):
            await self._head.run(_release_script(self._claim), root=True, timeout=_REMOTE_S)

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(self._refresh_s)
            assert self._head is not None
            # What a moment's trouble leaves undone, the next round does.
            with contextlib.suppress(HostError):
                result = await self._head.run(_refresh_script(self._claim), root=True, timeout=_REMOTE_S)
                if result.stdout.startswith("@lost"):
                    self._say("the head node was out of reach for long, and somebody else works on this cluster by now")
                    return


@asynccontextmanager
async def leased(claim: Claim, head: Session | None, say: Callable[[str], None]) -> AsyncIterator[None]:
    """Hold the lease while the block runs; without a connection to the head there is none.

    Raises:
        ClaimedError: somebody else holds it.

    """
    lease = Lease(claim, say)
    if head is not None:
        await lease.take(head)
    try:
        yield
    finally:
        await asyncio.shield(lease.release())


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _locally(cluster: str, found: dict[str, Any]) -> str:
    holder = found.get("line") or "another clusterkit"
    return (
        f"cluster {cluster} is being worked on by {holder}, on this machine.\n"
        "Wait until it is done, or end that process; the lock ends with it."
    )


def _remotely(cluster: str, age: str, content: str) -> str:
    lines = ["".join(c for c in line if c.isprintable())[:200] for line in content.splitlines()]
    holder = lines[1] if len(lines) > 1 else "somebody"
    return (
        f"cluster {cluster} is being worked on by {holder}; last heard of {age} s ago.\n"
        f"Wait until that is done. Should it have been killed, the way is free {STALE_S} s after it was last heard of."
    )


def _content(claim: Claim) -> bytes:
    return f"{claim.place}\n{claim.line()}\n".encode()


def _is_ours(claim: Claim) -> str:
    """Condition: the lease is this machine's. It begins with the place, 16 hexadecimal digits."""
    return f'{{ read -r place <"$lease"; }} 2>/dev/null && [ "$place" = {claim.place} ]'


def _take_script(claim: Claim) -> str:
    """One at a time where there is flock; the head's own clock says how old a lease is."""
    folder = node_folder(claim.cluster)
    return f"""set -eu
lease={folder}/{LEASE_FILE}
umask 022
mkdir -p {NODE_FOLDER}
umask 077
mkdir -p {folder}
if command -v flock >/dev/null 2>&1; then
  exec 9<{folder}
  flock -w 10 9 || :
fi
if [ -s "$lease" ] && ! {{ {_is_ours(claim)}; }}; then
  age=$(($(date +%s) - $(stat -c %Y "$lease")))
  # One from the future is of a clock that was set back.
  if [ "$age" -lt {STALE_S} ] && [ "$age" -gt -{STALE_S} ]; then
    echo "@held $age"
    cat "$lease"
    exit 0
  fi
fi
cat >"$lease.new"
mv -f "$lease.new" "$lease"
echo @taken
"""


def _refresh_script(claim: Claim) -> str:
    return f"""lease={node_folder(claim.cluster)}/{LEASE_FILE}
if {_is_ours(claim)}; then touch -c "$lease"; elif [ -s "$lease" ]; then echo @lost; fi
"""


def _release_script(claim: Claim) -> str:
    """Remove it, and the folders that are empty then."""
    folder = node_folder(claim.cluster)
    return f"""lease={folder}/{LEASE_FILE}
if {_is_ours(claim)}; then rm -f "$lease" "$lease.new"; fi
rmdir {folder} 2>/dev/null && rmdir {NODE_FOLDER} 2>/dev/null || :
"""
