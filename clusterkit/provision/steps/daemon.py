"""Docker's settings: ours added to the user's in /etc/docker/daemon.json, and dockerd's proxies."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from clusterkit.provision.facts.model import Container, Facts, version_numbers
from clusterkit.provision.steps import dockerd_scripts
from clusterkit.provision.steps.packages import certificates_change, docker_environment
from clusterkit.provision.steps.shell import STATE, differs, place_file, secret_mode, sha
from clusterkit.provision.steps.step import Action, DesiredState, Refused
from clusterkit.provision.steps.systems import has_systemd, system_of
from clusterkit.provision.steps.toolkit import uses_gpus

DAEMON_JSON = "/etc/docker/daemon.json"
PENDING = f"{STATE}/pending/docker"
"""Holds `restart` or `reload` from the moment settings are written until the engine has taken them up."""
CLUSTER_LABEL = "clusterkit.cluster"

NVIDIA_RUNTIME = {"runtimes": {"nvidia": {"args": [], "path": "nvidia-container-runtime"}}}
CDI_FEATURE = {"features": {"cdi": True}}
CDI_BY_DEFAULT = (28, 2)  # engines from here on need no feature flag for CDI
# What dockerd takes up on SIGHUP. `features` is on its list, yet CDI is set up at the start only.
_RELOADABLE = {"runtimes"}


def plan(facts: Facts, desired: DesiredState) -> tuple[Action, ...]:
    """Write the settings that our containers need, then reload or restart the engine once.

    All settings of the user's stay.

    Raises:
        Refused: daemon.json cannot be read, or a restart would stop other people's containers.
    """
    system_of(facts)
    settings, effect = _settings(facts, desired)
    mark = f"mkdir -p {STATE}/pending\necho restart >{PENDING}\n"
    path, proxies = docker_environment(facts, desired)
    environment = place_file(facts, "Docker's proxy", path, proxies, mode=secret_mode(proxies or b""), before=mark)
    needs = {effect} | ({"restart"} if differs(facts, path, proxies) else set()) | _left_over(facts)
    if "dockerd" in facts.commands and certificates_change(facts, desired):
        needs.add("restart")
    needs -= {""}
    if not needs:
        return environment  # at most a file's mode, which the engine does not read
    return (
        *settings,
        *environment,
        _apply(facts, desired, "restart" if "restart" in needs else "reload", settings),
    )


def merge(current: Mapping[str, Any], desired: Mapping[str, Any]) -> dict[str, Any]:
    """Return `current` with the keys that it lacks added from `desired`, at every level. The user's values stay."""
    merged = dict(current)
    for key, value in desired.items():
        if key not in merged:
            merged[key] = value
        elif isinstance(value, Mapping) and isinstance(merged[key], Mapping):
            merged[key] = merge(merged[key], value)
    return merged


def read_settings(text: str | None) -> dict[str, Any]:
    """Parse daemon.json; a missing or empty one is {}.

    Raises:
        Refused: it is no JSON object; the message names line and column.
    """
    if text is None or not text.strip():
        return {}
    try:
        settings = json.loads(text)
    except ValueError as error:
        raise Refused(
            f"{DAEMON_JSON} is not valid JSON: {_place(text, error)}",
            "Correct it by hand (Docker itself cannot start with it either), then run the command again.",
        ) from None
    if not isinstance(settings, dict):
        raise Refused(f"{DAEMON_JSON} holds no JSON object", "Correct it by hand, then run the command again.")
    return settings


def write_script(content: bytes, old: str | None, effect: str, path: str = DAEMON_JSON, pending: str = PENDING) -> str:
    """Return a script that replaces daemon.json by `content`, which it reads from stdin.

    The old file stays as a copy named after its checksum. The script changes nothing where the file is not the one that
    was planned on, or where dockerd rejects the new one (engines before 23.0 cannot tell; they get any valid JSON).

    Args:
        old: SHA-256 of the file that is there; None where there is none.
        effect: `reload` or `restart`, whichever makes the change effective.
        pending: file that holds `effect` until the engine has taken it up.
    """
    return f"""umask 022
target={shlex.quote(path)}
if [ -L "$target" ]; then target=$(readlink -f "$target"); fi
folder=$(dirname "$target")
mkdir -p "$folder" {shlex.quote(str(pending).rpartition("/")[0])}
now=
if [ -e "$target" ]; then
  sum=$(sha256sum <"$target")
  now=${{sum%% *}}
fi
new=$folder/.daemon.json.new
trap 'rm -f "$new" "$folder/.daemon.json.old"' EXIT
if [ "$now" = {sha(content)} ]; then
  cat >/dev/null
  exit 0
fi
if [ "$now" != {shlex.quote(old or "")} ]; then
  cat >/dev/null
  echo "$target was changed by somebody else meanwhile; run the command again" >&2
  exit 1
fi
if [ -n "$now" ]; then cp -p "$target" "$new"; fi
cat >"$new"
if [ "$(sha256sum <"$new" | cut -d ' ' -f 1)" != {sha(content)} ]; then
  echo 'the connection broke while daemon.json was sent; nothing was changed' >&2
  exit 1
fi
if command -v dockerd >/dev/null 2>&1; then
  if ! said=$(dockerd --validate --config-file "$new" 2>&1); then
    case $said in
      *'unknown flag'*) ;;
      *)
        printf 'dockerd rejects the new settings; nothing was changed: %s\\n' "$said" >&2
        exit 1
        ;;
    esac
  fi
fi
if [ -n "$now" ]; then
  cp -p "$target" "$folder/.daemon.json.old"
  mv -f "$folder/.daemon.json.old" {_backup(path, old)}
fi
owed=
if [ -e {shlex.quote(pending)} ]; then owed=$(cat {shlex.quote(pending)}); fi
if [ "$owed" != restart ]; then echo {effect} >{shlex.quote(pending)}; fi
mv -f "$new" "$target"
"""


def _settings(facts: Facts, desired: DesiredState) -> tuple[tuple[Action, ...], str]:
    """Return the action that writes daemon.json, and what makes the change effective: reload, restart or nothing."""
    current = read_settings(facts.docker.daemon_json)
    settings_of_runtime: dict[str, Any] = {}
    if uses_gpus(facts, desired):
        # An engine that is yet to be installed may be the distribution's older one; newer ones ignore the flag.
        modern = facts.docker.server and version_numbers(facts.docker.server, 2) >= CDI_BY_DEFAULT
        settings_of_runtime = NVIDIA_RUNTIME if modern else {**NVIDIA_RUNTIME, **CDI_FEATURE}
    merged = merge(current, settings_of_runtime)
    if merged == current:
        return (), ""
    changed = {key for key, value in merged.items() if current.get(key) != value}
    effect = "reload" if changed <= _RELOADABLE else "restart"
    content = (json.dumps(merged, indent=4, ensure_ascii=False) + "\n").encode()
    script = write_script(content, facts.files.get(DAEMON_JSON), effect)
    title = f"add {', '.join(_added(current, merged))} to {DAEMON_JSON}"
    return (Action(title, script, stdin=content, timeout=120.0),), effect


def _apply(facts: Facts, desired: DesiredState, effect: str, settings: tuple[Action, ...]) -> Action:
    functions = dockerd_scripts.functions(has_systemd(facts))
    if effect == "reload":
        return Action("reload Docker's settings", f"{functions}reload\nready\nrm -f {PENDING}\n", timeout=180.0)
    running = [container for container in facts.docker.containers if container.state == "running"]
    foreign = [container for container in running if container.labels.get(CLUSTER_LABEL) != desired.cluster.name]
    survive = bool(read_settings(facts.docker.daemon_json).get("live-restore"))
    spared = desired.force or survive
    if foreign and not spared:
        raise Refused(
            f"Docker has to be restarted, which would stop containers that are not ours: {_names(foreign)}",
            'Stop them, or let them be stopped with --force, or set "live-restore": true in '
            f"{DAEMON_JSON} and reload Docker (`systemctl reload docker`), which lets containers outlive a restart.",
        )
    title = "restart Docker"
    if running and not survive:
        title += f" (stops {_names(running)})"
    check = "" if spared else dockerd_scripts.no_foreign_containers(desired.cluster.name)
    return Action(title, f"{functions}{check}{_restart(facts, bool(settings))}", timeout=300.0)


def _restart(facts: Facts, rewrote: bool) -> str:
    undo = ""
    if rewrote:
        old = facts.files.get(DAEMON_JSON)
        temporary = "/etc/docker/.daemon.json.old"
        back = (
            f"cp -p {_backup(DAEMON_JSON, old)} {temporary}\n  mv -f {temporary} {DAEMON_JSON}"
            if old
            else f"rm -f {DAEMON_JSON}"
        )
        undo = f"""  {back}
  restart || :
  if ready; then
    rm -f {PENDING}
    echo 'the old settings were put back, and with them Docker answers' >&2
  fi
"""
    return f"""if ! restart || ! ready; then
  echo 'Docker does not come up after the change; its last words:' >&2
  words
{undo}  exit 1
fi
rm -f {PENDING}
"""


def _left_over(facts: Facts) -> set[str]:
    """Return what an earlier run that was cut short did not do any more: reload or restart."""
    if PENDING not in facts.files:
        return set()
    return {"restart"} if differs(facts, PENDING, b"reload\n") else {"reload"}


def _backup(path: str, old: str | None) -> str:
    return shlex.quote(f"{path}.before-{(old or '')[:12]}")


def _added(current: Mapping[str, Any], merged: Mapping[str, Any]) -> list[str]:
    names = []
    for key, value in merged.items():
        if key not in current:
            names += [f"{key}.{inner}" for inner in value] if isinstance(value, Mapping) else [key]
        elif current[key] != value:
            names += [f"{key}.{inner}" for inner in value if inner not in current[key]]
    return names


def _names(containers: list[Container]) -> str:
    names = [container.name for container in containers]
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _place(text: str, error: ValueError) -> str:
    if not isinstance(error, json.JSONDecodeError):
        return str(error)
    line = text.splitlines()[error.lineno - 1].strip() if text.splitlines()[error.lineno - 1 :] else ""
    return f"{error.msg} in line {error.lineno}, column {error.colno}: {line[:100]}"
