"""What this machine has: processors, memory, GPUs and their driver, Pythons with engines, and room on its disks."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from clusterkit.backends.local.interpreter import gpu_python
from clusterkit.provision.facts.model import Facts
from clusterkit.provision.facts.parse_gpu import error_text, parse_gpus

LOOK_SECONDS = 10
_QUERY = (
    "index,name,uuid,memory.total,driver_version,ecc.errors.uncorrected.volatile.total,utilization.gpu,memory.used,"
    "mig.mode.current,compute_cap"
)
ENGINES = ("sglang", "vllm")
_PACKAGES = ("torch", *ENGINES, "transformers", "ray", "clusterkit")
# Run by each Python, so it imports nothing of ours. torch's version.py is short, and tells CUDA's.
_LOOK = f"""
import json, re, sys
from importlib.metadata import version
from importlib.util import find_spec
found = {{}}
for name in {_PACKAGES!r}:
    try:
        found[name] = version(name)
    except Exception:
        pass
cuda = ""
spec = find_spec("torch")
if spec and spec.submodule_search_locations:
    try:
        text = open(spec.submodule_search_locations[0] + "/version.py").read()
        cuda = (re.search(r"^cuda\\b[^=]*= *'([0-9.]+)'", text, re.M) or ["", ""])[1]
    except OSError:
        pass
print(json.dumps({{"version": "%d.%d.%d" % sys.version_info[:3], "packages": found, "cuda": cuda}}))
"""


@dataclass(frozen=True)
class Interpreter:
    """A Python and what it has."""

    path: str  # of its program
    version: str = ""  # empty where it does not run; `error` says why
    packages: dict[str, str] | None = None  # version by name, of torch, engines, transformers, ray and clusterkit
    cuda: str = ""  # CUDA's version that its torch was built for; empty for a build without
    error: str = ""


@dataclass(frozen=True)
class Machine:
    """This machine; sizes in bytes."""

    system: str
    cores: int
    memory: int
    facts: Facts  # of its GPUs and their driver, as `check` has them
    cuda: str  # the newest CUDA that the driver knows; empty where it is unknown
    capabilities: tuple[str, ...]  # compute capability of each GPU
    pythons: tuple[Interpreter, ...]
    """This command's first; then that which runs on GPUs, and those that variables name for engines."""
    gpu_python: str  # path of the one that runs on GPUs
    disks: dict[str, int]  # free bytes by folder


def look(*folders: Path) -> Machine:
    """Look at this machine. folders: whose disks are asked for room."""
    for_gpus = gpu_python()
    names = [
        sys.executable,
        for_gpus,
        *(os.environ.get(f"CLUSTERKIT_{name.upper()}_PYTHON", "") for name in ENGINES),
    ]
    with ThreadPoolExecutor() as pool:
        plain = pool.submit(_run, ["nvidia-smi"])
        listed = pool.submit(_run, ["nvidia-smi", "--format=csv,noheader,nounits", f"--query-gpu={_QUERY}"])
        pythons = tuple(pool.map(_interpreter, dict.fromkeys(name for name in names if name)))
    code, text = listed.result()
    rows = text.splitlines()
    cuda = re.search(r"CUDA[^:|]*Version: *(\d+\.\d+)", plain.result()[1])
    facts = Facts(
        gpus=parse_gpus(rows, []),
        mig=tuple(int(row.split(",")[0]) for row in rows if re.match(r"\d+,.*, Enabled,", row)),
        nvidia_pci=_on_the_bus(),
        nvidia_error=error_text(code, rows, timed_out=code == 124) if code and shutil.which("nvidia-smi") else "",
        driver_module=_read(Path("/sys/module/nvidia/version")),
    )
    return Machine(
        system=f"{_distribution()}, {platform.machine()}",
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory=_memory(),
        facts=facts,
        cuda=cuda[1] if cuda else "",
        capabilities=tuple(row.rpartition(",")[2].strip() for row in rows if row[:1].isdigit()) if not code else (),
        pythons=pythons,
        gpu_python=for_gpus,
        disks={str(folder): _free(folder) for folder in folders},
    )


def _run(command: list[str]) -> tuple[int, str]:
    """Exit code and output of a command; 127 where there is none, 124 where it gives no answer in time."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LOOK_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return 124, ""
    except OSError as error:
        return 127, str(error)
    return done.returncode, done.stdout


def _interpreter(path: str) -> Interpreter:
    code, text = _run([path, "-P", "-c", _LOOK])
    try:
        return Interpreter(path, **json.loads(text.splitlines()[-1]))
    except (ValueError, IndexError, TypeError):
        return Interpreter(path, error=(text.strip().splitlines() or [f"it ended with exit code {code}"])[-1])


def _on_the_bus() -> int:
    """NVIDIA GPUs on the PCI bus, driver or not."""
    devices = [(_read(device / "vendor"), _read(device / "class")) for device in Path("/sys/bus/pci/devices").glob("*")]
    return sum(vendor == "0x10de" and kind.startswith(("0x0300", "0x0302")) for vendor, kind in devices)


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return f"{platform.system()} {platform.release()}"


def _memory() -> int:
    """Bytes that this process may use: of the machine, or of its control group where that is less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [_read(Path("/sys/fs/cgroup") / name) for name in ("memory.max", "memory/memory.limit_in_bytes")]
    return min([total, *(int(limit) for limit in limits if limit.isdigit())])


def _free(folder: Path) -> int:
    nearest = folder
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    return shutil.disk_usage(nearest).free


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
