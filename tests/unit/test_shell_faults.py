"""No script of ours ends with 0 after a command that failed, and on a full disk nothing of the user's is lost.

Every script that runs on hosts runs here in a root of its own (tests/sandbox.py), once for every command that it calls:
that call fails, or that one and all later calls of the command do. The commands are stand-ins: no real docker, mv or
grep can be made to fail at one chosen call. The disk that is full is a real one, a small tmpfs.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hostscripts import HostScript, all_scripts
from localsession import LocalSession
from realparts import require

from clusterkit.setup.runner import full_disks

SANDBOX = Path(__file__).parents[1] / "sandbox.py"
SHELL = ["/usr/bin/dash"]
SCRIPTS = [script for script in all_scripts() if not script.only_read]

FORGIVEN = {
    ("^check: write", "^flock "): "how it ends is what is asked: that locks fail is printed",
    # script, call: why the script goes on after it
    (r"^probe$", ""): "every section tells its own exit code, and one that is empty is a fact that is not known",
    ("", "cloud-init status"): "a first boot that failed need not keep us from going on",
    ("", r"^apt-get .* update$"): "somebody's broken list need not keep us from installing; an installation shows it",
    ("", "^gpg .* --import "): "gpg fails for keys beside the one that is wanted; that one is looked for afterwards",
    ("", "^sleep "): "a pause that is too short",
    ("", "^systemctl (reset-failed|enable) "): "what never failed, or is masked, may be started all the same",
    ("(CDI)", "^systemctl restart nvidia-cdi-refresh"): "then the specification is generated without the service",
    (r"^ray: drop", "^docker logs "): "the last words of what is removed are of use and no more",
    (r"^ray: containers", "^docker logs "): "as above",
    (r"^ray: containers", "^(docker exec|cat $)"): "a node that does not answer is told by the lack of its versions",
    (r"^ray: containers", "^docker image inspect "): "an image whose content is not known is compared by its ID",
    (r"^images: (write|load)", "^(tr|awk) "): "only the telling of progress",
    (r"^images: write", "^find .*partial"): "what killed runs left is tidied up by the next one",
    (r"^bundle: present", "^sha256sum -c"): "what is not said to be right is sent again",
    (r"^(check: clean up|lease: release)", "^rmdir "): "others have files in it",
}
ONCE = {("", "^(timeout 10 )?docker -H .* version"): "the engine is asked again until it answers"}
"""Failures after which a script goes on, on purpose. ONCE: only where it is not the same with all later calls."""


def run(what: str, scripts: list[HostScript], root: Path, disk: str = "8m", pages: tuple[int, ...] = ()) -> list[Any]:
    require(os.geteuid() == 0, "this user may not make a root of its own (run the tests as root)")
    job = {
        "what": what,
        "root": str(root),
        "disk": disk,
        "pages": pages,
        "shell": SHELL,
        "scripts": [
            {"script": s.script, "stdin": base64.b64encode(s.stdin).decode(), "files": s.files, "up": s.up}
            for s in scripts
        ],
    }
    command = ["unshare", "--mount", "--propagation", "private", sys.executable, str(SANDBOX)]
    done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout)
    return found


def forgiven(name: str, call: str, *, lasting: bool) -> bool:
    rules = FORGIVEN if lasting else FORGIVEN | ONCE
    return any(re.search(script, name) and re.search(command, call) for script, command in rules)


@pytest.mark.long
def test_no_script_ends_with_0_after_a_command_that_failed(tmp_path: Path) -> None:
    unseen = []
    for script, result in zip(SCRIPTS, run("faults", SCRIPTS, tmp_path), strict=True):
        assert result["clean"]["code"] == 0, f"{script.name}: {result['clean']['said']}"
        unseen += [
            f"{script.name}: `{fault['call']}`{' and all after it' if fault['lasting'] else ''}"
            for fault in result["faults"]
            if fault["code"] == 0 and not forgiven(script.name, fault["call"], lasting=fault["lasting"])
        ]
    assert unseen == []


USERS = {
    "/root/.ssh/authorized_keys": "ssh-ed25519 AAAA me\n",
    "/etc/environment": "PATH=/bin\n",
    "/etc/fstab": "/dev/sda1 / ext4 defaults 0 1\n",
    "/etc/hosts": "127.0.0.1 localhost\n",
    "/etc/apt/sources.list": "deb http://deb.debian.org/debian bookworm main\n",
    "/etc/apt/sources.list.d/corp.list": "deb http://packages.corp/internal noble main\n",
    "/etc/yum.repos.d/corp.repo": "[corp]\n",
    "/home/me/.bashrc": "alias l=ls\n",
}
"""What a user may have on a host; daemon.json and package sources come with the cases."""


def test_on_a_full_disk_nothing_of_the_users_is_changed_and_none_says_that_all_is_well(tmp_path: Path) -> None:
    """Every action of every step on a disk with 0, 1, 2 … pages left: done as on an empty disk, or not at all."""
    scripts = [replace(script, files=USERS | script.files) for script in SCRIPTS if script.step]
    wrong, failed = [], 0
    for script, result in zip(scripts, run("full", scripts, tmp_path, disk="1m", pages=(0, 1, 2, 3)), strict=True):
        assert result["clean"]["code"] == 0, f"{script.name}: {result['clean']['said']}"
        for ended in result["full"]:
            name = f"{script.name}, {ended['free']} pages free"
            failed += ended["code"] != 0
            kept = ended["before"] if ended["code"] else result["wanted"]
            if changed := [path for path in kept if ended["after"].get(path) != kept[path]]:
                wrong.append(f"{name}: code {ended['code']}, changed {changed}")
            if stray := ended["after"].keys() - ended["before"].keys() - result["wanted"].keys():
                wrong.append(f"{name}: left {sorted(stray)}")
    assert wrong == []
    assert failed > len(scripts) / 2, "the disk was not full"


def test_the_disk_that_is_full_is_named(tmp_path: Path) -> None:
    require(os.geteuid() == 0, "this user may not mount a disk (run the tests as root)")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "small-disk", str(tmp_path)], check=True)
    try:
        session: Any = LocalSession()
        paths = ("/", "/no/such/path", str(tmp_path))
        assert str(tmp_path) not in asyncio.run(full_disks(session, paths))
        subprocess.run(["dd", "if=/dev/zero", f"of={tmp_path}/fill", "bs=4k"], check=False, capture_output=True)
        assert f"{tmp_path} (small-disk, 0 KiB free)" in asyncio.run(full_disks(session, paths))
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
