#!/usr/bin/env bash
# Makes sure that a Docker engine answers: uses the one that does, else installs docker.io (Debian, Ubuntu) and starts it,
# by systemd where there is one, else as a process of its own with live-restore, a pid file and a log.
#
#   DOCKER_HOST            unix://PATH of the engine's socket (default /var/run/docker.sock)
#   CARREL_DOCKERD_FLAGS   more flags for an engine that is started here
#   CARREL_ENGINE_TIMEOUT  seconds to wait for it (default 60)
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/engine-api.sh"
fail() { echo "engine.sh: $*" >&2; exit 1; }
say() { echo "[engine] $*" >&2; }

PATH=$PATH:/usr/sbin:/sbin
[[ $(uname -s) == Linux ]] || fail "workspaces run on Linux; this is $(uname -s). The CLI alone builds anywhere: make dist"
command -v curl >/dev/null 2>&1 || "$here/need.sh" curl=curl
socket=$(engine_socket)
timeout=${CARREL_ENGINE_TIMEOUT:-60}

if version=$(engine_version); then
  say "Docker $version answers at $socket"
  exit 0
fi
if [[ -S $socket && ! -w $socket ]]; then
  fail "$socket exists and $(id -un) may not write to it: run this as root (sudo -E env PATH=\"\$PATH\" make quickstart)"
fi
[[ $(id -u) == 0 ]] || fail "no Docker engine answers at $socket, and only root can install and start one: run this as root (sudo -E env PATH=\"\$PATH\" make quickstart)"

installed_here=
if ! command -v dockerd >/dev/null 2>&1; then
  say "no Docker engine here: installing docker.io"
  "$here/need.sh" dockerd=docker.io iptables=iptables
  installed_here=1
fi

wait_for_engine() {
  local deadline=$((SECONDS + timeout))
  until version=$(engine_version); do
    if ((SECONDS >= deadline)); then return 1; fi
    # A process that has ended will never answer.
    if [[ -n ${1:-} ]] && ! kill -0 "$1" 2>/dev/null; then return 1; fi
    sleep 0.2
  done
}

if [[ -d /run/systemd/system && $socket == /var/run/docker.sock ]]; then
  if [[ -n $installed_here && ! -e /etc/docker/daemon.json ]]; then
    mkdir -p /etc/docker
    echo '{ "live-restore": true }' >/etc/docker/daemon.json
  fi
  systemctl enable --quiet --now docker.service || true
  wait_for_engine || { systemctl status --no-pager --lines=20 docker.service >&2 || true; fail "docker.service does not answer at $socket after $timeout s (its last lines are above)"; }
  grep -qs '"live-restore"[[:space:]]*:[[:space:]]*true' /etc/docker/daemon.json ||
    say "live-restore is off, so workspaces stop whenever Docker restarts; to change that, put { \"live-restore\": true } into /etc/docker/daemon.json and run: systemctl reload docker"
  say "Docker $version answers at $socket"
  exit 0
fi

# No systemd: the engine is a process of its own. One starter at a time.
run=$(dirname "$socket")
log=/var/log/carrel-dockerd.log
exec 9>"$run/carrel-engine.lock"
flock 9
if version=$(engine_version); then
  say "Docker $version answers at $socket"
  exit 0
fi
# A pid file that outlived its machine may name a process of somebody else, and dockerd would take that for its own.
drop_stale_pid() { # FILE NAME
  local old
  old=$(cat "$1" 2>/dev/null) || return 0
  [[ $(cat "/proc/$old/comm" 2>/dev/null) == "$2" ]] || rm -f "$1"
}
drop_stale_pid /var/run/docker.pid dockerd
drop_stale_pid /var/run/docker/containerd/containerd.pid containerd

flags=(--host "unix://$socket")
grep -qs live-restore /etc/docker/daemon.json || flags+=(--live-restore)
read -r -a more <<<"${CARREL_DOCKERD_FLAGS:-}"
before=$(stat --format %s "$log" 2>/dev/null || echo 0)
setsid dockerd "${flags[@]}" "${more[@]}" </dev/null >>"$log" 2>&1 9>&- &
pid=$!
say "starting dockerd (pid $pid, log $log)"
if ! wait_for_engine "$pid"; then
  tail -c +$((before + 1)) "$log" | tail -n 20 >&2
  fail "dockerd does not answer at $socket (its last lines are above). Inside a container it needs a privileged one"
fi
say "Docker $version answers at $socket"
