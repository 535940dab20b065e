"""What a run is started with, handed on to its trainer, which records it."""

from __future__ import annotations

import re
import shlex
import sys

from trainer.machine import commit

_PASSWORD = re.compile(r"(://[^/@\s:]*:)[^/@\s]+(?=@)")
_FLAG = re.compile(r"""(--[a-z-]*(?:api-?key|token|password)["']?[=,\s]+["']?)[^,\s\]'"]+""", re.IGNORECASE)


def origin_environment() -> dict[str, str]:
    """Return variables for the trainer's environment: the command that runs now, and the commit of this code."""
    return {"CLUSTERKIT_COMMAND": masked(shlex.join(["clusterkit", *sys.argv[1:]])), "CLUSTERKIT_COMMIT": commit()}


def masked(text: str) -> str:
    """Return a text without passwords in addresses and values of flags such as --api-key.

    What is recorded or shown may be sent to others.
    """
    return _FLAG.sub(r"\1***", _PASSWORD.sub(r"\1***", text))
