"""Base packages, and before them what it takes to reach packages: proxies, certificate authorities, a mirror."""

from __future__ import annotations

import shlex
from urllib.parse import urlsplit

from clusterkit.provision.facts.model import Facts
from clusterkit.provision.steps import apt, dnf
from clusterkit.provision.steps.dockerd_scripts import DOCKERD_ENV
from clusterkit.provision.steps.shell import PROXY_ENV, STATE, differs, place_file, secret_mode
from clusterkit.provision.steps.step import Action, DesiredState
from clusterkit.provision.steps.systems import DEB, System, has_systemd, system_of

APT_PROXY = "/etc/apt/apt.conf.d/95clusterkit"
DOCKERD_DROP_IN = "/etc/systemd/system/docker.service.d/clusterkit-proxy.conf"
CA_FILES = {
    "deb": "/usr/local/share/ca-certificates/clusterkit.crt",
    "rpm": "/etc/pki/ca-trust/source/anchors/clusterkit.pem",
}
CA_PENDING = f"{STATE}/pending/certificates"
"""Exists from a change of CA_FILES until the host's list of trusted authorities has been built again."""

INSTALL_PENDING = f"{STATE}/pending/packages"
"""Exists while packages are installed: a killed run may leave some of them unpacked only."""

# What has to be there, by the command or file that shows it: a minimal image may have it from another package
# (RHEL's curl-minimal), and installing the usual one would then fail.
_BY_COMMAND = {"curl": "curl", "git": "git", "git-lfs": "git-lfs", "zstd": "zstd"}
BASE_PACKAGES = {
    "deb": ("ca-certificates", "gnupg", *_BY_COMMAND.values()),
    "rpm": ("ca-certificates", "gnupg2", *_BY_COMMAND.values()),
}


def plan(facts: Facts, desired: DesiredState) -> tuple[Action, ...]:
    """Set proxies, certificates and mirror, then install the base packages that are missing."""
    system = system_of(facts)
    return (
        *_proxies(system, facts, desired),
        *_certificates(system, facts, desired),
        *_mirror(system, facts, desired),
        *_packages(system, facts, desired),
    )


def proxy_settings(desired: DesiredState) -> dict[str, str]:
    """Return the environment variables of the proxies; none without a proxy."""
    if not (desired.http_proxy or desired.https_proxy):
        return {}
    pairs = {"http_proxy": desired.http_proxy, "https_proxy": desired.https_proxy, "no_proxy": desired.no_proxy}
    return {spelling: value for name, value in pairs.items() if value for spelling in (name, name.upper())}


def certificates_change(facts: Facts, desired: DesiredState) -> bool:
    """Return whether the list of trusted authorities changes; a running Docker reads it only at its start."""
    path = CA_FILES[system_of(facts).family]
    return differs(facts, path, desired.ca_bundle or None) or CA_PENDING in facts.files


def _proxies(system: System, facts: Facts, desired: DesiredState) -> tuple[Action, ...]:
    settings = proxy_settings(desired)
    env = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in settings.items()).encode()
    actions = place_file(facts, "the proxy for downloads", PROXY_ENV, env if settings else None, mode=secret_mode(env))
    if system.family != DEB:
        return actions
    conf = _apt_conf(desired).encode()
    return (
        *actions,
        *place_file(facts, "apt's proxy", APT_PROXY, conf if settings else None, mode=secret_mode(conf)),
    )


def _apt_conf(desired: DesiredState) -> str:
    lines = []
    direct = [name.strip().lstrip(".") for name in desired.no_proxy.split(",")]
    for scheme, address in (("http", desired.http_proxy), ("https", desired.https_proxy)):
        if address:
            lines.append(f'Acquire::{scheme}::Proxy "{_in_quotes(address)}";')
            # apt knows exceptions by whole host names only: no networks, no wildcards.
            lines += [
                f'Acquire::{scheme}::Proxy::{name} "DIRECT";'
                for name in direct
                if name and all(character.isalnum() or character in ".-" for character in name)
            ]
    return "".join(line + "\n" for line in lines)


def _in_quotes(address: str) -> str:
    return address.replace("\\", "%5C").replace('"', "%22").replace("\n", "")


def _certificates(system: System, facts: Facts, desired: DesiredState) -> tuple[Action, ...]:
    update = "update-ca-certificates" if system.family == DEB else "update-ca-trust"
    rebuild = f"""if command -v {update} >/dev/null 2>&1; then {update}; fi
rm -f {CA_PENDING}
"""
    # Without ca-certificates there is nothing to build yet: its installation reads our file.
    before = f"""mkdir -p {STATE}/pending
: >{CA_PENDING}
if command -v dockerd >/dev/null 2>&1; then echo restart >{STATE}/pending/docker; fi
"""
    path = CA_FILES[system.family]
    actions = place_file(
        facts, "further certificate authorities", path, desired.ca_bundle or None, before=before, after=rebuild
    )
    if CA_PENDING in facts.files and not differs(facts, path, desired.ca_bundle or None):
        return (*actions, Action("build the list of trusted authorities", rebuild, timeout=120.0))
    return actions


def _mirror(system: System, facts: Facts, desired: DesiredState) -> tuple[Action, ...]:
    if system.family != DEB:
        return ()
    content = apt.mirror_sources(system, desired.apt_mirror) if desired.apt_mirror and not desired.bundle else None
    what = f"the package mirror {urlsplit(desired.apt_mirror).hostname or ''}".rstrip()
    return place_file(facts, what, apt.MIRROR_FILE, content, mode=secret_mode(content or b""))


def _packages(system: System, facts: Facts, desired: DesiredState) -> tuple[Action, ...]:
    missing = [package for command, package in _BY_COMMAND.items() if command not in facts.commands]
    if "gpg" not in facts.commands:
        missing.insert(0, "gnupg" if system.family == DEB else "gnupg2")
    if "ca-certificates" not in facts.packages:
        missing.insert(0, "ca-certificates")
    if missing:
        return (install_action(system, desired, tuple(missing)),)
    if INSTALL_PENDING in facts.files:
        return (Action("finish an interrupted installation", _installing(system, desired, ""), timeout=1800.0),)
    return ()


def install_action(
    system: System, desired: DesiredState, packages: tuple[str, ...], *, title: str = "", bundled: str = ""
) -> Action:
    """Return the action that installs packages from the host's sources, a mirror or a bundle.

    Args:
        desired: names mirror and bundle.
        packages: names, for the host's sources or the mirror.
        title: of the action; "install NAMES" where it is empty.
        bundled: set of the bundle whose list of names is taken in place of `packages` where there is a bundle.
    """
    names = " ".join(map(shlex.quote, packages))
    check = ""
    if desired.bundle and bundled:
        names, check = "$names", f'names=$(cat "$bundle/{bundled}.names")\n# shellcheck disable=SC2086\n'
    command = f"apt_update\n{check}apt_install {names}\n" if system.family == DEB else f"{check}dnf_install {names}\n"
    bare = ", ".join(name.partition("=")[0] for name in packages)
    origin = " from the bundle" if desired.bundle else ""
    retries = 0 if desired.bundle else 2
    return Action(
        (title or f"install {bare}") + origin, _installing(system, desired, command), timeout=1800.0, retries=retries
    )


def _installing(system: System, desired: DesiredState, command: str) -> str:
    prelude = apt.prelude(system, desired) if system.family == DEB else dnf.prelude(system, desired)
    return f"mkdir -p {STATE}/pending\n: >{INSTALL_PENDING}\n{prelude}{command}rm -f {INSTALL_PENDING}\n"


def docker_environment(facts: Facts, desired: DesiredState) -> tuple[str, bytes | None]:
    """Return the path of the file that gives dockerd its proxies, and its content; None where there is no proxy."""
    settings = {name: value for name, value in proxy_settings(desired).items() if name.isupper()}
    if has_systemd(facts):
        content = "[Service]\n" + "".join(_unit_line(name, value) for name, value in settings.items())
        return DOCKERD_DROP_IN, content.encode() if settings else None
    content = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in settings.items())
    return DOCKERD_ENV, content.encode() if settings else None


def _unit_line(name: str, value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'Environment="{name}={escaped}"\n'
