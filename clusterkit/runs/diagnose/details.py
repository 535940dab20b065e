"""What messages about full GPU memory and full disks say in detail."""

from __future__ import annotations

import re
from dataclasses import replace

from clusterkit.runs.diagnose.model import Cause

_GIB = {"bytes": 2.0**-30, "KiB": 2.0**-20, "MiB": 2.0**-10, "GiB": 1.0, "TiB": 1024.0}
_AMOUNT = r"([\d.]+) (bytes|[KMGT]iB)"
_REQUESTED = re.compile(rf"Tried to allocate {_AMOUNT}")
_TOTAL = re.compile(rf"total capacity of {_AMOUNT}|{_AMOUNT} total capacity")
_FREE = re.compile(rf"of which {_AMOUNT} is free|{_AMOUNT} free")
_OURS = re.compile(rf"this process has {_AMOUNT} memory in use")
_IDLE = re.compile(rf"and {_AMOUNT} is reserved by PyTorch but unallocated")
_TRAJECTORIES = re.compile(r"/rollouts/|trajectories")
OTHERS_SHARE, IDLE_SHARE = 0.05, 0.1


def memory_details(finding: Cause, text: str) -> Cause:
    """Return the finding of a full GPU with what PyTorch's message says about other processes and fragmentation."""
    requested, total, free = _amount(_REQUESTED, text), _amount(_TOTAL, text), _amount(_FREE, text)
    if requested is None or total is None:
        return finding
    cause = f"{finding.cause} {requested:.2f} GiB were wanted"
    cause += f", {free:.2f} of {total:.2f} GiB were free." if free is not None else f" of {total:.2f} GiB."
    finding = replace(finding, cause=cause)
    ours, idle = _amount(_OURS, text), _amount(_IDLE, text)
    others = total - free - ours if free is not None and ours is not None else 0.0
    if others > OTHERS_SHARE * total:
        advice = "end what is left of other processes on the GPU (nvidia-smi): it is more than any setting would gain"
        finding = replace(
            finding,
            cause=f"{finding.cause} Other processes hold {others:.2f} GiB of this GPU.",
            advice=(advice, *(line for line in finding.advice if "nvidia-smi" not in line)),
        )
    if idle is None:
        return finding
    other_changes = tuple(change for change in finding.changes if change.key != "PYTORCH_CUDA_ALLOC_CONF")
    if idle < IDLE_SHARE * total:
        return replace(finding, changes=other_changes)
    cause = f"{finding.cause} {idle:.2f} GiB are reserved in pieces that are too small."
    first = tuple(change for change in finding.changes if change not in other_changes)
    return replace(finding, cause=cause, changes=first + other_changes)


def disk_details(finding: Cause, text: str) -> Cause:
    """Return the finding without its changes unless a message names trajectories: what filled the disk is unknown."""
    kept = tuple(change for change in finding.changes if _TRAJECTORIES.search(text))
    return replace(finding, changes=kept)


def _amount(pattern: re.Pattern[str], text: str) -> float | None:
    match = pattern.search(text)
    if match is None:
        return None
    value, unit = [group for group in match.groups() if group is not None]
    return float(value) * _GIB[unit]
