"""apt in scripts: it waits for locks, never asks, repairs what a killed run left, and reads only the given sources."""

from __future__ import annotations

import shlex
from urllib.parse import quote

from clusterkit.provision.steps.shell import NETWORK, STATE
from clusterkit.provision.steps.step import DesiredState
from clusterkit.provision.steps.systems import System

MIRROR_FOLDER = "/etc/apt/clusterkit"
"""Folder with package sources that only our own runs of apt read. The host's own sources stay as they are."""
MIRROR_FILE = f"{MIRROR_FOLDER}/distribution.sources"

_OPTIONS = (
    "DPkg::Lock::Timeout=300",
    "Acquire::Retries=3",
    "Dpkg::Options::=--force-confdef",
    "Dpkg::Options::=--force-confold",
    "APT::Install-Recommends=false",
    "APT::Get::Assume-Yes=true",
)


def prelude(system: System, desired: DesiredState) -> str:
    """Return a script that defines apt_get, apt_update and apt_install NAME…, and repairs an interrupted dpkg."""
    options = list(_OPTIONS)
    prepare = ""
    if desired.bundle:
        options += [
            f"Dir::Etc::sourcelist={STATE}/apt/bundle.list",
            "Dir::Etc::sourceparts=/dev/null",
            f"Dir::State::lists={STATE}/apt/lists",
            "Dir::Cache::pkgcache=",
            "Dir::Cache::srcpkgcache=",
        ]
        prepare = _open_bundle(system, desired)
    elif desired.apt_mirror:
        options += [
            "Dir::Etc::sourcelist=/dev/null",
            f"Dir::Etc::sourceparts={MIRROR_FOLDER}",
            "APT::Get::List-Cleanup=false",
        ]
        prepare = f"""for file in /etc/apt/sources.list.d/clusterkit-*.sources; do
  if [ -e "$file" ]; then ln -sf "$file" {MIRROR_FOLDER}/; fi
done
"""
    if not desired.bundle:
        # Without ca-certificates the host has no list of trusted authorities yet, so ours is the only one.
        prepare += """ours=/usr/local/share/ca-certificates/clusterkit.crt
trust=
if [ -e "$ours" ] && ! [ -e /etc/ssl/certs/ca-certificates.crt ]; then trust="-o Acquire::https::CaInfo=$ours"; fi
"""
    else:
        prepare += "trust=\n"
    flags = " ".join(f"-o {shlex.quote(option)}" for option in options)
    return f"""{NETWORK}export DEBIAN_FRONTEND=noninteractive NEEDRESTART_MODE=a
umask 022
{prepare}# shellcheck disable=SC2086
apt_get() {{ apt-get -q $trust {flags} "$@" </dev/null; }}
{_FUNCTIONS}"""


def mirror_sources(system: System, mirror: str) -> bytes:
    """Return the distribution's package sources at a mirror, as deb822.

    Most Debian mirrors whose address ends in /debian have /debian-security beside it; we expect it there.
    """
    mirror = mirror.rstrip("/")
    if system.id == "ubuntu":
        suites = " ".join(system.codename + pocket for pocket in ("", "-updates", "-security"))
        parts = [(mirror, suites, "main universe", "/usr/share/keyrings/ubuntu-archive-keyring.gpg")]
    else:
        keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"
        parts = [(mirror, f"{system.codename} {system.codename}-updates", "main", keyring)]
        if mirror.endswith("/debian"):
            parts.append((f"{mirror}-security", f"{system.codename}-security", "main", keyring))
    return "\n".join(source(*part) for part in parts).encode()


def source(uri: str, suites: str, components: str, keyring: str) -> str:
    """Return one deb822 paragraph. A flat repository has the suite `/` and no components."""
    return (
        f"Types: deb\nURIs: {uri}\nSuites: {suites}\n"
        + (f"Components: {components}\n" if components else "")
        + f"Architectures: amd64\nSigned-By: {keyring}\n"
    )


def _open_bundle(system: System, desired: DesiredState) -> str:
    folder = f"{desired.bundle.rstrip('/')}/packages/{system.name}"
    return f"""bundle={shlex.quote(folder)}
if ! [ -e "$bundle/Packages" ]; then
  echo 'the bundle has no packages for {system.name}; build it again with --os {system.name}' >&2
  exit 1
fi
mkdir -p {STATE}/apt/lists/partial
echo {shlex.quote(f"deb [trusted=yes] file:{quote(folder)} ./")} >{STATE}/apt/bundle.list
"""


_FUNCTIONS = """updated=
apt_update() {
  tries=0
  until updated=$(apt_get update 2>&1); do
    case $updated in
      *'Could not get lock'* | *'Unable to lock'*) tries=$((tries + 1)) ;;
      *) return 0 ;; # a broken list of somebody else's often does no harm; apt_install shows it where it does
    esac
    if [ "$tries" -ge 60 ]; then break; fi
    sleep 5
  done
}
apt_install() {
  if apt_get install "$@"; then return 0; fi
  printf '%s\\n' "$updated" | grep -E '^[EW]: ' >&2 || :
  return 1
}
unfinished() {
  audit=$(dpkg --audit) || [ -n "$audit" ] || exit 1
  updates=$(find /var/lib/dpkg/updates -name '[0-9]*') || exit 1
  [ -n "$audit$updates" ]
}
if unfinished; then
  tries=0
  until said=$(dpkg --force-confdef --force-confold --configure -a 2>&1 </dev/null); do
    case $said in *lock*) tries=$((tries + 1)) ;; *) break ;; esac
    if [ "$tries" -ge 60 ]; then break; fi
    sleep 5
  done
  printf '%s\\n' "$said"
  if unfinished; then
    apt_update
    apt_get --fix-broken install
  fi
fi
"""
