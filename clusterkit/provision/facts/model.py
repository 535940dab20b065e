"""The facts about a host that checks and steps decide by. Read by one probe script (probe.py), parsed by parse.py.

None or an empty value means: missing, or unreadable. Sizes are in bytes, times in seconds.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic import Field

from clusterkit.common.records import Record


class Os(Record):
    """/etc/os-release and the machine."""

    id: str = ""  # debian, ubuntu, rhel, rocky, almalinux, centos …
    version: str = ""  # VERSION_ID: 12, 24.04, 9.4
    codename: str = ""  # VERSION_CODENAME or UBUNTU_CODENAME
    name: str = ""  # PRETTY_NAME
    arch: str = ""  # uname -m: x86_64, aarch64
    kernel: str = ""
    init: str = ""  # name of PID 1: systemd, or something else


class Disk(Record):
    """The file system that a path is on (for a path that does not exist: its nearest parent)."""

    path: str
    source: str = ""
    fstype: str = ""
    size: int = 0
    free: int = 0
    inodes_free: int | None = None  # None: the file system does not count them
    read_only: bool = False
    exists: bool = True
    timed_out: bool = False  # a dead network mount


class Gpu(Record):
    """One GPU as nvidia-smi reports it."""

    index: int
    name: str
    uuid: str = ""
    memory: int = 0
    driver: str = ""
    ecc_uncorrected: int | None = None
    utilization: int | None = None
    memory_used: int = 0
    processes: int = 0


class Container(Record):
    """One container of the host, running or not."""

    id: str
    name: str
    image: str = ""
    state: str = ""  # running, exited, created …
    labels: dict[str, str] = Field(default_factory=dict)


class Docker(Record):
    """Docker Engine and what it holds."""

    client: str = ""  # version of the docker command; empty: not installed
    server: str = ""  # version of the engine that answers; empty: it does not
    error: str = ""  # why it does not
    root: str = ""  # data root
    driver: str = ""
    runtimes: tuple[str, ...] = ()
    cdi_devices: tuple[str, ...] = ()  # as the engine lists them
    containers: tuple[Container, ...] = ()
    # image ID (sha256:…) by repository:tag, and by repository@digest
    images: dict[str, str] = Field(default_factory=dict)
    daemon_json: str | None = None  # text of /etc/docker/daemon.json
    pid: int | None = None  # of dockerd


class Facts(Record):
    """Everything about one host at one moment."""

    hostname: str = ""
    machine_id: str = ""
    clock: float = 0.0  # its Unix time
    clock_error: float = 0.0  # half of the probe's round trip: the largest error of the reading
    clock_offset: float = 0.0  # its clock minus ours, at the same moment
    uid: int = -1
    sudo: str = ""  # root, nopasswd, password, none
    os: Os = Os()
    cpus: int = 0
    memory: int = 0
    shm: int = 0
    # by path asked for: /, /var/lib/docker, /var/lib/containerd, the storage folder, /tmp
    disks: dict[str, Disk] = Field(default_factory=dict)
    addresses: dict[str, tuple[str, ...]] = Field(default_factory=dict)  # by interface, IPv4 and IPv6
    route_to_head: str = ""  # own address that the route to the head leaves from
    ssh_address: str = ""  # own address that our SSH connection goes to
    listening: tuple[int, ...] = ()  # TCP ports
    # installed version by package name, of those in `ProbeRequest.packages`
    packages: dict[str, str] = Field(default_factory=dict)
    # path by command: git, git-lfs, docker, nvidia-smi, nvidia-ctk, curl …
    commands: dict[str, str] = Field(default_factory=dict)
    files: dict[str, str] = Field(default_factory=dict)  # sha256 by path, of the files that steps manage
    apt_sources: dict[str, str] = Field(default_factory=dict)  # texts of apt's lists by path, without comments
    # permission bits by path (of a link: its target), of those files and of the paths in `disks`
    modes: dict[str, int] = Field(default_factory=dict)
    lock_holder: str = ""  # who holds the package manager's lock
    gpus: tuple[Gpu, ...] = ()
    mig: tuple[int, ...] = ()  # indexes of the GPUs that are cut into MIG instances
    nvidia_pci: int = 0  # NVIDIA GPUs on the PCI bus, driver or not
    nvidia_error: str = ""  # the last line of an nvidia-smi that fails
    driver_module: str = ""  # version of the loaded kernel module
    nvswitches: int = 0
    fabricmanager: str = ""  # active, inactive, absent
    fabricmanager_version: str = ""
    toolkit: str = ""  # version of nvidia-ctk
    cdi_devices: tuple[str, ...] = ()  # nvidia-ctk cdi list
    hard_limits: dict[str, int | None] = Field(default_factory=dict)  # nofile, memlock; None: unlimited
    docker: Docker = Docker()
    extra: dict[str, Any] = Field(default_factory=dict)


def version_numbers(version: str, count: int) -> tuple[int, ...]:
    """Return the first `count` numbers of a version: 2.13.0+cpu is (2, 13, 0). Fewer where it has fewer."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:count])
