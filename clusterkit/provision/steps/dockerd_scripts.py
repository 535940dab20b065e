"""Scripts that start, reload and restart dockerd: through systemd where it is PID 1, otherwise as our own daemon."""

from __future__ import annotations

import shlex

DOCKERD_ENV = "/etc/clusterkit/dockerd.env"
"""Proxies of a dockerd that we start without systemd."""
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
words() {
  journalctl -u docker -n 8 --no-pager -o cat >&2 || :
  # systemd's notes on every restart push the engine's own words out, so these come last.
  journalctl -u docker -n 200 --no-pager | grep -v ' systemd\\[1\\]: ' | tail -n 12 >&2 || :
}
"""

_OWN = f"""# Sets pid, where the engine runs. A process ID left from before a reboot may belong to anything by now.
alive() {{
  pid='' name=''
  # An engine that ends takes the file away, maybe between two of these commands.
  [ ! -e /var/run/docker.pid ] || pid=$(cat /var/run/docker.pid) || [ ! -e /var/run/docker.pid ] || exit 1
  [ -n "$pid" ] && [ -e "/proc/$pid" ] || return 1
  name=$(cat "/proc/$pid/comm") || [ ! -e "/proc/$pid" ] || exit 1
  [ "$name" = dockerd ]
}}
start() {{
  if alive; then return 0; fi
  # dockerd refuses to start where a process ID is left there.
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
# The message of a panic stands above a long trace.
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
    # It has ended, and nothing else starts it: waiting would not help.
    if [ "$tries" -ge 10 ] && ! coming; then return 1; fi
    sleep 0.2
  done
}
"""


def functions(systemd: bool) -> str:
    """Return shell functions: start, restart, reload, answers, ready (waits for a minute), words (shows the log)."""
    return _ANSWERS + (_SYSTEMD if systemd else _OWN) + _WAIT


def start(systemd: bool) -> str:
    """Return a script that starts the engine, or shows the end of its log and fails."""
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
    """Return a script that fails where other people's containers run by now."""
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
