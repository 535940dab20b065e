"""The operating systems that hosts may run, and the step that refuses all others."""

from __future__ import annotations

from dataclasses import dataclass

from clusterkit.provision.facts.model import Facts, Os
from clusterkit.provision.steps.step import Action, DesiredState, Refused

DEB, RPM = "deb", "rpm"


@dataclass(frozen=True, slots=True)
class System:
    """One supported release."""

    id: str
    version: str  # as the vendor counts releases: 12, 24.04, 9
    family: str
    codename: str = ""  # of apt's suites: bookworm

    @property
    def name(self) -> str:
        """The name in command lines and bundles: debian-12, ubuntu-24.04, rocky-9."""
        return f"{self.id}-{self.version}"


SYSTEMS = (
    System("ubuntu", "22.04", DEB, "jammy"),
    System("ubuntu", "24.04", DEB, "noble"),
    System("ubuntu", "26.04", DEB, "resolute"),
    System("debian", "12", DEB, "bookworm"),
    System("debian", "13", DEB, "trixie"),
    *(System(vendor, major, RPM) for vendor in ("rhel", "rocky", "almalinux") for major in ("8", "9", "10")),
)
SUPPORTED = "Ubuntu 22.04/24.04/26.04, Debian 12/13 and RHEL, Rocky or AlmaLinux 8 to 10"

ARCHITECTURE = "x86_64"  # what the runtime image and its CUDA packages are built for
DEB_ARCHITECTURE = "amd64"


def system_of(facts: Facts) -> System:
    """Return the supported release that a host runs.

    Raises:
        Refused: it runs something else, or on another processor.
    """
    os = facts.os
    version = os.version if os.id == "ubuntu" else os.version.partition(".")[0]
    found = next((system for system in SYSTEMS if (system.id, system.version) == (os.id, version)), None)
    if found is None:
        raise _unsupported(os, version)
    if os.arch != ARCHITECTURE:
        raise Refused(
            f"the processor is {os.arch or 'of an unknown kind'}; the runtime image is built for {ARCHITECTURE}",
            f"Use a host with an {ARCHITECTURE} processor, or leave this one out (--exclude).",
        )
    return found


def has_systemd(facts: Facts) -> bool:
    """Return whether systemd is PID 1; without it we start daemons ourselves."""
    return facts.os.init == "systemd"


def plan(facts: Facts, desired: DesiredState) -> tuple[Action, ...]:  # noqa: ARG001
    """Refuse what the other steps cannot work on. There is never anything to change."""
    system_of(facts)
    return ()


def _unsupported(os: Os, version: str) -> Refused:
    name = os.name or " ".join(filter(None, (os.id, os.version))) or "an unknown system"
    way_out = f"Install one of {SUPPORTED}, or leave this host out (--exclude)."
    if os.id == "centos" and version in {"6", "7", "8"}:
        return Refused(
            f"{name} is out of support: neither Docker nor NVIDIA publishes packages for it any more",
            f"Rocky Linux or AlmaLinux 9 are its successors. {way_out}",
        )
    if not os.id:
        return Refused("/etc/os-release says nothing: the operating system is unknown", way_out)
    return Refused(f"{name} is not supported", way_out)
