"""Runs scripts for hosts in a root of their own, with commands that fail at a chosen call, or on a disk that is full.

Started by tests as `unshare --mount python sandbox.py`, with a job as JSON on stdin; prints what happened as JSON. The
folders that are written to are a tmpfs, /usr is this machine's and read-only. Every command in PATH is a stand-in that
counts its calls, fails at the chosen one, and otherwise is the real command; what would change more than files (docker,
apt-get, systemctl …) only says what it usually says.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

REAL = (
    "awk basename cat chmod cp cut date dd df dirname env find flock grep gzip head id ln ls mkdir mktemp mv nohup "
    "nproc od readlink rm rmdir sed seq setsid sh sha256sum sort stat stdbuf sync tail tar tee test timeout touch tr "
    "true truncate wc xargs zstd"
).split()
ID = "0123456789abcdef" * 4
STAND_INS = {
    "docker": f"""if [ "$1" = -H ]; then shift 2; fi
case $1 in
  ps) echo {ID} ;;
  version) [ -e /run/docker.up ] && echo 28.0.1 ;;
  inspect) case $* in *Running*) echo 'true head' ;; *) echo '{{}}' ;; esac ;;
  save) echo image ;;
  load) cat >/dev/null ;;
  exec) case $* in *python3*) cat >/dev/null ;; esac ;;
  run) case $* in *--interactive*) cat >/dev/null ;; esac ;;
  image) echo '{{"Id": "sha256:1"}}' ;;
esac""",
    "dockerd": """case $* in
  *--validate*) ;;
  *) : >/run/docker.up ;;
esac""",
    "systemctl": "case $1 in start | restart) : >/run/docker.up ;; esac",
    "apt-get": "echo done",
    "dnf": "echo done",
    "dpkg": ":",
    "curl": 'while [ $# -gt 0 ]; do if [ "$1" = -o ]; then echo key >"$2"; fi; shift; done',
    "gpg": """case $* in
  *--import*) : >/run/gpg.imported ;;
  *--export*) [ ! -e /run/gpg.imported ] || echo key ;;
esac""",
    "nvidia-ctk": """case $* in
  *generate*) for word in "$@"; do case $word in --output=*) echo devices >"${word#--output=}" ;; esac; done ;;
  *list*) echo nvidia.com/gpu=all ;;
esac""",
    "script": "echo layer",
    "sleep": 'if [ "$1" = 0.5 ]; then exec REAL "$@"; fi',  # the pause of the ticker; no test waits for another
    **dict.fromkeys(("python3", "update-ca-certificates", "update-ca-trust", "cloud-init", "journalctl"), ":"),
}
WRITABLE = ("etc", "var", "tmp", "root", "storage", "mnt", "run", "home", "b", "ca-certificates")
KEPT = ("etc", "root", "home")
"""Where files of the user lie."""
PAGE = 4096


def main() -> None:
    """Prepare the root, then run the job."""
    job = json.load(sys.stdin)
    root = Path(job["root"])
    _mount("-t", "tmpfs", "-o", "size=64m", "tmpfs", str(root))
    for name in ("usr", "proc", "dev"):
        (root / name).mkdir()
        _mount("--bind", f"/{name}", str(root / name))
        _mount("-o", "remount,bind,ro", str(root / name))
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    _stand_ins(root)
    (root / "disk").mkdir()
    _mount("-t", "tmpfs", "-o", f"size={job['disk']}", "tmpfs", str(root / "disk"))
    for name in WRITABLE:
        (root / name).symlink_to(f"disk/{name}")
    _mount("--bind", str(root / "disk"), str(root / "usr/local/share"))
    runs = [_Script(root, script, job["shell"]) for script in job["scripts"]]
    json.dump([run.faults() if job["what"] == "faults" else run.full(job["pages"]) for run in runs], sys.stdout)


class _Script:
    def __init__(self, root: Path, script: dict[str, Any], shell: list[str]) -> None:
        self.root, self.shell = root, shell
        self.text, self.files = script["script"], script["files"]
        self.up = script["up"]
        self.stdin = base64.b64decode(script["stdin"])

    def faults(self) -> dict[str, Any]:
        """Its calls when all goes well, and how it ended with each of them failing: once, and from then on."""
        clean = self._run("")
        calls = clean.pop("calls")
        found = []
        for name, number, line in calls:
            for lasting in ("", "+") if any(later == name and int(n) > int(number) for later, n, _ in calls) else ("",):
                ended = self._run(f"{name} {number}", lasting)
                # A script that polls a daemon asks less often where that comes up sooner: then nothing has failed.
                if any(later == name and n == number for later, n, _ in ended["calls"]):
                    found.append({"call": line, "lasting": bool(lasting), **ended})
        return {"clean": clean, "faults": found}

    def full(self, pages: list[int]) -> dict[str, Any]:
        """How it ended with so many free pages, and what became of the files of the user."""
        clean = self._run("")
        wanted, found = self._kept(), []
        for free in pages:
            ended = self._run("", free=free)
            found.append({"free": free, "before": self.before, "after": self._kept(), **ended})
        return {"clean": clean, "wanted": wanted, "full": found}

    def _run(self, fault: str, lasting: str = "", free: int | None = None) -> dict[str, Any]:
        disk, calls = self.root / "disk", self.root / "calls"
        for folder in (*disk.iterdir(), calls):
            shutil.rmtree(folder) if folder.is_dir() and not folder.is_symlink() else folder.unlink(missing_ok=True)
        for name in WRITABLE:
            (disk / name).mkdir()
        (disk / "tmp").chmod(0o1777)
        calls.mkdir()
        (disk / "var/run").symlink_to("../run")
        for path in ("var/lib/dpkg/updates", "var/lib/clusterkit", "var/log", "run/docker.up.d", "mnt/nas"):
            (disk / path).mkdir(parents=True, exist_ok=True)
        if self.up:
            (disk / "run/docker.up").touch()
        for path, text in self.files.items():
            target = disk / path.removeprefix("/usr/local/share").lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(text.encode("latin-1"))
        self.before = self._kept()
        if free is not None:
            _fill(disk, free)
        with (calls / "stdin").open("wb+") as stdin, (calls / "out").open("wb+") as out:
            stdin.write(self.stdin)
            stdin.seek(0)
            done = subprocess.run(
                [*self.shell, "-c", self.text],
                stdin=stdin,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={"PATH": "/stand-ins", "FAULT": fault, "LASTING": lasting, "HOME": "/root"},
                preexec_fn=lambda: (os.chroot(self.root), os.chdir("/")),  # type: ignore[func-returns-value]
                check=False,
                timeout=300,
            )
            out.seek(0)
            said = out.read().decode(errors="replace")[-2000:]
        log = calls / "log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        listed = [(*line.split(" ", 2)[:2], line.split(" ", 2)[2]) for line in lines if line.startswith("@")]
        return {"code": done.returncode, "said": said, "calls": [(name[1:], n, text) for name, n, text in listed]}

    def _kept(self) -> dict[str, str]:
        disk = self.root / "disk"
        return {
            str(file.relative_to(disk)): file.read_bytes().hex()
            for name in KEPT
            for file in sorted((disk / name).rglob("*"))
            if file.is_file()
        }


def _fill(disk: Path, free: int) -> None:
    """Fill the disk up to `free` pages."""
    with (disk / "fill").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * PAGE)
        except OSError:
            pass
        file.truncate(max(os.fstat(file.fileno()).st_size // PAGE - free, 0) * PAGE)


def _stand_ins(root: Path) -> None:
    folder = root / "stand-ins"
    folder.mkdir()
    for name in {*REAL, *STAND_INS}:
        real = os.path.realpath(shutil.which(name, path="/usr/bin:/usr/sbin:/bin:/sbin") or "/nonexistent")
        body = STAND_INS.get(name, f'exec {real} "$@"').replace("REAL", real)
        # grep says 1 of a file without the line; a grep that failed says 2.
        code = 2 if name == "grep" else 1
        (folder / name).write_text(
            f"""#!/usr/bin/dash
printf . >>/calls/{name}.n
read -r dots </calls/{name}.n || :
number=${{#dots}}
printf '%s\\n' "@{name} $number {name} $*" >>/calls/log
case $FAULT in
  '{name} '*)
    if [ "$number" = "${{FAULT#* }}" ] || {{ [ -n "$LASTING" ] && [ "$number" -gt "${{FAULT#* }}" ]; }}; then
      echo "{name}: made to fail" >&2
      exit {code}
    fi
    ;;
esac
{body}
"""
        )
        (folder / name).chmod(0o755)


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


if __name__ == "__main__":
    main()
