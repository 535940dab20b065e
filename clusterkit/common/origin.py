"""What a run is started with, handed on to its trainer, which records it."""

from __future__ import annotations

import shlex
import sys

from trainer.machine import commit


def origin_environment() -> dict[str, str]:
    """Return variables for the trainer's environment: the command that runs now, and the commit of this code."""
    return {"CLUSTERKIT_COMMAND": shlex.join(["clusterkit", *sys.argv[1:]]), "CLUSTERKIT_COMMIT": commit()}
