"""Run Slurm's commands; errors have its own message."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from trainer.errors import RunError

COMMAND_SECONDS = 120.0
NO_ANSWER = "no answer"


class SlurmError(RunError):
    """Slurm refused, or does not answer. `output`: its message."""

    def __init__(self, message: str, output: str) -> None:
        super().__init__(message)
        self.output, self.no_answer = output, _is_lost(output)


def has_slurm() -> bool:
    """Whether this machine can ask a Slurm controller."""
    return shutil.which("squeue") is not None


def slurm(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """Run one of Slurm's commands, with `environment` in place of ours, and return its output.

    Raises:
        SlurmError: the command is missing, failed, or took more than two minutes.
    """
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
            # We parse its dates and messages.
            env={**(os.environ if environment is None else environment), "LC_ALL": "C"},
        )
    except FileNotFoundError:
        raise SlurmError(f"no {command[0]} on PATH: this is not a node of a Slurm cluster", "not found") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(
            f"{command[0]} has not answered within {COMMAND_SECONDS:.0f} s: `scontrol ping` tells about the controller",
            NO_ANSWER,
        ) from None
    if done.returncode:
        output = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        raise SlurmError(_message(command[0], output), output)
    return done.stdout


def _is_lost(output: str) -> bool:
    return any(word in output.lower() for word in ("unable to contact", "connection refused", "timed out", NO_ANSWER))


def _message(command: str, output: str) -> str:
    """What a command said of its failure, each of its sentences once, and what to do where Slurm did not answer."""
    parts = dict.fromkeys(part.strip() for part in re.split(rf"{command}: (?:error|fatal):", output) if part.strip())
    advice = ""
    if "configuration source" in output:
        advice = "\nSlurm's programs are here, but not its configuration: give the command on the cluster's login node"
    elif _is_lost(output):
        advice = "\nscontrol ping shows whether Slurm's controller answers; then give the command again"
    return f"{command} failed: {'; '.join(parts)}{advice}"
