# shellcheck shell=sh disable=SC2016,SC2030,SC2031,SC2034,SC2119,SC2120,SC2154
# The probe: prints the facts about this host as sections, each headed by a line "@@name", the last being "@@end".
# POSIX sh (dash, bash, busybox) with no more than coreutils; it writes no file. What can hang runs under a time limit
# and beside the rest. On a host with nothing to do, starting processes is most of the work: what the shell can do
# itself it does. Set before it by probe.py, paths, packages, files, commands and ports as quoted lists, head,
# docker: whether its engine is asked, and limit: the seconds that one command may take.

# What cannot be read is left out and keeps nothing else from being read; the last section says that all were tried.
set +eu

# One section from one command: heading, its output with errors, exit code (137 or 124: it was out of time).
section() {
  _name=$1 _limit=$2
  shift 2
  echo "@@$_name"
  timeout -s KILL "$_limit" "$@" </dev/null 2>&1
  printf '\n@@rc %s %s\n' "$_name" "$?"
}

has() { command -v "$1" >/dev/null 2>&1; }

# What a small file holds.
show() {
  [ -r "$1" ] || return 1
  while IFS= read -r _line || [ -n "$_line" ]; do printf '%s\n' "$_line"; done <"$1"
}

docker_info() {
  section docker.info "$limit" docker info --format '{{json .}}'
  # An engine that is stopped and one that cannot start look the same to the command; systemd knows.
  if [ -z "$docker_pid" ] && [ -d /run/systemd/system ]; then
    section docker.unit "$limit" systemctl show docker.service --property ActiveState,Result
  fi
}

docker_containers() {
  # Field by field: the whole record would make the engine measure every container's disk usage.
  section docker.containers "$limit" docker ps --all --no-trunc --format \
    '[{{json .ID}},{{json .Names}},{{json .Image}},{{json .State}},{{json .Labels}}]'
}

docker_images() {
  section docker.images "$limit" docker images --no-trunc --digests --format \
    '[{{json .ID}},{{json .Repository}},{{json .Tag}},{{json .Digest}}]'
}

gpus() {
  section gpu.list "$limit" nvidia-smi --format=csv,noheader,nounits --query-gpu=index,name,uuid,memory.total,\
driver_version,ecc.errors.uncorrected.volatile.total,utilization.gpu,memory.used,mig.mode.current
}

gpu_processes() {
  section gpu.processes "$limit" nvidia-smi --format=csv,noheader --query-compute-apps=gpu_uuid,pid
}

pci() {
  echo "@@nvidia.pci"
  if [ -d /sys/bus/pci/devices ]; then
    for _vendor in /sys/bus/pci/devices/*/vendor; do
      _value=
      [ ! -r "$_vendor" ] || read -r _value <"$_vendor"
      [ "$_value" != 0x10de ] || show "${_vendor%vendor}class"
    done
  fi
  if [ -r /sys/module/nvidia/version ]; then
    echo "@@nvidia.module"
    show /sys/module/nvidia/version
  fi
}

fabric_manager() {
  section nvidia.fabricmanager "$limit" nv-fabricmanager --version
  echo "@@nvidia.fabricmanager.pid"
  pidof nv-fabricmanager
}

toolkit() {
  section nvidia.toolkit "$limit" nvidia-ctk --version
  section nvidia.cdi "$limit" nvidia-ctk cdi list
}

installed() {
  eval "set -- $packages"
  [ $# -gt 0 ] || return 0
  if has dpkg-query; then
    echo "@@apt.sources"
    grep -sHv '^[[:space:]]*#' /etc/apt/sources.list /etc/apt/sources.list.d/*.list /etc/apt/sources.list.d/*.sources
    echo "@@packages.dpkg"
    dpkg-query -W -f '${Package}\t${Version}\t${db:Status-Status}\n' "$@"
  elif has rpm; then
    section packages.rpm "$limit" rpm -q --qf '%{NAME}\t%{VERSION}-%{RELEASE}\tinstalled\n' "$@"
  fi
}

# Everything that may lie on a mount which hangs, at once. $1: paths, as a list; $2: files, as a list; $3: one more path.
# "wanted|existing" for each path, then what stat and df say, in the same order; then modes, and checksums of the files.
everything='
files=$2
more=$3
eval "set -- $1"
[ -z "$more" ] || set -- "$@" "$more"
n=$#
echo "@@disks.paths"
for wanted in "$@"; do
  p=$wanted
  while ! [ -e "$p" ] && ! [ -L "$p" ]; do p=${p%/*}; [ -n "$p" ] || p=/; done
  echo "$wanted|$p"
  set -- "$@" "$p"
done
shift "$n"
echo "@@disks.inodes"
stat -f -c "%c %d" "$@" || exit
echo "@@disks.usage"
df -P -k "$@" || exit
eval "set -- \"\$@\" $files"
echo "@@modes"
stat -L -c "%a %n" "$@"
eval "set -- $files"
[ $# -gt 0 ] || exit 0
echo "@@files"
sha256sum -- "$@"
exit 0'

# One path: the same about its disk in one line. One write, so that paths asked at once do not mix.
disk='
p=$1
while ! [ -e "$p" ] && ! [ -L "$p" ]; do p=${p%/*}; [ -n "$p" ] || p=/; done
s=$(stat -f -c "%c %d" "$p" 2>/dev/null)
d=$(df -P -k "$p" 2>/dev/null | tail -n 1)
printf "%s|%s|%s|%s\n" "$1" "$p" "$s" "$d"'

disks() {
  echo "@@mounts"
  grep -v ' /run/docker/netns/\| /proc/\|/overlay2/[0-9a-f]*/merged ' /proc/self/mounts
  _patience=5
  [ "$limit" -ge 5 ] || _patience=$limit
  timeout -s KILL "$_patience" sh -c "$everything" sh "$paths" "$files" "$root_wanted" </dev/null && return
  # One of them hangs or cannot be asked: each for itself.
  printf '\n@@disks\n'
  eval "set -- $paths"
  [ -z "$root_wanted" ] || set -- "$@" "$root_wanted"
  for _path in "$@"; do
    { timeout -s KILL "$_patience" sh -c "$disk" sh "$_path" 2>/dev/null || echo "$_path|timeout||"; } </dev/null &
  done
  wait
  eval "set -- $files"
  [ $# -gt 0 ] || return 0
  echo "@@modes"
  timeout -s KILL "$_patience" stat -L -c '%a %n' "$@"
  echo "@@files"
  timeout -s KILL "$limit" sha256sum -- "$@"
}

# Who holds the lock of apt, dpkg, dnf or yum: "pid name".
lock() {
  echo "@@lock"
  if locked; then
    lock_files
  fi
  for _file in /run/yum.pid /run/dnf.pid /var/lib/dnf/rpmdb_lock.pid /var/cache/dnf/*_lock.pid; do
    if [ -r "$_file" ]; then
      read -r _pid <"$_file"
      holder "$_pid"
    fi
  done
}

# Whether anybody holds a lock of the kind that package managers take.
locked() {
  while read -r _ _kind _; do [ "$_kind" != POSIX ] || return 0; done </proc/locks
  return 1
}

lock_files() {
  _inodes=$(stat -c ':%i ' /var/lib/dpkg/lock-frontend /var/lib/dpkg/lock /var/lib/apt/lists/lock \
    /var/cache/apt/archives/lock /var/lib/rpm/.rpm.lock /usr/lib/sysimage/rpm/.rpm.lock 2>/dev/null)
  if [ -n "$_inodes" ]; then
    # A waiting lock is shown with an arrow, which moves the fields; it holds nothing.
    grep -F "$_inodes" /proc/locks | while read -r _ _arrow _ _ _pid _; do
      [ "$_arrow" = "->" ] || holder "$_pid"
    done
  fi
}

holder() {
  if [ -r "/proc/$1/comm" ]; then echo "$1 $(show "/proc/$1/comm")"; fi
}

listening() {
  echo "@@listening"
  grep -h ' 0A ' /proc/net/tcp /proc/net/tcp6
  [ -n "$ports" ] && has ss || return 0
  echo "@@listeners"
  eval "set -- $ports"
  timeout -s KILL "$limit" ss -H -l -t -n -p </dev/null 2>/dev/null | grep -E ":($(IFS='|'; echo "$*")) .*pid=" |
    while read -r _ _ _ _address _ _users; do
      _pid=${_users#*pid=}
      _pid=${_pid%%,*}
      # The control group names the container that a process belongs to.
      echo "${_address##*:} $_users $(grep -h -o -E '[0-9a-f]{64}' "/proc/$_pid/cgroup" 2>/dev/null | tail -n 1)"
    done
}

addresses() {
  echo "@@addresses"
  if has ip; then
    ip -o addr show 2>/dev/null
  elif has hostname; then
    timeout 5 hostname -I 2>/dev/null
  fi
  [ -n "$head" ] || return 0
  echo "@@route"
  case $head in
    *[!0-9.]*) _address=$(timeout 5 getent ahosts "$head" 2>/dev/null) _address=${_address%%[[:space:]]*} ;;
    *) _address=$head ;;
  esac
  if [ -n "$_address" ] && has ip; then ip -o route get "$_address" 2>/dev/null; fi
}

basics() {
  echo "@@os"
  show /etc/os-release || show /usr/lib/os-release || show /etc/redhat-release
  echo "@@uname"
  show /proc/sys/kernel/hostname
  show /proc/sys/kernel/arch || uname -m
  show /proc/sys/kernel/osrelease
  echo "@@init"
  show /proc/1/comm
  echo "@@machine-id"
  show /etc/machine-id
  echo "@@cpus"
  # What a login shell sets for OpenMP would be taken for the number of cores.
  (
    unset OMP_NUM_THREADS OMP_THREAD_LIMIT
    nproc
  )
  echo "@@memory"
  read -r _line </proc/meminfo
  echo "$_line"
  echo "@@commands"
  eval "set -- $commands"
  for _command in "$@"; do
    printf '%s ' "$_command"
    command -v "$_command" || echo
  done
  echo "@@limits"
  grep -h -E '^(Max (open files|locked memory)|CapEff|[0-9]+$)' \
    "/proc/${docker_pid:-self}/limits" "/proc/${docker_pid:-self}/status" /proc/sys/fs/nr_open
  echo "@@docker.pid"
  echo "$docker_pid"
  if [ -e /etc/docker/daemon.json ]; then
    echo "@@docker.daemon"
    sed 's/^/ /' /etc/docker/daemon.json
    echo
  fi
}

find_docker() {
  docker_pid=
  if [ -r /run/docker.pid ]; then read -r docker_pid </run/docker.pid; fi
  if ! [ -n "$docker_pid" ] || ! [ -d "/proc/$docker_pid" ]; then
    # Without the usual socket, a dockerd is somebody's private one.
    docker_pid=
    [ ! -S /run/docker.sock ] || docker_pid=$(pidof dockerd 2>/dev/null)
  fi
  docker_pid=${docker_pid%% *}
  # Images may lie elsewhere: by the engine's own options, else by its settings.
  root_wanted=
  if [ -n "$docker_pid" ]; then
    root_wanted=$(tr '\0' '\n' <"/proc/$docker_pid/cmdline" 2>/dev/null |
      sed -n -e '/^--data-root$/{n;p;}' -e 's/^--data-root=//p')
  fi
  if [ -z "$root_wanted" ] && [ -r /etc/docker/daemon.json ]; then
    root_wanted=$(sed -n 's/.*"data-root"[^"]*"\([^"]*\)".*/\1/p' /etc/docker/daemon.json)
  fi
}

# Whether the docker command can find an engine: by its usual socket, or where somebody has pointed it.
docker_reaches() {
  [ -S /run/docker.sock ] || [ -n "$DOCKER_HOST" ] || [ -e "${DOCKER_CONFIG:-$HOME/.docker}/config.json" ]
}

# Runs all parts at once: each writes into the pipe that the `cat` of its level reads when the inner ones are done.
# The last does not wait for anything.
together() {
  if [ $# -eq 1 ]; then
    "$1" </dev/null
    return
  fi
  _part=$1
  shift
  "$_part" </dev/null | {
    together "$@" </dev/null
    cat
  }
}

# Written at once: every piece of output is a packet of its own, which costs this host and the one that asks.
quick() {
  _all=$(basics; pci; [ -z "$network" ] || { addresses; listening; }; lock; installed; disks)
  printf '%s\n' "$_all"
}

main() {
  export LC_ALL=C PATH="$PATH:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/snap/bin"
  echo "@@clock"
  date +%s.%N
  echo "@@uid"
  echo "${probe_uid:-$(id -u)}"
  find_docker
  set -- quick
  if has nvidia-ctk; then set -- toolkit "$@"; fi
  if has nv-fabricmanager; then set -- fabric_manager "$@"; fi
  if has nvidia-smi; then set -- gpus gpu_processes "$@"; fi
  if [ -n "$docker" ] && has docker; then
    if docker_reaches; then set -- docker_containers docker_images "$@"; fi
    set -- docker_info "$@"
  fi
  together "$@"
  echo "@@end"
}

main </dev/null 2>/dev/null
