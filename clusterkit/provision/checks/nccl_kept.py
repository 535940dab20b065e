"""The NCCL settings that an all-reduce has shown to work: kept in each host's container, where runs find them."""

from __future__ import annotations

import asyncio
import re
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePosixPath

from clusterkit.common.finding import Finding, Level
from clusterkit.ssh.api import HostError, Result, Session, or_error
from trainer.launch.nccl_settings import FILE, KeptSettings, parse, told

SECONDS = 45.0
AGAIN = "`clusterkit check --nccl` finds them anew."
_DEVICE = re.compile(r"\[\d+\]([\w.-]+:\d+)/(?:IB|RoCE)")


def settings_of(printed: str, remedy: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of a host whose ranks went through.

    Args:
        printed: by its ranks, with NCCL_DEBUG=INFO.
        remedy: what they were given to go through.
    """
    found = {}
    if interface := re.search(r"NCCL INFO Bootstrap ?: ?Using ([\w.-]+):", printed):
        # With "=", NCCL takes this interface only; without, eth1 matches eth10 too.
        found = {"NCCL_SOCKET_IFNAME": f"={interface[1]}", "GLOO_SOCKET_IFNAME": interface[1]}
    networks = re.findall(r"NCCL INFO NET/IB : Using (.*)", printed)
    if networks and "NCCL INFO Using network IB" in printed:
        devices = sorted({device for line in networks for device in _DEVICE.findall(line)})
        found |= {"NCCL_IB_HCA": "=" + ",".join(devices)} if devices else {}
    return {**found, **remedy}


def keep_script(kept: KeptSettings) -> str:
    """Return sh for a container that keeps these settings; the file is there as a whole or not at all."""
    return (
        f"set -eu\nmkdir -p {PurePosixPath(FILE).parent}\n"
        f"printf '%s\\n' {shlex.quote(kept.as_json())} >{FILE}.new\nmv {FILE}.new {FILE}\n"
    )


async def keep(
    sessions: Iterable[Session],
    containers: Mapping[str, str],
    settings: Mapping[str, Mapping[str, str]],
    *,
    root: bool = True,
) -> list[Finding]:
    """Keep the settings of every host in its container; find what runs get from now on, and where that failed.

    Args:
        containers: name of the container, by host.
    """
    made = time.time()
    written = await _in_containers(
        sessions, containers, lambda host: keep_script(KeptSettings(settings.get(host, {}), made)), root
    )
    failed = {host: answer for host, answer in written.items() if isinstance(answer, str)}
    findings = _what_runs_get({host: settings[host] for host in settings if host not in failed}, "")
    return findings + [
        Finding(host, "nccl", Level.WARN, f"what was found could not be kept for runs: {reason}", AGAIN)
        for host, reason in failed.items()
    ]


async def forget(sessions: Iterable[Session], containers: Mapping[str, str], *, root: bool = True) -> None:
    """Remove what earlier checks have kept: the hosts do not reach one another with it any more."""
    await _in_containers(sessions, containers, lambda _: f"rm -f {FILE}", root)


async def kept_findings(
    sessions: Sequence[Session], containers: Mapping[str, str], *, root: bool = True
) -> list[Finding]:
    """Return what runs get on these hosts from an earlier all-reduce; nothing where there was none."""
    read = await _in_containers(sessions, containers, lambda _: f"[ ! -e {FILE} ] || cat {FILE}", root)
    kept = {host: parse(answer.stdout) for host, answer in read.items() if not isinstance(answer, str)}
    known = {host: one for host, one in kept.items() if one is not None and one.settings}
    if not known:
        return []
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime(min(one.made for one in known.values())))
    without = [host for host, one in kept.items() if one is None]
    findings = _what_runs_get({host: one.settings for host, one in known.items()}, f", from the all-reduce of {made}")
    if without:
        message = f"no settings are kept on {', '.join(without)}, which have a new container or joined since {made}"
        findings.append(Finding("", "nccl", Level.WARN, message, AGAIN))
    return findings


def _what_runs_get(settings: Mapping[str, Mapping[str, str]], since: str) -> list[Finding]:
    hosts: dict[str, list[str]] = {}
    for host, one in settings.items():
        if one:
            hosts.setdefault(told(one), []).append(host)
    return [
        Finding("", "nccl", Level.OK, f"dispatched runs get {text} on {', '.join(names)}{since}")
        for text, names in hosts.items()
    ]


async def _in_containers(
    sessions: Iterable[Session], containers: Mapping[str, str], script: Callable[[str], str], root: bool
) -> dict[str, Result | str]:
    """Run sh in the hosts' containers; returns the result by host, or why there is none."""
    able = [session for session in sessions if containers.get(session.host.name)]

    async def run(session: Session) -> Result | str:
        name = session.host.name
        command = shlex.join(["docker", "exec", containers[name], "sh", "-c", script(name)])
        found = await or_error(session.run(f"timeout -k 5 {SECONDS:.0f} {command} </dev/null", root=root))
        if isinstance(found, HostError):
            return found.message
        return found if found.ok else " ".join(found.stderr.split())[-300:] or f"exit code {found.exit_code}"

    found = await asyncio.gather(*(run(session) for session in able))
    return {session.host.name: one for session, one in zip(able, found, strict=True)}
