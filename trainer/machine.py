"""What a run was started with, and how busy its machine is: for the report, TensorBoard and W&B."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

GIB = 1024**3
SAMPLE_SECONDS = 1.0
"""Between looks at the GPUs, whose driver tells no average over a step."""


def origin() -> dict[str, Any]:
    """Return the fields of an `attempt` record that say what the run was started with."""
    return {
        "command": os.environ.get("CLUSTERKIT_COMMAND", ""),
        "code": commit(),
        "machine": {
            "host": platform.node(),
            "system": f"{platform.system()} {platform.release()}",
            "cores": os.cpu_count(),
            "memory_gib": round(memory_info().get("MemTotal", 0) / GIB, 1),
            "gpus": _Gpus().names(),
        },
    }


def commit() -> str:
    """Return the commit of this code, with + where files were changed.

    Outside a clone it is the one that the operator's command has handed on; "" if there is none.
    """
    folder = Path(__file__).parents[1]
    if not (folder / ".git").exists():
        return os.environ.get("CLUSTERKIT_COMMIT", "")
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


class Usage:
    """How busy this machine is, between one `take` and the next; close it at the end of the run."""

    def __init__(self) -> None:
        self._times = _cpu_times()
        self._gpus = _Gpus()
        self._looks: dict[str, list[float]] = defaultdict(list)
        self._lock, self._closed = threading.Lock(), threading.Event()
        if self._gpus.count:
            threading.Thread(target=self._watch, name="usage", daemon=True).start()

    def take(self) -> dict[str, float]:
        """Return shares of all cores and GPUs that were busy since the last call, and memory in GiB.

        GPU numbers are means over looks; `gpu_memory_gib` is that of the fullest GPU. What the system does not tell
        is left out.
        """
        found: dict[str, float] = {}
        before, self._times = self._times, _cpu_times()
        if before and self._times and (all_of_it := self._times[0] - before[0]) > 0:
            found["cpu_share"] = round(1 - (self._times[1] - before[1]) / all_of_it, 4)
        memory = memory_info()
        if {"MemTotal", "MemAvailable"} <= memory.keys():
            found["memory_gib"] = round((memory["MemTotal"] - memory["MemAvailable"]) / GIB, 3)
        with self._lock:
            looks, self._looks = self._looks, defaultdict(list)
        return found | {name: round(sum(values) / len(values), 4) for name, values in looks.items()}

    def close(self) -> None:
        """End the looks at the GPUs."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(SAMPLE_SECONDS):
            looked = self._gpus.look()
            with self._lock:
                for name, value in looked.items():
                    self._looks[name].append(value)


def _cpu_times() -> tuple[int, int] | None:
    """Return the time of all cores since the start of the machine, and how much of it was idle; None if unknown."""
    try:
        first = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0]
    except OSError:
        return None
    times = [int(part) for part in first.split()[1:9]]  # guests are counted with user
    return sum(times), times[3] + times[4]


def memory_info() -> dict[str, int]:
    """Return the bytes of /proc/meminfo; empty if there is none."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    return {name: int(value.split()[0]) * 1024 for name, value in (line.split(":", 1) for line in lines)}


class _Rates(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Room(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Gpus:
    """All GPUs of this machine by NVIDIA's management library, which comes with the driver; none without it."""

    def __init__(self) -> None:
        self._handles: list[ctypes.c_void_p] = []
        try:
            self._library = ctypes.CDLL("libnvidia-ml.so.1")
            number = ctypes.c_uint()
            if self._library.nvmlInit_v2() or self._library.nvmlDeviceGetCount_v2(ctypes.byref(number)):
                return
            for index in range(number.value):
                handle = ctypes.c_void_p()
                if self._library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == 0:
                    self._handles.append(handle)
        except (OSError, AttributeError):  # no driver, or one that lacks these functions
            self._handles = []

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._handles)

    def names(self) -> list[str]:
        """Return what each is."""
        found = []
        for handle in self._handles:
            name = ctypes.create_string_buffer(96)
            if self._library.nvmlDeviceGetName(handle, name, len(name)) == 0:
                found.append(name.value.decode(errors="replace"))
        return found

    def look(self) -> dict[str, float]:
        """Return the mean share of the time that they were busy just now, and the memory of the fullest in GiB."""
        busy, used = [], []
        for handle in self._handles:
            rates, room = _Rates(), _Room()
            if self._library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(rates)) == 0:
                busy.append(rates.gpu / 100)
            if self._library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(room)) == 0:
                used.append(room.used / GIB)
        shares = {"gpu_share": sum(busy) / len(busy)} if busy else {}
        return shares | ({"gpu_memory_gib": max(used)} if used else {})
