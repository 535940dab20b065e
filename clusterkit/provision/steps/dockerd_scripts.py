"""Scripts that start, reload and restart dockerd: through systemd where it is PID 1, else as a daemon of our own."""

from __future__ import annotations

import shlex

DOCKERD_ENV = "/etc/clusterkit/dockerd.env"
"""Proxies of a dockerd that we start ourselves."""
DOCKERD_LOG = "/var/log/dockerd.log"

_ANSWERS = """answers() {
  timeout 10 docker -H unix:///var/run/docker.sock version --format '{{.Server.Version}}' >/dev/null 2>&1
}
"""

_SYSTEMD = """start() {
  # A unit that cannot be enabled (a masked one, a static one) may still start; one that never failed is not reset.
  systemctl daemon-reload &&
    { systemctl enable docker >/dev/null 2>&1 || :; } &&
    { systemctl reset-failed docker >/dev/null 2>&1 || :; } &&
    systemctl start docker
}
restart() {
  systemctl daemon-reload &&
    { systemctl reset-failed docker >/dev/null 2>&1 || :; } &&
    systemctl restart docker
}
reload() { systemctl reload docker; }
coming() { systemctl is-active --quiet docker; }
words() { journalctl -u docker -n 20 --no-pager -o cat >&2 || :; }
"""

_OWN = f"""# Sets pid, where the engine runs. A process ID left from before a reboot may belong to anything by now.
alive() {{
  pid='' name=''
  [ ! -e /var/run/docker.pid ] || pid=$(cat /var/run/docker.pid) || exit 1
  [ -n "$pid" ] && [ -e "/proc/$pid" ] || return 1
  name=$(cat "/proc/$pid/comm") || [ ! -e "/proc/$pid" ] || exit 1
  [ "$name" = dockerd ]
}}
start() {{
  if alive; then return 0; fi
  # With a process ID left there dockerd would refuse to start.
  rm -f /var/run/docker.pid || return 1
  if [ -r {DOCKERD_ENV} ]; then . {DOCKERD_ENV}; fi
  setsid nohup dockerd --pidfile /var/run/docker.pid </dev/null >>{DOCKERD_LOG} 2>&1 &
  child=$!
}}
restart() {{
  if alive; then
    old=$pid
    kill "$old" || return 1
    tries=0
    while alive && [ "$pid" = "$old" ]; do
      tries=$((tries + 1))
      if [ "$tries" -ge 600 ]; then
        echo "dockerd (process $old) did not end within a minute" >&2
        return 1
      fi
      sleep 0.1
    done
  fi
  start
}}
reload() {{ alive && kill -HUP "$pid"; }}
child=
coming() {{ alive || {{ [ -n "$child" ] && kill -0 "$child" 2>/dev/null; }}; }}
# Below a panic stands a long trace: what it was about is further up.
words() {{
  grep -E '^(panic|fatal error|failed to start)' {DOCKERD_LOG} | tail -n 1 >&2 || :
  tail -n 20 {DOCKERD_LOG} >&2 || :
}}
"""

_WAIT = """ready() {
  tries=0
  until answers; do
    tries=$((tries + 1))
    if [ "$tries" -ge 300 ]; then return 1; fi
    # Ended already, and nothing else is coming up: waiting would not help.
    if [ "$tries" -ge 10 ] && ! coming; then return 1; fi
    sleep 0.2
  done
}
"""


def functions(systemd: bool) -> str:
    """Define start, restart, reload, answers, ready (waits a minute at most) and words (the last of the log)."""
    return _ANSWERS + (_SYSTEMD if systemd else _OWN) + _WAIT


def start(systemd: bool) -> str:
    """Script that makes the engine answer, or shows its last words and fails."""
    return f"""{functions(systemd)}if ! answers; then
  start || :
  if ! ready; then
    echo 'Docker does not come up; its last words:' >&2
    words
    exit 1
  fi
fi
"""


def no_foreign_containers(cluster: str) -> str:
    """Script that fails when containers of others run by now."""
    label = shlex.quote(f"label=clusterkit.cluster={cluster}")
    return f"""if answers; then
  ours=$(docker ps -q --no-trunc --filter {label})
  ids=$(docker ps -q --no-trunc)
  for id in $ids; do
    case $ours in
      *"$id"*) ;;
      *)
        echo "container $id, which is not ours, runs by now; nothing was restarted" >&2
        exit 1
        ;;
    esac
  done
elif coming; then
  echo "Docker runs and does not answer, so nobody knows whose containers it has; nothing was restarted" >&2
  exit 1
fi
"""
