# The probe: prints the facts about this host as sections, each headed by a line "@@name", the last being "@@end".
# POSIX sh (dash, bash, busybox) with no more than coreutils; it writes no file. What can hang runs under a time limit
# and beside the rest. Set before it by probe.py, paths, packages, files, commands and ports as quoted
# lists, head, and limit: the seconds that one command may take.

# One section from one command: heading, its output with errors, exit code (137 or 124: it was out of time).
section() {
  _name=$1 _limit=$2
  shift 2
  echo "@@$_name"
  timeout -s KILL "$_limit" "$@" </dev/null 2>&1
  printf '\n@@rc %s %s\n' "$_name" "$?"
}

has() { command -v "$1" >/dev/null 2>&1; }

docker_info() {
  has docker || return 0
  section docker.info "$limit" docker info --format '{{json .}}'
  # An engine that is stopped and one that cannot start look the same to the command; systemd knows.
  if [ -z "$docker_pid" ] && [ -d /run/systemd/system ]; then
    section docker.unit "$limit" systemctl show docker.service --property ActiveState,Result
  fi
}

docker_containers() {
  has docker || return 0
  # Field by field: the whole record would make the engine measure every container's disk usage.
  section docker.containers "$limit" docker ps --all --no-trunc --format \
    '[{{json .ID}},{{json .Names}},{{json .Image}},{{json .State}},{{json .Labels}}]'
}

docker_images() {
  has docker || return 0
  section docker.images "$limit" docker images --no-trunc --digests --format \
    '[{{json .ID}},{{json .Repository}},{{json .Tag}},{{json .Digest}}]'
}

gpus() {
  has nvidia-smi || return 0
  section gpu.list "$limit" nvidia-smi --format=csv,noheader,nounits --query-gpu=index,name,uuid,memory.total,\
driver_version,ecc.errors.uncorrected.volatile.total,utilization.gpu,memory.used,mig.mode.current
}

gpu_processes() {
  has nvidia-smi || return 0
  section gpu.processes "$limit" nvidia-smi --format=csv,noheader --query-compute-apps=gpu_uuid,pid
}

nvidia() {
  echo "@@nvidia.pci"
  for _vendor in $(grep -ls 0x10de /sys/bus/pci/devices/*/vendor); do cat "${_vendor%vendor}class"; done
  if [ -r /sys/module/nvidia/version ]; then
    echo "@@nvidia.module"
    cat /sys/module/nvidia/version
  fi
  if has nv-fabricmanager; then
    section nvidia.fabricmanager "$limit" nv-fabricmanager --version
    echo "@@nvidia.fabricmanager.pid"
    pidof nv-fabricmanager
  fi
  if has nvidia-ctk; then
    section nvidia.toolkit "$limit" nvidia-ctk --version
    section nvidia.cdi "$limit" nvidia-ctk cdi list
  fi
}

installed() {
  eval "set -- $packages"
  [ $# -gt 0 ] || return 0
  if has dpkg-query; then
    section packages.dpkg "$limit" dpkg-query -W -f '${Package}\t${Version}\t${db:Status-Status}\n' "$@"
  elif has rpm; then
    section packages.rpm "$limit" rpm -q --qf '%{NAME}\t%{VERSION}-%{RELEASE}\tinstalled\n' "$@"
  fi
}

# One path: "wanted|existing", then what stat and df say. One write, so that paths asked at once do not mix.
disk='
p=$1
while ! [ -e "$p" ] && ! [ -L "$p" ]; do p=${p%/*}; [ -n "$p" ] || p=/; done
s=$(stat -f -c "%c %d" "$p" 2>/dev/null)
d=$(df -P -k "$p" 2>/dev/null | tail -n 1)
printf "%s|%s|%s|%s\n" "$1" "$p" "$s" "$d"'

disks() {
  echo "@@mounts"
  grep -v ' /run/docker/netns/\| /proc/\|/overlay2/[0-9a-f]*/merged ' /proc/self/mounts | cut -d ' ' -f 1-4 | cut -c 1-300
  echo "@@disks"
  eval "set -- $paths"
  [ -z "$root_wanted" ] || set -- "$@" "$root_wanted"
  _patience=5
  [ "$limit" -ge 5 ] || _patience=$limit
  for _path in "$@"; do
    { timeout -s KILL "$_patience" sh -c "$disk" sh "$_path" 2>/dev/null || echo "$_path|timeout||"; } </dev/null &
  done
  wait
}

# Who holds the lock of apt, dpkg, dnf or yum: "pid name".
lock() {
  echo "@@lock"
  _inodes=$(stat -c ':%i ' /var/lib/dpkg/lock-frontend /var/lib/dpkg/lock /var/lib/apt/lists/lock \
    /var/cache/apt/archives/lock /var/lib/rpm/.rpm.lock /usr/lib/sysimage/rpm/.rpm.lock 2>/dev/null)
  {
    # A waiting lock is shown with an arrow, which moves the fields; it holds nothing.
    [ -z "$_inodes" ] || grep -F "$_inodes" /proc/locks 2>/dev/null | grep -v -e '->' |
      while read -r _ _ _ _ _pid _; do echo "$_pid"; done
    cat /run/yum.pid /run/dnf.pid /var/lib/dnf/rpmdb_lock.pid /var/cache/dnf/*_lock.pid 2>/dev/null
  } | sort -u | while read -r _pid; do
    [ -r "/proc/$_pid/comm" ] && echo "$_pid $(cat "/proc/$_pid/comm")"
  done
}

listening() {
  echo "@@listening"
  grep -h ' 0A ' /proc/net/tcp /proc/net/tcp6 2>/dev/null | while read -r _ _local _; do echo "$_local"; done | sort -u
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

network() {
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
  cat /etc/os-release 2>/dev/null || cat /usr/lib/os-release 2>/dev/null || cat /etc/redhat-release 2>/dev/null
  echo "@@uname"
  uname -n
  uname -m
  uname -r
  echo "@@init"
  cat /proc/1/comm
  echo "@@machine-id"
  cat /etc/machine-id 2>/dev/null
  echo "@@cpus"
  nproc
  echo "@@memory"
  grep MemTotal /proc/meminfo
  echo "@@commands"
  eval "set -- $commands"
  for _command in "$@"; do
    _path=$(command -v "$_command") && echo "$_command $_path"
  done
  echo "@@limits"
  grep -h -E 'Max (open files|locked memory)' "/proc/${docker_pid:-self}/limits"
  grep -h CapEff "/proc/${docker_pid:-self}/status"
  cat /proc/sys/fs/nr_open
  echo "@@docker.pid"
  echo "$docker_pid"
  if [ -e /etc/docker/daemon.json ]; then
    echo "@@docker.daemon"
    sed 's/^/ /' /etc/docker/daemon.json
    echo
  fi
  eval "set -- $files"
  if [ $# -gt 0 ]; then
    echo "@@files"
    timeout -s KILL "$limit" sha256sum -- "$@" 2>/dev/null
  fi
}

find_docker() {
  docker_pid=$(cat /run/docker.pid 2>/dev/null)
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
  [ -n "$root_wanted" ] || root_wanted=$(sed -n 's/.*"data-root"[^"]*"\([^"]*\)".*/\1/p' /etc/docker/daemon.json 2>/dev/null)
}

main() {
  export LC_ALL=C PATH="$PATH:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/snap/bin"
  echo "@@clock"
  date +%s.%N
  echo "@@uid"
  id -u
  find_docker
  # All parts start at once; each writes into the pipe that the `cat` of its level reads when the inner ones are done.
  docker_info | {
    docker_containers </dev/null | {
      docker_images </dev/null | {
        gpus </dev/null | {
          gpu_processes </dev/null | {
            nvidia </dev/null | {
              disks </dev/null | {
                installed </dev/null | {
                  { basics; network; lock; listening; } </dev/null
                  cat
                }
                cat
              }
              cat
            }
            cat
          }
          cat
        }
        cat
      }
      cat
    }
    cat
  }
  echo "@@end"
}

main </dev/null 2>/dev/null
