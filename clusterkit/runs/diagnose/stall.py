"""A run that is alive and says nothing: what it was doing, and what the operating system knows of its process."""

from __future__ import annotations

import re
from pathlib import Path

from clusterkit.common.text_plot import duration
from clusterkit.runs.diagnose.model import PHASE_NAMES, Cause, Evidence

_PID = re.compile(r"process (\d+)")
_STATES = {
    "T": ("it was stopped (Ctrl-Z, kill -STOP), and waits to be continued", "kill -CONT {pid}"),
    "D": ("it waits for a disk or network storage that does not answer", "look at the storage: df -h, dmesg -T"),
    "Z": ("it is dead, and whoever started it has not noticed", "end its parent, then start the same command again"),
}


def stall(
    holder: str | None, silence: float | None, usual: float | None, phase: str, last_line: Evidence | None
) -> Cause:
    """Tell of a stall. usual: seconds of a step."""
    pid = _PID.search(holder or "")
    known = _STATES.get(process_state(int(pid[1]))) if pid else None
    if known:
        cause = f"The process is there, but {known[0]}."
        advice: tuple[str, ...] = (known[1].format(pid=pid[1] if pid else ""),)
    else:
        cause = (
            "A rank or an engine that others wait for hangs or is gone, generation does not end, or storage is slow. "
            f"The log's last words were written {PHASE_NAMES[phase]}."
        )
        stack = f"where it hangs: py-spy dump --pid {pid[1]}" if pid else "where it hangs: py-spy dump --pid PID"
        advice = (
            stack,
            "are all hosts and GPUs there: clusterkit ray-status, nvidia-smi",
            "a stop keeps the last recover checkpoint; the same command then goes on",
        )
    normal = f", a step takes {duration(usual)}" if usual is not None else ""
    return Cause(
        "stall",
        f"Nothing was recorded for {duration(silence)}{normal}",
        cause,
        phase=phase,
        evidence=(last_line,) if last_line else (),
        advice=advice,
    )


def process_state(pid: int) -> str:
    """The kernel's letter for a process's state; empty where it cannot be known (another machine, another system)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[0]
