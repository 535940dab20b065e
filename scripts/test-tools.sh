#!/usr/bin/env bash
# Installs what the tests want beside the virtual environment (shells, package tools, sshd, Docker Engine), where that
# is missing and allowed. Without it the tests that need a part skip, or fail under CLUSTERKIT_REQUIRE_REAL=1.
set -euo pipefail
declare -A PACKAGE_OF=(
  [shellcheck]=shellcheck [dnf]=dnf [createrepo_c]=createrepo-c [rpmbuild]=rpm [gpg]=gnupg [curl]=curl
  [busybox]=busybox-static [perl]=perl [ss]=iproute2 [unshare]=util-linux [sshd]=openssh-server [ssh-agent]=openssh-client
  [sudo]=sudo [debootstrap]=debootstrap [dockerd]=docker.io [iptables]=iptables
)
export PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin"
missing=()
for command in "${!PACKAGE_OF[@]}"; do
  command -v "$command" >/dev/null || missing+=("${PACKAGE_OF[$command]}")
done
[ ${#missing[@]} -gt 0 ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "test-tools: not installed: ${missing[*]} (as root on Debian or Ubuntu, make test installs them)" >&2
  exit 0
fi
echo "test-tools: installing ${missing[*]}" >&2
apt-get update -qq
# Services that come with packages must not start by themselves on somebody's machine.
RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
