"""dnf in scripts: it never asks, takes no weak dependencies, and with a bundle reads nothing but the bundle."""

from __future__ import annotations

import shlex

from clusterkit.provision.steps.shell import NETWORK
from clusterkit.provision.steps.step import DesiredState
from clusterkit.provision.steps.systems import System


def prelude(system: System, desired: DesiredState) -> str:
    """Return a script that defines dnf_install NAME…. dnf itself waits for its lock and undoes what fails."""
    options = ["-y", "--setopt=install_weak_deps=False", "--setopt=retries=3", "--setopt=timeout=60"]
    prepare = ""
    if desired.bundle:
        folder = f"{desired.bundle.rstrip('/')}/packages/{system.name}"
        prepare = f"""bundle={shlex.quote(folder)}
if ! [ -e "$bundle/repodata/repomd.xml" ]; then
  echo 'the bundle has no packages for {system.name}; build it again with --os {system.name}' >&2
  exit 1
fi
"""
        options += [
            "--disablerepo=*",
            f"--repofrompath=clusterkit-bundle,file://{folder}",
            "--enablerepo=clusterkit-bundle",
            "--setopt=clusterkit-bundle.gpgcheck=0",
        ]
    flags = " ".join(map(shlex.quote, options))
    return f"""{NETWORK}umask 022
{prepare}dnf_install() {{ dnf {flags} install "$@" </dev/null; }}
"""


def repository(name: str, title: str, base_url: str, key: str, *, signed: str) -> bytes:
    """Return the text of a .repo file. signed: what the owner signs, `packages` or `metadata`."""
    return (
        f"[{name}]\nname={title}\nbaseurl={base_url}\nenabled=1\n"
        f"gpgcheck={int(signed == 'packages')}\nrepo_gpgcheck={int(signed == 'metadata')}\ngpgkey=file://{key}\n"
    ).encode()
