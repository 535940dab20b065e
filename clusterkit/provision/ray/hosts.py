"""Connect to several hosts at once, and keep the errors of those that cannot be reached."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from clusterkit.hosts.model import Host
from clusterkit.ssh.api import HostError, Session

Connect = Callable[[Host], Awaitable[Session]]


@dataclass(frozen=True, slots=True)
class Connected:
    """Sessions by host, and the errors of hosts without one."""

    sessions: dict[str, Session]
    unreachable: dict[str, HostError]


@asynccontextmanager
async def connected(hosts: Iterable[Host], connect: Connect) -> AsyncIterator[Connected]:
    """Connect to all hosts at once; the sessions are closed when the block ends."""
    wanted = list(hosts)
    outcomes = await asyncio.gather(*(connect(host) for host in wanted), return_exceptions=True)
    answers = dict(zip((host.name for host in wanted), outcomes, strict=True))
    sessions = {name: answer for name, answer in answers.items() if not isinstance(answer, BaseException)}
    unreachable = {name: answer for name, answer in answers.items() if isinstance(answer, HostError)}
    try:
        for answer in answers.values():
            if isinstance(answer, BaseException) and not isinstance(answer, HostError):
                raise answer
        yield Connected(sessions, unreachable)
    finally:
        await asyncio.gather(*(session.close() for session in sessions.values()), return_exceptions=True)
