"""Parse what the PCI bus, the kernel module and NVIDIA's commands say."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from clusterkit.provision.facts.model import Gpu
from clusterkit.provision.facts.sections import Section

_MEBIBYTE = 1024**2
_VERSION = re.compile(r"\d+\.\d+[\d.]*")
_GPU_CLASSES = ("0x0300", "0x0302")
_NVSWITCH_CLASS = "0x0680"


def parse(sections: Mapping[str, Section]) -> dict[str, Any]:
    """Return the fields of Facts on NVIDIA hardware and software."""
    classes = [line.strip() for line in sections["nvidia.pci"].lines]
    listed = sections["gpu.list"]
    manager = "absent"
    if "nvidia.fabricmanager" in sections:
        manager = "active" if sections["nvidia.fabricmanager.pid"].first else "inactive"
    gpus = parse_gpus(sections["gpu.list"].lines, sections["gpu.processes"].lines)
    mig = [int(line.split(",")[0]) for line in sections["gpu.list"].lines if re.match(r"\d+,.*, Enabled\s*$", line)]
    return {
        "gpus": gpus,
        "mig": tuple(mig),
        "nvidia_pci": sum(name.startswith(_GPU_CLASSES) for name in classes),
        "nvidia_error": error_text(listed.exit_code, listed.lines, timed_out=listed.timed_out),
        "driver_module": sections["nvidia.module"].first,
        "nvswitches": sum(name.startswith(_NVSWITCH_CLASS) for name in classes),
        "fabricmanager": manager,
        "fabricmanager_version": _version(sections["nvidia.fabricmanager"]),
        "toolkit": _version(sections["nvidia.toolkit"]),
        "cdi_devices": tuple(
            line.strip() for line in sections["nvidia.cdi"].lines if re.match(r"\s*[a-z0-9.-]+/[a-z]+=\S+$", line)
        ),
    }


def parse_gpus(rows: list[str], processes: list[str]) -> tuple[Gpu, ...]:
    """Return the GPUs in nvidia-smi's CSV: index, name, UUID, MiB, driver, uncorrected ECC errors, %, MiB used, MIG."""
    busy = Counter(line.split(",")[0].strip() for line in processes if line.startswith("GPU-"))
    gpus = []
    for row in rows:
        cells = [cell.strip() for cell in row.split(",")]
        if len(cells) < 8 or not cells[0].isdigit():
            continue
        index, name, uuid, memory, driver, ecc, utilization, used = cells[:8]
        gpus.append(
            Gpu(
                index=int(index),
                name=name,
                uuid=uuid,
                memory=(_number(memory) or 0) * _MEBIBYTE,
                driver=driver,
                ecc_uncorrected=_number(ecc),
                utilization=_number(utilization),
                memory_used=(_number(used) or 0) * _MEBIBYTE,
                processes=busy[uuid],
            )
        )
    return tuple(gpus)


def error_text(exit_code: int | None, lines: list[str], *, timed_out: bool) -> str:
    """Return why an nvidia-smi failed, in its own words; empty where it did not."""
    if not exit_code:
        return ""
    if timed_out:
        return "nvidia-smi gave no answer in time"
    messages = [line.strip() for line in lines if line.strip() and not line[0].isdigit()]
    # The second line of a version mismatch ("NVML library version: …") explains the first.
    return " ".join(messages[-2:]) or f"nvidia-smi ended with exit code {exit_code}"


def _version(section: Section) -> str:
    found = _VERSION.search("\n".join(section.lines))
    return found[0] if found and not section.exit_code else ""


def _number(text: str) -> int | None:
    found = re.match(r"-?\d+", text)
    return int(found[0]) if found else None
