"""Base packages, and before them what reaching packages may need: proxies, certificate authorities, a mirror."""

from __future__ import annotations

import shlex
from urllib.parse import urlsplit

from clusterkit.hosts.model import Host
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
"""Exists while the certificates of CA_FILES have changed and the host's trust list has not been built again."""

INSTALL_PENDING = f"{STATE}/pending/packages"
"""Exists while packages are being installed: a killed run may leave some unpacked and none of them missing."""

# What has to be there, by the command or file that shows it: a minimal image may have it from another package
# (RHEL's curl-minimal), and installing the usual one would then fail.
_BY_COMMAND = {"curl": "curl", "git": "git", "git-lfs": "git-lfs", "zstd": "zstd"}
BASE_PACKAGES = {
    "deb": ("ca-certificates", "gnupg", *_BY_COMMAND.values()),
    "rpm": ("ca-certificates", "gnupg2", *_BY_COMMAND.values()),
}


class PackagesStep:
    """Base packages and the way to them."""

    name = "packages"

    def plan(self, host: Host, facts: Facts, wish: DesiredState) -> tuple[Action, ...]:  # noqa: ARG002
        """Proxies, certificates, mirror, then the packages that are missing.

        Raises:
            Refused: the system is not supported.

        """
        system = system_of(facts)
        return (
            *_proxies(system, facts, wish),
            *_certificates(system, facts, wish),
            *_mirror(system, facts, wish),
            *_packages(system, facts, wish),
        )


def proxy_settings(wish: DesiredState) -> dict[str, str]:
    """Environment variables for the wished proxies; empty without one."""
    if not (wish.http_proxy or wish.https_proxy):
        return {}
    pairs = {"http_proxy": wish.http_proxy, "https_proxy": wish.https_proxy, "no_proxy": wish.no_proxy}
    return {spelling: value for name, value in pairs.items() if value for spelling in (name, name.upper())}


def certificates_change(facts: Facts, wish: DesiredState) -> bool:
    """Whether the host is about to trust other authorities: a running Docker notices only after a restart."""
    path = CA_FILES[system_of(facts).family]
    return differs(facts, path, wish.ca_bundle or None) or CA_PENDING in facts.files


def _proxies(system: System, facts: Facts, wish: DesiredState) -> tuple[Action, ...]:
    settings = proxy_settings(wish)
    env = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in settings.items()).encode()
    actions = place_file(facts, "the proxy for downloads", PROXY_ENV, env if settings else None, mode=secret_mode(env))
    if system.family != DEB:
        return actions
    conf = _apt_conf(wish).encode()
    return (
        *actions,
        *place_file(facts, "apt's proxy", APT_PROXY, conf if settings else None, mode=secret_mode(conf)),
    )


def _apt_conf(wish: DesiredState) -> str:
    lines = []
    direct = [name.strip().lstrip(".") for name in wish.no_proxy.split(",")]
    for scheme, address in (("http", wish.http_proxy), ("https", wish.https_proxy)):
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


def _certificates(system: System, facts: Facts, wish: DesiredState) -> tuple[Action, ...]:
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
        facts, "further certificate authorities", path, wish.ca_bundle or None, before=before, after=rebuild
    )
    if CA_PENDING in facts.files and not differs(facts, path, wish.ca_bundle or None):
        return (*actions, Action("build the list of trusted authorities", rebuild, timeout=120.0))
    return actions


def _mirror(system: System, facts: Facts, wish: DesiredState) -> tuple[Action, ...]:
    if system.family != DEB:
        return ()
    content = apt.mirror_sources(system, wish.apt_mirror) if wish.apt_mirror and not wish.bundle else None
    what = f"the package mirror {urlsplit(wish.apt_mirror).hostname or ''}".rstrip()
    return place_file(facts, what, apt.MIRROR_FILE, content, mode=secret_mode(content or b""))


def _packages(system: System, facts: Facts, wish: DesiredState) -> tuple[Action, ...]:
    missing = [package for command, package in _BY_COMMAND.items() if command not in facts.commands]
    if "gpg" not in facts.commands:
        missing.insert(0, "gnupg" if system.family == DEB else "gnupg2")
    if "ca-certificates" not in facts.packages:
        missing.insert(0, "ca-certificates")
    if missing:
        return (install_action(system, wish, tuple(missing)),)
    if INSTALL_PENDING in facts.files:
        return (Action("finish an interrupted installation", _installing(system, wish, ""), timeout=1800.0),)
    return ()


def install_action(
    system: System, wish: DesiredState, packages: tuple[str, ...], *, title: str = "", bundled: str = ""
) -> Action:
    """Install packages from whatever the wish names: the host's sources, a mirror, a bundle.

    bundled: set of the bundle whose own list of names goes before `packages`, where there is a bundle.
    """
    names = " ".join(map(shlex.quote, packages))
    check = ""
    if wish.bundle and bundled:
        names, check = "$names", f'names=$(cat "$bundle/{bundled}.names")\n# shellcheck disable=SC2086\n'
    command = f"apt_update\n{check}apt_install {names}\n" if system.family == DEB else f"{check}dnf_install {names}\n"
    bare = ", ".join(name.partition("=")[0] for name in packages)
    origin = " from the bundle" if wish.bundle else ""
    retries = 0 if wish.bundle else 2
    return Action(
        (title or f"install {bare}") + origin, _installing(system, wish, command), timeout=1800.0, retries=retries
    )


def _installing(system: System, wish: DesiredState, command: str) -> str:
    prelude = apt.prelude(system, wish) if system.family == DEB else dnf.prelude(system, wish)
    return f"mkdir -p {STATE}/pending\n: >{INSTALL_PENDING}\n{prelude}{command}rm -f {INSTALL_PENDING}\n"


def docker_environment(facts: Facts, wish: DesiredState) -> tuple[str, bytes | None]:
    """File that gives dockerd its proxies, and its content (None: no such file)."""
    settings = {name: value for name, value in proxy_settings(wish).items() if name.isupper()}
    if has_systemd(facts):
        lines = [_unit_line(name, value) for name, value in settings.items()]
        content = "[Service]\n" + "".join(lines)
        return DOCKERD_DROP_IN, content.encode() if settings else None
    content = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in settings.items())
    return DOCKERD_ENV, content.encode() if settings else None


def _unit_line(name: str, value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'Environment="{name}={escaped}"\n'
