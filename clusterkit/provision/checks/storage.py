"""Check that a folder is the same on all hosts: every host writes a file, then every host reads all files."""

from __future__ import annotations

import asyncio
import secrets
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from clusterkit.common.finding import Finding, Level
from clusterkit.ssh.api import HostError, Result, Session, or_error

RunIn = Callable[[str], Sequence[str]]
"""Given a host's name: the words before a command that run it elsewhere, such as `docker exec NAME`."""

LIMIT = 20
"""Seconds that one access to the folder may take; a dead network mount never answers."""
_KILLED = (124, 137)
_HOLDERS = 4
_LOCKS = (
    "Mount {folder} with working locks (NFS 4, or NFS 3 with rpc-statd and without nolock and local_lock; Lustre: -o "
    "flock; sshfs has none that hosts share)."
)
# A session runs a limited number of commands at once, and a command that waits for another needs room for it.
_holders: WeakKeyDictionary[Session, asyncio.Semaphore] = WeakKeyDictionary()


@dataclass
class StorageReport:
    """The result of the check."""

    findings: list[Finding] = field(default_factory=list)
    unseen: list[tuple[str, str]] = field(default_factory=list)  # (reader, writer) pairs
    rename_seconds: dict[str, float] = field(default_factory=dict)  # by reader, until it saw a renamed file's text

    def add(self, host: str, level: Level, message: str, fix: str = "") -> None:
        """Add a finding on the folder."""
        self.findings.append(Finding(host, "storage", level, message, fix))


@dataclass
class _Member:
    """A host that has the folder and has written to it."""

    session: Session
    index: int  # among the hosts of this probe
    nonce: str
    uid: str = ""
    source: str = ""
    locks: bool = True  # a lock can be taken, and a second one of the same file is then refused

    @property
    def name(self) -> str:
        return self.session.host.name


async def storage_shared(
    sessions: Sequence[Session],
    folder: str,
    *,
    run_in: RunIn | None = None,
    root: bool = True,
    delay: float = 5.0,
) -> StorageReport:
    """Probe the folder from all hosts at once. Nothing stays behind, and a missing folder is not made.

    A host that is lost meanwhile is a finding.

    Args:
        run_in: runs the probe elsewhere on a host, such as in a container.
        root: probe as root, as the containers do.
        delay: seconds that a file of another host may take to appear; the new text of a renamed file, which network
            file systems cache, may take twelve times as long.
    """
    probe = _Probe(folder, run_in, root, delay)
    report = StorageReport()
    try:
        members = await probe.write(sessions, report)
        if members:
            await probe.read(members, report)
            await probe.rename_and_lock(members, report)
    finally:
        await probe.clean_up(sessions)
    if members and not any(finding.level is not Level.OK for finding in report.findings):
        where = "inside the containers of" if run_in else "on"
        report.add("", Level.OK, f"{folder} is one folder {where} {len(members)} host(s)")
    return report


class _Probe:
    def __init__(self, folder: str, run_in: RunIn | None, root: bool, delay: float) -> None:
        self.folder, self.run_in, self.root, self.delay = folder, run_in, root, delay
        self.token = secrets.token_hex(8)
        self.mine = f"{folder.rstrip('/')}/.clusterkit-check-{self.token}"

    async def write(self, sessions: Sequence[Session], report: StorageReport) -> list[_Member]:
        """Write a new file on every host; return the hosts that could."""
        candidates = [_Member(session, index, secrets.token_hex(16)) for index, session in enumerate(sessions)]
        answers = await self._all(
            candidates,
            lambda member: (
                f"""
[ -d {shlex.quote(self.folder)} ] || {{ echo absent; exit 0; }}
umask 022
newline='
'
mkdir -p "$mine" || exit 3
set -C
echo {member.nonce} >"$mine/nonce-{member.index}" || exit 3
[ {member.index} != 0 ] || echo old >"$mine/renamed" || exit 3
uid=$(id -u) || exit 3
disk=$(df -P {shlex.quote(self.folder)}) || exit 3
kind=$(stat -f -c %T {shlex.quote(self.folder)}) || exit 3
disk=${{disk##*"$newline"}}
echo "written $uid ${{disk%% *}} $kind"
command -v flock >/dev/null || exit 0
exec 9<"$mine/nonce-{member.index}"
if ! said=$(flock -n 9 2>&1); then
  echo "locks fail: ${{said##*: }}"
elif flock -n "$mine/nonce-{member.index}" true; then
  echo 'locks do nothing'
fi
"""
            ),
        )
        members, absent = [], []
        for member in candidates:
            answer = answers[member.name]
            if isinstance(answer, Result) and answer.stdout.startswith("absent"):
                absent.append(member.name)
            elif isinstance(answer, Result) and answer.stdout.startswith("written "):
                first, *rest = answer.stdout.splitlines()
                _, member.uid, member.source = first.split(" ", 2)
                members.append(member)
                if rest:
                    member.locks = False
                    message = f"file {rest[0]} in {self.folder}: runs and downloads there would be refused"
                    report.add(member.name, Level.FAIL, message, _LOCKS.format(folder=self.folder))
            else:
                self._failed(report, member.name, answer, "cannot write to")
        for name in absent:
            if members:
                message = f"{self.folder} is not there, but is on {', '.join(member.name for member in members)}"
                report.add(name, Level.FAIL, message, f"Mount the same file system at {self.folder} here.")
            else:
                report.add(name, Level.WARN, f"{self.folder} is not there (setup would create it): not checked")
        return members

    async def read(self, members: list[_Member], report: StorageReport) -> None:
        """Read the files of all hosts on every host, and wait a little for those that are missing."""
        answers = await self._all(
            members,
            lambda _: (
                f"""
left={round(self.delay / 0.1)}
for i in {" ".join(str(member.index) for member in members)}; do
  while ! [ -s "$mine/nonce-$i" ] && [ $left -gt 0 ]; do sleep 0.1; left=$((left - 1)); done
  [ -s "$mine/nonce-$i" ] && read -r nonce <"$mine/nonce-$i" && echo "$i $nonce $(stat -c %u "$mine/nonce-$i")"
done
[ ! -e "$mine/renamed" ] || cat "$mine/renamed" >/dev/null
true
"""
            ),
            extra=self.delay,
        )
        for reader in members:
            answer = answers[reader.name]
            if not isinstance(answer, Result) or not answer.ok:
                self._failed(report, reader.name, answer, "cannot read")
                continue
            seen = {words[0]: words[1:] for line in answer.stdout.splitlines() if len(words := line.split()) == 3}
            unseen = [writer for writer in members if seen.get(str(writer.index), [""])[0] != writer.nonce]
            report.unseen += [(reader.name, writer.name) for writer in unseen]
            if unseen:
                theirs = ", ".join(f"{writer.name} ({writer.source})" for writer in unseen)
                message = f"{self.folder} is not shared: here it is {reader.source}, without the files of {theirs}"
                report.add(reader.name, Level.FAIL, message, f"Mount the same file system at {self.folder} everywhere.")
            self._owners(report, reader, members, seen)

    def _owners(
        self, report: StorageReport, reader: _Member, members: Iterable[_Member], seen: Mapping[str, list[str]]
    ) -> None:
        for writer in members:
            nonce, owner = seen.get(str(writer.index), ["", ""])
            if nonce == writer.nonce and owner != writer.uid:
                message = f"what {writer.name} writes as user {writer.uid} belongs to user {owner} in {self.folder}"
                fix = "The server maps root away (root_squash): export the folder with no_root_squash."
                report.add(reader.name, Level.WARN, message, fix)
                return

    async def rename_and_lock(self, members: list[_Member], report: StorageReport) -> None:
        """Rename over a file and hold a lock on the first host; read the new text and try the lock on the others."""
        first = members[0]
        others = [member for member in members[1:] if (member.name, first.name) not in report.unseen]
        if first.index != 0 or not others:
            return
        async with _holders.setdefault(first.session, asyncio.Semaphore(_HOLDERS)):
            await self._rename_and_lock(first, others, report)

    async def _rename_and_lock(self, first: _Member, others: list[_Member], report: StorageReport) -> None:
        longest = self.delay * 12
        held = asyncio.Event()
        holding = asyncio.create_task(
            self._run(
                first,
                f"""
echo new >"$mine/renaming" && mv -f "$mine/renaming" "$mine/renamed" || exit 3
left={round((longest + LIMIT) / 0.1)}
{"command -v flock >/dev/null" if first.locks else "false"} || {{ echo held; exit 0; }}
exec 9>"$mine/lock"
flock -n 9 || exit 4
echo held
while ! [ -e "$mine/release" ] && [ $left -gt 0 ]; do sleep 0.1; left=$((left - 1)); done
""",
                extra=longest + LIMIT,
                on_output=lambda line: held.set() if line.startswith("held") else None,
            )
        )
        holding.add_done_callback(lambda _: held.set())
        await held.wait()
        answers = await self._all(
            others,
            lambda reader: (
                f"""
tries=0
while read -r text <"$mine/renamed"; [ "$text" != new ] && [ $tries -lt {round(longest / 0.1)} ]; do
  sleep 0.1; tries=$((tries + 1))
done
echo "renamed $text $tries"
{"command -v flock >/dev/null" if reader.locks else "false"} && [ -e "$mine/lock" ] || {{ echo lock unknown; exit 0; }}
exec 9>>"$mine/lock"
if flock -n 9; then echo lock free; else echo lock held; fi
"""
            ),
            extra=longest,
        )
        await self._run(first, ': >"$mine/release"')
        result = await holding
        if not isinstance(result, Result) or not result.ok:
            self._failed(report, first.name, result, "cannot rename or lock a file in")
            return
        for reader in others:
            self._judge_rename_and_lock(report, reader, first, answers[reader.name])

    def _judge_rename_and_lock(
        self, report: StorageReport, reader: _Member, first: _Member, answer: Result | HostError
    ) -> None:
        if not isinstance(answer, Result) or not answer.ok:
            self._failed(report, reader.name, answer, "cannot read")
            return
        words = answer.stdout.split()
        seconds = int(words[2]) * 0.1 if len(words) > 2 and words[2].isdigit() else 0.0
        report.rename_seconds[reader.name] = seconds
        if words[1:2] != ["new"]:
            message = f"a file that {first.name} replaced still shows its old text after {seconds:.0f} s"
            fix = f"Mount {self.folder} with a shorter attribute cache (NFS: actimeo=3)."
            report.add(reader.name, Level.FAIL, message, fix)
        elif seconds > self.delay:
            message = f"a file that {first.name} replaced showed its old text for {seconds:.0f} s"
            report.add(reader.name, Level.WARN, message, "NFS: a shorter attribute cache (actimeo=3) helps.")
        if answer.stdout.rstrip().endswith("lock free"):
            message = f"a file lock of {first.name} does not hold here: locks are not shared"
            fix = f"{_LOCKS.format(folder=self.folder)} Until then start, go on with and stop runs from one host alone."
            report.add(reader.name, Level.WARN, message, fix)

    async def clean_up(self, sessions: Sequence[Session]) -> None:
        """Remove what every host has written; the last host removes the empty folder."""
        members = [_Member(session, index, "") for index, session in enumerate(sessions)]
        await self._all(
            members,
            lambda member: (
                f"""
[ -d "$mine" ] || exit 0
rm -f "$mine/nonce-{member.index}" || exit 3
[ {member.index} != 0 ] || rm -f "$mine/renamed" "$mine/renaming" "$mine/lock" "$mine/release" || exit 3
rmdir "$mine" 2>/dev/null || : # others have files in it
"""
            ),
        )

    async def _all(
        self, members: Sequence[_Member], script: Callable[[_Member], str], extra: float = 0.0
    ) -> dict[str, Result | HostError]:
        answers = await asyncio.gather(*(self._run(member, script(member), extra=extra) for member in members))
        return {member.name: answer for member, answer in zip(members, answers, strict=True)}

    async def _run(
        self,
        member: _Member,
        script: str,
        *,
        extra: float = 0.0,
        on_output: Callable[[str], None] | None = None,
    ) -> Result | HostError:
        limit = LIMIT + round(extra)
        # The limit applies inside the container: ending `docker exec` does not end what it has started.
        body = shlex.quote(f"mine={shlex.quote(self.mine)}\n{script}")
        inner = f"exec timeout -s KILL {limit} sh -c {body} </dev/null"
        if self.run_in is not None:
            inner = shlex.join([*self.run_in(member.name), "sh", "-c", inner])
        return await or_error(member.session.run(inner, root=self.root, timeout=limit + 15.0, on_output=on_output))

    def _failed(self, report: StorageReport, name: str, answer: Result | HostError, what: str) -> None:
        if isinstance(answer, HostError):
            report.add(name, Level.FAIL, f"while {self.folder} was checked: {answer.message}", answer.fix)
        elif answer.exit_code in _KILLED:
            message = f"{self.folder} gave no answer within {LIMIT} s: a network mount whose server is gone"
            report.add(name, Level.FAIL, message, f"Bring its server back, or `umount -l {self.folder}`.")
        else:
            last = (answer.stderr or answer.stdout).strip().splitlines()[-1:]
            reason = last[0] if last else f"exit code {answer.exit_code}"
            fix = "Look at its owner, its mount options (ro?) and its free space."
            report.add(name, Level.FAIL, f"{what} {self.folder}: {reason}", fix)
