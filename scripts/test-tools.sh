#!/usr/bin/env bash
# Installs what the tests want beside the virtual environment (shells, package tools, sshd, Docker Engine, Slurm), where
# that is missing and allowed. Without it the tests that need a part skip, or fail under CLUSTERKIT_REQUIRE_REAL=1.
set -euo pipefail
declare -A PACKAGE_OF=(
  [dnf]=dnf [createrepo_c]=createrepo-c [rpmbuild]=rpm [gpg]=gnupg [curl]=curl
  [busybox]=busybox-static [perl]=perl [ss]=iproute2 [unshare]=util-linux [sshd]=openssh-server [ssh-agent]=openssh-client
  [zsh]=zsh [fish]=fish [sudo]=sudo [debootstrap]=debootstrap [dockerd]=docker.io [iptables]=iptables
  [slurmctld]=slurmctld [slurmd]=slurmd [sbatch]=slurm-client [munged]=munge
)
export PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin"
missing=()
for command in "${!PACKAGE_OF[@]}"; do
  command -v "$command" >/dev/null || missing+=("${PACKAGE_OF[$command]}")
done
# Pages are looked at in any Chromium; this one needs no desktop. Ubuntu has none as a package.
browser=""
if ! command -v chromium-headless-shell chromium chromium-browser google-chrome >/dev/null; then
  browser=chromium-headless-shell
fi
[ ${#missing[@]} -gt 0 ] || [ -n "$browser" ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "test-tools: not installed: ${missing[*]} $browser (as root on Debian or Ubuntu, make test installs them)" >&2
  exit 0
fi
apt-get update -qq
if [ -n "$browser" ] && apt-cache show "$browser" >/dev/null 2>&1; then
  missing+=("$browser")
elif [ -n "$browser" ]; then
  echo "test-tools: no package $browser here: install a Chromium or Chrome to test pages" >&2
fi
[ ${#missing[@]} -gt 0 ] || exit 0
echo "test-tools: installing ${missing[*]}" >&2
# Services that come with packages must not start by themselves on somebody's machine.
RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
