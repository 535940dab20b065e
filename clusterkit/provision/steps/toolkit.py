"""NVIDIA Container Toolkit and the CDI specification, where there are GPUs with a working driver."""

from __future__ import annotations

from clusterkit.provision.facts.model import Facts, version_numbers
from clusterkit.provision.steps import repositories
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
CDI_SPECIFICATION = "/var/run/cdi/nvidia.yaml"  # where the toolkit's own refresh service writes it


def plan(facts: Facts, desired: DesiredState) -> tuple[Action, ...]:
    """Install the toolkit where its pinned release or a newer one is missing, and describe the GPUs to CDI.

    A host without GPUs needs no actions.

    Raises:
        Refused: there are GPUs and no working driver, or no GPUs where some were asked for.
    """
    system = system_of(facts)
    if not uses_gpus(facts, desired):
        return ()
    _refuse_without_driver(system, facts)
    actions = repositories.restore_modes(repository(system, desired.nvidia_url), facts)
    if not _installed(facts):
        actions += _install(system, facts, desired)
    if not facts.cdi_devices:
        actions += (Action("describe the GPUs to containers (CDI)", _cdi(has_systemd(facts)), timeout=180.0),)
    return actions


def uses_gpus(facts: Facts, desired: DesiredState) -> bool:
    """Return whether containers of this host use GPUs."""
    return desired.gpus if desired.gpus is not None else bool(facts.gpus or facts.nvidia_pci)


def pinned(system: System) -> tuple[str, ...]:
    """Return the packages with their release, in the syntax of apt or dnf."""
    sign = "=" if system.family == DEB else "-"
    return tuple(f"{name}{sign}{VERSION}-1" for name in TOOLKIT_PACKAGES)


def repository(system: System, url: str) -> Repository:
    """Return the toolkit's repository at `url`, which may be a mirror."""
    url = url.rstrip("/")
    base = f"{url}/stable/deb/{DEB_ARCHITECTURE}" if system.family == DEB else f"{url}/stable/rpm/$basearch"
    product, key = "NVIDIA Container Toolkit", f"{url}/gpgkey"
    return Repository(repositories.NVIDIA, product, system.family, base, key, FINGERPRINT, signed="metadata")


def _installed(facts: Facts) -> bool:
    known = facts.packages.keys() & set(TOOLKIT_PACKAGES)
    # None of the packages: it came some other way. Some of them: an installation was cut short.
    return version_numbers(facts.toolkit, 3) >= version_numbers(VERSION, 3) and len(known) in {0, len(TOOLKIT_PACKAGES)}


def _install(system: System, facts: Facts, desired: DesiredState) -> tuple[Action, ...]:
    install = install_action(system, desired, pinned(system), title=f"install NVIDIA Container Toolkit {VERSION}")
    if desired.bundle:
        return (install,)
    return (*repositories.add(repository(system, desired.nvidia_url), facts), install)


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
