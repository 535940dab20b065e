#!/usr/bin/env bash
# Makes the virtual environment $VENV with clusterkit and what its tests need, on a fresh Debian or Ubuntu machine.
# Installs system packages only where they are missing. Run it through `make setup`.
# $CLUSTERKIT_CONSTRAINTS is a file of versions for pip, constraints.txt by default. Empty: none, for a Python or a
# platform that has no build of a version named there; pip then takes the newest that pyproject.toml allows.
set -euo pipefail
cd "$(dirname "$0")/.."
VENV="${VENV:-.venv}"
CONSTRAINTS="${CLUSTERKIT_CONSTRAINTS-constraints.txt}"

say() { printf 'setup: %s\n' "$*" >&2; }

apt_install() {
  local sudo=""
  if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || { say "needs root or sudo to install: $*"; exit 1; }
    sudo="sudo"
  fi
  command -v apt-get >/dev/null || { say "please install with your package manager, then try again: $*"; exit 1; }
  say "installing $*"
  $sudo apt-get update -qq
  DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

# A Python of 3.11 or later that can make virtual environments.
find_python() {
  local candidate
  for candidate in python3 python3.13 python3.12 python3.11; do
    if command -v "$candidate" >/dev/null &&
      "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not ((3, 11) <= sys.version_info < (3, 14)))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
}

python="$(find_python)"
if [ -z "$python" ]; then
  # Debian 12 and Ubuntu 24.04 have a new enough python3; Ubuntu 22.04 has 3.11 beside its 3.10.
  apt_install python3 python3-venv
  python="$(find_python)"
  if [ -z "$python" ]; then
    apt_install python3.11 python3.11-venv
    python="$(find_python)"
  fi
fi
[ -n "$python" ] || { say "needs Python 3.11, 3.12 or 3.13 with venv: install one and try again"; exit 1; }

[ -x "$VENV/bin/python" ] || "$python" -m venv "$VENV"
constraint=()
[ -z "$CONSTRAINTS" ] || constraint=(--constraint "$CONSTRAINTS")

pip_install() {
  "$VENV/bin/python" -m pip --disable-pip-version-check --quiet install "${constraint[@]}" "$@" && return
  if [ -n "$CONSTRAINTS" ]; then
    say "where this Python or platform lacks a version that $CONSTRAINTS names: make setup CLUSTERKIT_CONSTRAINTS="
  fi
  exit 1
}

say "installing Python packages into $VENV (about 2.3 GB; 6 GB where pip finds PyTorch's CUDA build alone)"
pip_install --upgrade pip
# The CPU build of PyTorch first: with it in place nothing pulls the CUDA build.
if [ -n "${TORCH_WHEELS:-}" ]; then
  pip_install --find-links "$TORCH_WHEELS" --extra-index-url "$TORCH_WHEELS" "torch==2.13.0"
else
  pip_install "torch==2.13.0"
fi
pip_install --editable ".[train,eval,assets,data,docs,dev]"
"$VENV/bin/python" - <<'PY'
import torch

if torch.version.cuda:
    print("setup: note: this is PyTorch's CUDA build; TORCH_WHEELS=<index of CPU wheels> make setup saves gigabytes")
PY
say "done: the command is $VENV/bin/clusterkit (export PATH=\"$(cd "$VENV/bin" && pwd):\$PATH\")"
