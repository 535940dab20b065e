"""Verdicts on the GPUs of one host: driver, health, use by others, NVSwitch, container toolkit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain

from clusterkit.common.finding import Finding, Level
from clusterkit.common.text_plot import gpus
from clusterkit.hosts.model import Cluster, Host
from clusterkit.provision.checks.needs import GIB, Needs
from clusterkit.provision.facts.model import Facts
from clusterkit.provision.ray.model import running_containers

OLDEST_DRIVER = {12: 550, 13: 580}
"""Major version of the oldest driver by CUDA's major version."""
IDLE_MEMORY = GIB

_DRIVER_HELP = "clusterkit installs no drivers: install NVIDIA's package for this system"


def judge_gpus(host: Host, facts: Facts, cluster: Cluster, needs: Needs) -> Iterator[Finding]:
    """Yield the verdicts on NVIDIA hardware and software."""
    yield from judge_hardware(host.name, facts, needs)
    if facts.gpus:
        for check, level, message, fix in chain(_busy(facts, cluster), _nvswitch(facts), _toolkit(facts)):
            yield Finding(host.name, check, level, message, fix)


def judge_hardware(name: str, facts: Facts, needs: Needs) -> Iterator[Finding]:
    """Yield the verdicts that hold with and without a cluster: on the GPUs and their driver. name: of the host."""
    parts = [_present(facts, needs)]
    if facts.gpus:
        parts += [_driver(facts, needs), _health(facts)]
    for check, level, message, fix in chain.from_iterable(parts):
        yield Finding(name, check, level, message, fix)


_Verdicts = Iterator[tuple[str, Level, str, str]]


def describe(facts: Facts) -> str:
    """Return `8 NVIDIA H200 (140 GiB)`, or `no GPU`."""
    kinds = Counter((gpu.name, round(gpu.memory / GIB)) for gpu in facts.gpus)
    return ", ".join(f"{count} {name} ({size} GiB)" for (name, size), count in kinds.items()) or "no GPU"


def _present(facts: Facts, needs: Needs) -> _Verdicts:
    if facts.nvidia_error:
        yield "driver", Level.FAIL, f"nvidia-smi fails: {facts.nvidia_error}", _driver_fix(facts)
    elif facts.nvidia_pci and not facts.gpus:
        message = f"{facts.nvidia_pci} NVIDIA GPU(s) on the PCI bus, but no driver"
        yield "driver", Level.FAIL, message, f"{_DRIVER_HELP} ({OLDEST_DRIVER[needs.cuda]} or newer), then reboot."
    elif len(facts.gpus) < facts.nvidia_pci:
        message = f"the driver shows {len(facts.gpus)} of the {gpus(facts.nvidia_pci)} on the PCI bus"
        yield "gpus", Level.FAIL, message, "Look for Xid messages in `dmesg`; a reboot or a repair brings it back."
    elif len(facts.gpus) < needs.gpus_per_host:
        message = f"{describe(facts)}; preset {needs.preset} needs {gpus(needs.gpus_per_host)} on every host"
        yield "gpus", Level.FAIL, message, "Use hosts with more GPUs, or a smaller preset (clusterkit presets)."
    else:
        yield "gpus", Level.OK, describe(facts), ""


def _driver_fix(facts: Facts) -> str:
    if "version mismatch" in facts.nvidia_error:
        return "The driver's packages were upgraded while its old module stays loaded: reboot the host."
    if "no answer" in facts.nvidia_error:
        return "A GPU or the driver hangs: look for Xid messages in `dmesg`, then reboot the host."
    if not facts.driver_module:
        return "Its kernel module is not loaded: `modprobe nvidia`; after a kernel upgrade reinstall the driver."
    return "Look for NVRM and Xid messages in `dmesg`, then reboot the host."


def _driver(facts: Facts, needs: Needs) -> _Verdicts:
    version = facts.gpus[0].driver
    major = version.partition(".")[0]
    oldest = OLDEST_DRIVER[needs.cuda]
    if not major.isdigit():
        yield "driver", Level.WARN, "the driver's version is unknown", "Run `nvidia-smi` on the host."
    elif int(major) < oldest:
        message = f"driver {version} is too old for CUDA {needs.cuda}, which needs {oldest} or newer"
        yield "driver", Level.FAIL, message, f"{_DRIVER_HELP}, {oldest} or newer, then reboot."
    else:
        yield "driver", Level.OK, f"driver {version}", ""


def _health(facts: Facts) -> _Verdicts:
    for gpu in facts.gpus:
        if gpu.ecc_uncorrected:
            message = f"GPU {gpu.index} has had {gpu.ecc_uncorrected} memory errors that could not be corrected"
            fix = "Results may be wrong. Reboot (or `nvidia-smi --gpu-reset`); if they come back, have it replaced."
            yield "gpus", Level.FAIL, message, fix
    if facts.mig:
        which = ", ".join(map(str, facts.mig))
        message = f"GPU {which}: cut into MIG instances, which cannot train together"
        yield "gpus", Level.WARN, message, f"`nvidia-smi -i {which.replace(' ', '')} -mig 0`, then reboot."


def _busy(facts: Facts, cluster: Cluster) -> _Verdicts:
    busy = [gpu for gpu in facts.gpus if gpu.processes or gpu.memory_used > IDLE_MEMORY]
    if busy and not running_containers(facts, cluster.name):
        which = ", ".join(f"{gpu.index} ({gpu.memory_used / GIB:.1f} GiB used)" for gpu in busy)
        yield "gpus", Level.WARN, f"busy: GPU {which}", "`nvidia-smi` names the processes: end them before training."


def _nvswitch(facts: Facts) -> _Verdicts:
    if not facts.nvswitches:
        return
    driver, manager = facts.gpus[0].driver, facts.fabricmanager_version
    if facts.fabricmanager != "active":
        state = "is not installed" if facts.fabricmanager == "absent" else "does not run"
        message = f"{facts.nvswitches} NVSwitches, but the fabric manager {state}: CUDA fails with error 802"
        fix = f"Install nvidia-fabricmanager {driver}" if facts.fabricmanager == "absent" else "Start it"
        yield "fabric manager", Level.FAIL, message, f"{fix}: `systemctl enable --now nvidia-fabricmanager`."
    elif manager and manager != driver:
        message = f"fabric manager {manager} does not match driver {driver}: it has to, exactly"
        yield "fabric manager", Level.FAIL, message, f"Install nvidia-fabricmanager {driver} and restart it."
    else:
        yield "fabric manager", Level.OK, f"fabric manager {manager or 'active'}", ""


def _toolkit(facts: Facts) -> _Verdicts:
    if facts.toolkit:
        yield "toolkit", Level.OK, f"NVIDIA Container Toolkit {facts.toolkit}", ""
    elif "nvidia-ctk" in facts.commands:
        message = "nvidia-ctk is installed but does not tell its version"
        yield "toolkit", Level.FAIL, message, "Reinstall nvidia-container-toolkit; `nvidia-ctk --version` must work."
    else:
        yield "toolkit", Level.OK, "NVIDIA Container Toolkit not installed: setup installs it", ""
