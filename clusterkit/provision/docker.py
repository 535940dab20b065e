"""Docker's command line on a host: as a line of a script, and as a call whose exit code and JSON are checked.

We run the host's own docker command over our verified connection: the operator needs no Docker and no second set of
keys, and a dry run shows exactly what would run.
"""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

from clusterkit.ssh.api import ErrorKind, HostError, Result, Session

REMOVE = 'docker rm --force "$id" >/dev/null'
"""Line of a script that removes the container `$id`."""
_FIX = "see what it says on the host: systemctl status docker; journalctl -u docker"


# "connect: no such file or directory" is not among them: it means that the engine does not run.
_UNKNOWN = re.compile(r"no such (image|object|container)", re.IGNORECASE)


class NoAnswerError(HostError):
    """The Docker of a host does not answer."""


class NotFoundError(Exception):
    """Docker has no image or container of that name."""


def command(*words: str) -> str:
    """Return a command line of Docker, quoted."""
    return shlex.join(("docker", *words))


def ps(*filters: str, stopped: bool = False, whole_ids: bool = False) -> str:
    """Return a command line that lists the IDs of containers, one a line.

    Args:
        filters: such as `label=KEY=VALUE`; all of them hold.
        stopped: also list containers that do not run.
        whole_ids: print all 64 digits.
    """
    options = [*(["--all"] if stopped else []), "--quiet", *(["--no-trunc"] if whole_ids else [])]
    return command("ps", *options, *(word for one in filters for word in ("--filter", one)))


async def ask(session: Session, *words: str, timeout: float) -> Any:
    """Run a command of Docker as root and return the JSON that it prints (`--format '{{json .}}'`).

    Args:
        words: the command, without `docker`.

    Raises:
        NotFoundError: the image or container does not exist.
        NoAnswerError: Docker does not answer.
    """
    result = await session.run(command(*words), root=True, timeout=timeout)
    if result.ok:
        return json.loads(result.stdout)
    if _UNKNOWN.search(result.stderr):
        raise NotFoundError(result.stderr.strip())
    raise no_answer(session.host.name, result)


def no_answer(host: str, result: Result) -> NoAnswerError:
    """Return the error of a host on which a command of Docker failed."""
    return NoAnswerError(host, ErrorKind.UNREACHABLE, f"Docker does not answer: {result.reason}", _FIX)
