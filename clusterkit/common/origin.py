"""What a run is started with, handed on to its trainer, which records it."""

from __future__ import annotations

import os
import re
import shlex
import sys

from trainer.machine import commit

_PASSWORD = re.compile(r"(://[^/@\s:]*:)[^/@\s]+(?=@)")
_FLAG = re.compile(r"""(--[a-z-]*(?:api-?key|token|password)["']?[=,\s]+["']?)[^,\s\]'"]+""", re.IGNORECASE)


SWITCHES = ("CLUSTERKIT_FLASH4", "CLUSTERKIT_SGLANG_OUTPUT_LAYER")
"""Variables by which a user chooses kernels, wherever the run then is: trainer/train/flash4.py and sglang_side."""


def origin_environment() -> dict[str, str]:
    """Return variables for the trainer's environment: the command that runs now, the commit of this code, SWITCHES."""
    command = masked(shlex.join(["clusterkit", *sys.argv[1:]]))
    chosen = {name: value for name in SWITCHES if (value := os.environ.get(name))}
    return {"CLUSTERKIT_COMMAND": command, "CLUSTERKIT_COMMIT": commit(), **chosen}


def masked(text: str) -> str:
    """Return a text without passwords in addresses and values of flags such as --api-key.

    What is recorded or shown may be sent to others.
    """
    return _FLAG.sub(r"\1***", _PASSWORD.sub(r"\1***", text))
