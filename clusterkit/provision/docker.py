"""Docker's command on a host: as a line of a script, and as a call whose answer is checked and read.

The command of the host itself is used, over our own verified connection: the operator needs no Docker and no second
set of keys, and what a dry run shows is what runs.
"""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

from clusterkit.ssh.api import ErrorKind, HostError, Session

REMOVE = 'docker rm --force "$id" >/dev/null'
"""Line of a script that removes the container `$id`."""
_FIX = "see what it says on the host: systemctl status docker; journalctl -u docker"


# "connect: no such file or directory" is what the client says of an engine that does not run.
_UNKNOWN = re.compile(r"no such (image|object|container)", re.IGNORECASE)


class NoAnswerError(HostError):
    """Docker of a host does not answer, or not as it should."""


class NotThereError(Exception):
    """Docker answers, and has no image or container of that name."""


def command(*words: str) -> str:
    """A command line of Docker, quoted."""
    return shlex.join(("docker", *words))


def ps(*filters: str, stopped: bool = False, whole_ids: bool = False) -> str:
    """Command line that lists the IDs of containers, one a line.

    Args:
        filters: such as `label=KEY=VALUE`; all of them hold.
        stopped: those that do not run as well.
        whole_ids: all 64 digits.

    """
    options = [*(["--all"] if stopped else []), "--quiet", *(["--no-trunc"] if whole_ids else [])]
    return command("ps", *options, *(word for one in filters for word in ("--filter", one)))


async def ask(session: Session, *words: str, timeout: float) -> Any:
    """Run a command of Docker as root whose answer is JSON (`--format '{{json .}}'`), and read it.

    Raises:
        NotThereError: what it is about does not exist.
        NoAnswerError: Docker does not answer.
        HostError: the connection is lost.

    """
    result = await session.run(command(*words), root=True, timeout=timeout)
    if result.ok:
        return json.loads(result.stdout)
    if _UNKNOWN.search(result.stderr):
        raise NotThereError(result.stderr.strip())
    raise no_answer(session.host.name, result.stderr, result.exit_code)


def no_answer(host: str, errors: str, exit_code: int) -> NoAnswerError:
    """The error of a host whose Docker does not do as it is told. errors: what it printed to stderr."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    said = lines[-1][-500:] if lines else f"exit code {exit_code}"
    return NoAnswerError(host, ErrorKind.UNREACHABLE, f"Docker does not answer: {said}", _FIX)
