"""A run that is alive but records nothing: its phase, and the state of its process in the operating system."""

from __future__ import annotations

import re
from pathlib import Path

from clusterkit.common.text_plot import duration
from clusterkit.runs.diagnose.model import PHASE_NAMES, Cause, Evidence

_PID = re.compile(r"process (\d+)")
_STATES = {
    "T": ("it was stopped (Ctrl-Z, kill -STOP), and waits to be continued", "kill -CONT {pid}"),
    "D": ("it waits for a disk or network storage that does not answer", "look at the storage: df -h, dmesg -T"),
    "Z": ("it is dead, and its parent has not noticed", "end its parent, then start the same command again"),
}


def stall_cause(
    holder: str | None, silence: float | None, step_time: float | None, phase: str, last_line: Evidence | None
) -> Cause:
    """Explain a stall.

    Args:
        holder: the process that works on the run, such as "process 123".
        silence: seconds since the last record.
        step_time: usual seconds of a step.
        phase: of the step, at the log's last line.
    """
    match = _PID.search(holder or "")
    pid = match[1] if match else "PID"
    known = _STATES.get(process_state(int(pid))) if match else None
    if known:
        cause = f"The process is there, but {known[0]}."
        advice: tuple[str, ...] = (known[1].format(pid=pid),)
    else:
        cause = (
            "A rank or an engine that others wait for hangs or is gone, generation does not end, or storage is slow."
        )
        if phase:
            cause += f" The log's last line was written {PHASE_NAMES[phase]}."
        advice = (
            f"where it hangs: py-spy dump --pid {pid}",
            "are all hosts and GPUs there: clusterkit ray-status, nvidia-smi",
            "a stop keeps the last recover checkpoint; the same command then goes on",
        )
    normal = f", a step takes {duration(step_time)}" if step_time is not None else ""
    return Cause(
        "stall",
        f"Nothing was recorded for {duration(silence)}{normal}",
        cause,
        phase=phase,
        evidence=(last_line,) if last_line else (),
        advice=advice,
    )


def process_state(pid: int) -> str:
    """Return the kernel's letter for a process's state; empty if unknown (another machine, another system)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[0]
