"""Parts of the scripts that steps return. After a kill at any point each can be run again.

A file gets its name only when it is complete: it is written to a hidden name beside it, which apt and dnf overlook,
compared with its checksum, and renamed. Its content comes over stdin, so that no script shows a secret.
"""

from __future__ import annotations

import shlex
from hashlib import sha256
from pathlib import PurePosixPath

from clusterkit.provision.facts.model import Facts
from clusterkit.provision.steps.step import Action

STATE = "/var/lib/clusterkit"
"""Folder on a host for what clusterkit has to remember there."""
PROXY_ENV = "/etc/clusterkit/proxy.env"
"""Proxies for curl, dnf and git, as a file that sh reads."""


def sha(content: bytes) -> str:
    """Return the SHA-256 of a file's content, as `Facts.files` has it."""
    return sha256(content).hexdigest()


SECRET = 0o600


def differs(facts: Facts, path: str, content: bytes | None) -> bool:
    """Return whether a file has to be written (`content`) or removed (None)."""
    return facts.files.get(path) != (None if content is None else sha(content))


def secret_mode(content: bytes) -> int:
    """Return the mode of a file: for root alone where an address in it has a user and password."""
    return SECRET if b"@" in content else 0o644


def restore_mode(facts: Facts, what: str, path: str, mode: int = 0o644) -> tuple[Action, ...]:
    """Return the action that gives a file of ours its mode again, should somebody have changed it."""
    if path not in facts.files or facts.modes.get(path, mode) == mode:
        return ()
    title = f"put back the mode of {what} ({path}: {facts.modes[path]:04o}, wanted {mode:04o})"
    return (Action(title, f"chmod {mode:04o} {shlex.quote(path)}\n", timeout=60.0),)


def restore_secret_mode(facts: Facts, what: str, path: str, content: bytes) -> tuple[Action, ...]:
    """Do as `restore_mode` for a file that may hold a password, or did when it was written: 0600 stays 0600."""
    secret = facts.modes.get(path) == SECRET or secret_mode(content) == SECRET
    return restore_mode(facts, what, path, SECRET if secret else 0o644)


def write_file(
    title: str, path: str, content: bytes, *, mode: int = 0o644, before: str = "", after: str = ""
) -> Action:
    """Return the action that writes a file.

    Args:
        before: script that runs just before the file gets its name.
        after: script that runs just after.
    """
    folder, temporary = PurePosixPath(path).parent, PurePosixPath(path).parent / f".{PurePosixPath(path).name}.new"
    return Action(
        title,
        f"""umask 022
mkdir -p {shlex.quote(str(folder))}
new={shlex.quote(str(temporary))}
trap 'rm -f "$new"' EXIT
(umask 077 && cat >"$new")
if [ "$(sha256sum <"$new" | cut -d ' ' -f 1)" != {sha(content)} ]; then
  echo 'the connection broke while {PurePosixPath(path).name} was sent; nothing was changed' >&2
  exit 1
fi
chmod {mode:04o} "$new"
{before}mv -f "$new" {shlex.quote(path)}
{after}""",
        stdin=content,
        timeout=120.0,
    )


def place_file(
    facts: Facts, what: str, path: str, content: bytes | None, *, mode: int = 0o644, before: str = "", after: str = ""
) -> tuple[Action, ...]:
    """Return the action that writes, changes or removes (None) a file of ours, or restores its mode; often none."""
    if not differs(facts, path, content):
        return restore_mode(facts, what, path, mode)
    if content is None:
        script = f"{before}rm -f {shlex.quote(path)}\n{after}"
        return (Action(f"remove {what} ({path})", script, timeout=120.0),)
    verb = "change" if path in facts.files else "set"
    return (write_file(f"{verb} {what} ({path})", path, content, mode=mode, before=before, after=after),)


NETWORK = f"""export LC_ALL=C
if [ -r {PROXY_ENV} ]; then . {PROXY_ENV}; fi
if command -v cloud-init >/dev/null 2>&1; then timeout 300 cloud-init status --wait >/dev/null 2>&1 || :; fi
"""
"""Start of every script that installs something: it reads our proxies and waits for the end of a first boot."""


def fetch_key(url: str, target: str, fingerprint: str) -> str:
    """Return a script that stores a signing key: of all that `url` serves, only the key with this fingerprint."""
    folder = shlex.quote(str(PurePosixPath(target).parent))
    return f"""umask 022
url={shlex.quote(url)}
mkdir -p {folder}
ring=$(mktemp -d)
trap 'rm -rf "$ring"' EXIT
# Not as an argument, which every user of the host can read: a mirror's address may have a password in it.
curl -fsSL --retry 3 --connect-timeout 20 --max-time 120 -o "$ring/served" --config - <<URL
url = "$url"
URL
gpg --homedir "$ring" --batch --quiet --import "$ring/served" >"$ring/said" 2>&1 || :
gpg --homedir "$ring" --batch --quiet --armor --export {fingerprint} >"$ring/key" 2>>"$ring/said" || :
if ! [ -s "$ring/key" ]; then
  echo "the key that $url serves is not the one with fingerprint {fingerprint}; nothing was installed" >&2
  cat "$ring/said" >&2
  exit 1
fi
chmod 0644 "$ring/key"
mv -f "$ring/key" {folder}/.{PurePosixPath(target).name}.new
mv -f {folder}/.{PurePosixPath(target).name}.new {shlex.quote(target)}
"""
