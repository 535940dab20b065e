"""Parse the probe's text into Facts. What cannot be read stays empty."""

from __future__ import annotations

import re
from typing import Any

from clusterkit.provision.facts import parse_docker, parse_gpu
from clusterkit.provision.facts.model import Disk, Facts, Os
from clusterkit.provision.facts.sections import Section, Sections, _int, split

_SUDO_BY_UID = {0: "root"}
_FIRST_MATCH = re.compile(r"[0-9a-f]{64}")
_DF = re.compile(r"^(?P<source>.*?)\s+(?P<size>\d+)\s+\d+\s+(?P<free>-?\d+)\s+(?:\d+%|-)\s+(?P<mount>/.*)$")
# apt itself reads no file with another character in its name.
_SOURCE_LINE = re.compile(r"(/etc/apt/sources\.list(?:\.d/[\w.-]+\.(?:list|sources))?):(.*)", re.ASCII)
_CAP_SYS_RESOURCE = 1 << 24


def parse(text: str) -> Facts:
    """Return the facts of one probe. The caller fills in `clock_error`, `clock_offset` and `sudo` of other users."""
    return facts_of(split(text))


def facts_of(sections: Sections) -> Facts:
    """Do as `parse` for output that is already split into sections."""
    listeners = _listeners(sections["listeners"])
    mounts = _mounts(sections["mounts"])
    disks = {disk.path: disk for line in _disk_lines(sections) if (disk := _disk(line, mounts)) is not None}
    uid = _int(sections["uid"].first, -1)
    gpu = parse_gpu.parse(sections)
    return Facts(
        hostname=_line(sections["uname"], 0),
        machine_id=sections["machine-id"].first,
        clock=_clock(sections["clock"].first),
        uid=uid,
        sudo=_SUDO_BY_UID.get(uid, ""),
        os=_os(sections),
        cpus=_int(sections["cpus"].first),
        memory=_memory(sections["memory"].first),
        shm=disks["/dev/shm"].size if "/dev/shm" in disks else 0,
        disks=disks,
        addresses=_addresses(sections["addresses"]),
        route_to_head=_after(sections["route"].first, "src"),
        listening=_ports(sections["listening"]),
        packages=_packages(sections),
        commands=_pairs(sections["commands"]),
        files={path: digest for digest, path in (_two(line) for line in sections["files"].lines) if path},
        apt_sources=_apt_sources(sections["apt.sources"]),
        modes={path: int(mode, 8) for path, mode in map(_mode, sections["modes"].lines) if path},
        lock_holder=_lock_holder(sections["lock"]),
        hard_limits=_limits(sections["limits"]),
        docker=parse_docker.parse(sections),
        extra={"listeners": listeners} if listeners else {},
        **gpu,
    )


def _apt_sources(section: Section) -> dict[str, str]:
    """Return texts by path, from lines of `path:line`."""
    texts: dict[str, list[str]] = {}
    for line in section.lines:
        if found := _SOURCE_LINE.match(line):
            texts.setdefault(found[1], []).append(found[2])
    return {path: "\n".join(lines).rstrip("\n") for path, lines in texts.items()}


def _os(sections: Sections) -> Os:
    release: dict[str, str] = {}
    for line in sections["os"].lines:
        key, equals, value = line.partition("=")
        if equals:
            release[key.strip()] = value.strip().strip("\"'")
    # CentOS 6 and the like have only a sentence.
    name = release.get("PRETTY_NAME") or sections["os"].first
    return Os(
        id=release.get("ID", "").lower(),
        version=release.get("VERSION_ID", ""),
        codename=release.get("VERSION_CODENAME") or release.get("UBUNTU_CODENAME", ""),
        name=name,
        arch=_line(sections["uname"], 1),
        kernel=_line(sections["uname"], 2),
        init=sections["init"].first,
    )


def _clock(text: str) -> float:
    # busybox may not know %N and prints it.
    whole, _, rest = text.partition(".")
    try:
        return float(f"{int(whole)}.{rest}") if rest.isdigit() else float(int(whole))
    except ValueError:
        return 0.0


def _memory(text: str) -> int:
    words = text.split()
    return _int(words[1]) * 1024 if len(words) > 1 else 0


def _mounts(section: Section) -> dict[str, tuple[str, str]]:
    mounts = {}
    for line in section.lines:
        words = line.split(" ")
        if len(words) >= 4:
            # A later mount hides an earlier one at the same place.
            mounts[words[1].replace("\\040", " ")] = (words[2], words[3])
    return mounts


def _disk_lines(sections: Sections) -> list[str]:
    """Return one line a path, in the form of a probe that had to ask path by path."""
    if "disks" in sections:
        return sections["disks"].lines
    paths, inodes, usage = (sections[f"disks.{part}"].lines for part in ("paths", "inodes", "usage"))
    return ["|".join(parts) for parts in zip(paths, inodes, usage[1:], strict=False)]  # df begins with a heading


def _disk(line: str, mounts: dict[str, tuple[str, str]]) -> Disk | None:
    parts = line.split("|")
    if len(parts) != 4:
        return None
    path, existing, inodes, usage = parts
    if existing == "timeout":
        return Disk(path=path, timed_out=True)
    found = _DF.match(usage)
    if found is None:
        return Disk(path=path, exists=existing == path)
    fstype, options = mounts.get(found["mount"], ("", ""))
    total, _, free = inodes.partition(" ")
    return Disk(
        path=path,
        source=found["source"],
        fstype=fstype,
        size=int(found["size"]) * 1024,
        free=max(int(found["free"]), 0) * 1024,
        inodes_free=_int(free) if _int(total) > 0 else None,
        read_only="ro" in options.split(","),
        exists=existing == path,
    )


def _addresses(section: Section) -> dict[str, tuple[str, ...]]:
    addresses: dict[str, list[str]] = {}
    for line in section.lines:
        words = line.split()
        if len(words) > 3 and words[2] in {"inet", "inet6"}:
            addresses.setdefault(words[1].partition("@")[0], []).append(words[3].partition("/")[0])
        elif words and not words[0].endswith(":"):  # `hostname -I`, where there is no `ip`
            addresses.setdefault("", []).extend(words)
    return {interface: tuple(found) for interface, found in addresses.items()}


def _ports(section: Section) -> tuple[int, ...]:
    ports = set()
    for line in section.lines:
        words = line.split()
        # A line of /proc/net/tcp, or its local address alone.
        _, _, port = (words[1] if len(words) > 1 else line.strip()).rpartition(":")
        if re.fullmatch(r"[0-9A-F]{4}", port):
            ports.add(int(port, 16))
    return tuple(sorted(ports))


def _listeners(section: Section) -> dict[str, dict[str, Any]]:
    """Return who listens by port: process, pid, and container (empty for none)."""
    owners = {}
    for line in section.lines:
        port, _, rest = line.partition(" ")
        named = re.search(r'\(\("(?P<process>[^"]*)",pid=(?P<pid>\d+)', rest)
        if port.isdigit() and named is not None:
            container = _FIRST_MATCH.search(rest.rpartition(" ")[2])
            owners[port] = {
                "process": named["process"],
                "pid": int(named["pid"]),
                "container": container[0] if container else "",
            }
    return owners


def _packages(sections: Sections) -> dict[str, str]:
    packages = {}
    for line in sections["packages.dpkg"].lines + sections["packages.rpm"].lines:
        words = line.split("\t")
        if len(words) == 3 and words[2] == "installed":
            packages[words[0]] = words[1]
    return packages


def _mode(line: str) -> tuple[str, str]:
    """Return ('/a b', '750') for `750 /a b`; empty for anything else."""
    mode, _, path = line.partition(" ")
    return (path, mode) if re.fullmatch("[0-7]{1,4}", mode) else ("", "0")


def _lock_holder(section: Section) -> str:
    pid, _, name = section.first.partition(" ")
    return f"{name} (pid {pid})" if name else ""


def _limits(section: Section) -> dict[str, int | None]:
    """Return the hard limits that containers can get: those of the engine, or unlimited where it may raise them."""
    limits: dict[str, int | None] = {}
    capabilities, highest = 0, None
    for line in section.lines:
        words = line.split()
        if line.startswith("Max ") and len(words) > 4:
            key = "nofile" if "open files" in line else "memlock"
            limits[key] = None if words[4] == "unlimited" else _int(words[4])
        elif (found := re.match(r"CapEff:\s+([0-9a-f]{16})$", line)) is not None:
            capabilities = int(found[1], 16)
        elif line.strip().isdigit():
            highest = int(line)
    if capabilities & _CAP_SYS_RESOURCE:
        limits |= {"memlock": None, "nofile": highest if highest is not None else limits.get("nofile")}
    return limits


def _pairs(section: Section) -> dict[str, str]:
    return {first: second for first, second in (_two(line) for line in section.lines) if second}


def _two(line: str) -> tuple[str, str]:
    first, _, second = line.strip().partition(" ")
    return first, second.strip()


def _after(text: str, word: str) -> str:
    words = text.split()
    return words[words.index(word) + 1] if word in words[:-1] else ""


def _line(section: Section, index: int) -> str:
    return section.lines[index].strip() if index < len(section.lines) else ""
