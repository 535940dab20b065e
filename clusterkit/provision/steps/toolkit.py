"""NVIDIA Container Toolkit and the CDI specification, where there are GPUs with a working driver."""

from __future__ import annotations

import re

from clusterkit.hosts.model import Host
from clusterkit.provision.facts.model import Facts
from clusterkit.provision.steps import apt, dnf, repositories
from clusterkit.provision.steps.packages import install_action
from clusterkit.provision.steps.repositories import Repository
from clusterkit.provision.steps.step import Action, DesiredState, Refused
from clusterkit.provision.steps.systems import DEB, DEB_ARCHITECTURE, System, has_systemd, system_of

VERSION = "1.20.0"
# Pinned together: with one alone the resolver would have to mix releases.
TOOLKIT_PACKAGES = (
    "nvidia-container-toolkit",
    "nvidia-container-toolkit-base",
    "libnvidia-container-tools",
    "libnvidia-container1",
)
FINGERPRINT = "C95B321B61E88C1809C4F759DDCAE044F796ECB0"
KEYS = {"deb": "/etc/apt/keyrings/clusterkit-nvidia.asc", "rpm": "/etc/pki/rpm-gpg/clusterkit-nvidia.asc"}
REPOSITORIES = {
    "deb": "/etc/apt/sources.list.d/clusterkit-nvidia.sources",
    "rpm": "/etc/yum.repos.d/clusterkit-nvidia.repo",
}
CDI_SPECIFICATION = "/var/run/cdi/nvidia.yaml"  # where the toolkit's own refresh service writes it


class ToolkitStep:
    """NVIDIA Container Toolkit at the pinned release or a newer one, and GPUs that CDI knows."""

    name = "toolkit"

    def plan(self, host: Host, facts: Facts, wish: DesiredState) -> tuple[Action, ...]:  # noqa: ARG002
        """Nothing on a host without GPUs.

        Raises:
            Refused: there are GPUs and no working driver, or no GPUs where some were asked for.

        """
        system = system_of(facts)
        if not wants_gpus(facts, wish):
            return ()
        _refuse_without_driver(system, facts)
        actions = (
            *repositories.put_back_modes(repository(system, wish.nvidia_url), facts),
            *(() if _installed(facts) else _install(system, facts, wish)),
        )
        if not facts.cdi_devices:
            actions += (Action("describe the GPUs to containers (CDI)", _cdi(has_systemd(facts)), timeout=180.0),)
        return actions


def wants_gpus(facts: Facts, wish: DesiredState) -> bool:
    """Whether containers of this host are to use GPUs."""
    return wish.gpus if wish.gpus is not None else bool(facts.gpus or facts.nvidia_pci)


def pinned(system: System) -> tuple[str, ...]:
    """Packages with their release, as apt or dnf wants it written."""
    sign = "=" if system.family == DEB else "-"
    return tuple(f"{name}{sign}{VERSION}-1" for name in TOOLKIT_PACKAGES)


def repository(system: System, url: str) -> Repository:
    """The toolkit's repository, or a mirror of it."""
    url, key = url.rstrip("/"), KEYS[system.family]
    base = f"{url}/stable/deb/{DEB_ARCHITECTURE}" if system.family == DEB else f"{url}/stable/rpm/$basearch"
    if system.family == DEB:
        content = apt.source(base, "/", "", key).encode()
    else:
        content = dnf.repository("clusterkit-nvidia", "NVIDIA Container Toolkit", base, key, signed="metadata")
    return Repository("NVIDIA", REPOSITORIES[system.family], content, key, f"{url}/gpgkey", FINGERPRINT, base, "/")


def _installed(facts: Facts) -> bool:
    known = facts.packages.keys() & set(TOOLKIT_PACKAGES)
    # None of the packages: it came some other way. Some of them: an installation was cut short.
    return _numbers(facts.toolkit) >= _numbers(VERSION) and len(known) in {0, len(TOOLKIT_PACKAGES)}


def _install(system: System, facts: Facts, wish: DesiredState) -> tuple[Action, ...]:
    install = install_action(system, wish, pinned(system), title=f"install NVIDIA Container Toolkit {VERSION}")
    if wish.bundle:
        return (install,)
    return (*repositories.add(repository(system, wish.nvidia_url), system, facts), install)


def _refuse_without_driver(system: System, facts: Facts) -> None:
    if facts.gpus:
        return
    if facts.nvidia_error:
        mismatch = "mismatch" in facts.nvidia_error.lower()
        raise Refused(
            f"the NVIDIA driver does not work: {facts.nvidia_error}",
            "The driver was updated while its old kernel module was in use: reboot the host."
            if mismatch
            else "Run `nvidia-smi` on the host, repair or reinstall the driver (or reboot), and run the command again.",
        )
    if facts.nvidia_pci:
        how = {
            "ubuntu": "`ubuntu-drivers install --gpgpu`",
            "debian": "package nvidia-driver of contrib and non-free",
        }.get(system.id, "package nvidia-open or cuda-drivers of NVIDIA's CUDA repository")
        raise Refused(
            f"{facts.nvidia_pci} NVIDIA GPU(s) and no driver; clusterkit installs no drivers",
            f"Install the driver ({how}), reboot, and run the command again.",
        )
    raise Refused(
        "no NVIDIA GPU was found, and GPUs were asked for",
        "`lspci -d 10de:` on the host shows what it has; leave the host out (--exclude) if that is right.",
    )


def _cdi(systemd: bool) -> str:
    refresh = "systemctl restart nvidia-cdi-refresh.service 2>/dev/null || generate" if systemd else "generate"
    return f"""umask 022
generate() {{
  folder=$(mktemp -d)
  trap 'rm -rf "$folder"' EXIT
  nvidia-ctk cdi generate --output="$folder/nvidia.yaml"
  mkdir -p /var/run/cdi
  mv -f "$folder/nvidia.yaml" /var/run/cdi/.nvidia.yaml.new
  mv -f /var/run/cdi/.nvidia.yaml.new {CDI_SPECIFICATION}
}}
{refresh}
if ! nvidia-ctk cdi list 2>/dev/null | grep -q nvidia.com/gpu; then
  echo 'nvidia-ctk made a CDI specification without GPUs:' >&2
  nvidia-ctk cdi list >&2
  exit 1
fi
"""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
