#!/usr/bin/env bash
# quickstart.sh up: from a checkout to a workspace that answers `ssh demo.carrel` on this machine. Running it again does only
# what is missing. quickstart.sh down: ends what it started and keeps all data.
#
#   CARREL_STATE            directory of the gateway's database and the agent's volumes (default /var/lib/carrel-dev)
#   CARREL_LISTEN           address of the gateway (default 127.0.0.1:7070)
#   CARREL_BASE_IMAGE       an image to pull for workspaces instead of building one from Debian packages
#   CARREL_CUDA_IMAGE       with a driver: the image for demo, where its registry answers
#   CARREL_INSTALL_TOOLKIT  yes: install and configure nvidia-container-toolkit where it is missing
#   CARREL_READY_TIMEOUT    seconds to wait until the gateway is ready (default 60)
#   CARREL_STOP_TIMEOUT     seconds that each workspace gets to stop in quickstart-down (default 60)
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
cd "$root"
source deploy/scripts/engine-api.sh

state=${CARREL_STATE:-/var/lib/carrel-dev}
listen=${CARREL_LISTEN:-127.0.0.1:7070}
cuda_image=${CARREL_CUDA_IMAGE:-nvidia/cuda:12.6.3-runtime-ubuntu24.04}
ready_timeout=${CARREL_READY_TIMEOUT:-60}
stop_timeout=${CARREL_STOP_TIMEOUT:-60}
port=${listen##*:}
pid_file=$state/carreld.pid
log=$state/carreld.log
# Who called sudo is the user who will type `ssh demo.carrel`.
owner=${SUDO_USER:-$(id -un)}
ready= # the line that `up` ended with
started=$SECONDS

fail() { echo "quickstart: $*" >&2; exit 1; }
say() { echo "[quickstart $((SECONDS - started)) s] $*"; }

# as_owner COMMAND... runs it as the person at the keyboard, with that person's home and PATH.
as_owner() {
  if [[ $owner == "$(id -un)" ]]; then
    "$@"
  else
    runuser -u "$owner" -- env HOME="$(getent passwd "$owner" | cut -d : -f 6)" PATH="$PATH" "$@"
  fi
}

# running prints the pid of the carreld that this state directory's pid file names; fails where it has ended.
running() {
  local pid
  pid=$(cat "$pid_file" 2>/dev/null) || return 1
  [[ $pid =~ ^[0-9]+$ && -r /proc/$pid/cmdline ]] && [[ $(tr '\0' ' ' <"/proc/$pid/cmdline") == *carreld*" dev "* ]] && echo "$pid"
}

# deployment prints the name under which the owner's CLI knows the gateway at $listen; nothing where it does not.
deployment() {
  as_owner bin/carrel deployment ls -o csv 2>/dev/null | awk -F , -v url="http://$listen" '$2 == url { print $1 }'
}

# carrel_here ARG... runs the CLI on that deployment, whichever is its default one.
carrel_here() { as_owner bin/carrel --deployment "$(deployment)" "$@"; }

check_listen() {
  [[ $listen =~ ^(127\.[0-9.]+|localhost|\[::1\]):[0-9]+$ ]] && ((port > 0 && port < 65536)) ||
    fail "CARREL_LISTEN is '$listen': the quick start serves plain HTTP, so name a loopback address and a port, for example 127.0.0.1:7070"
}

check_owner() {
  local other
  other=$(cat "$state/owner" 2>/dev/null) || return 0
  [[ $other == "$owner" ]] && return
  fail "$state belongs to the quick start of $other on this machine. Ask $other for an account of your own there (carrel user add $owner), or run a second one beside it: CARREL_STATE=/var/lib/carrel-dev-$owner CARREL_LISTEN=127.0.0.1:$((port + 1)) make quickstart"
}

check_port() {
  running >/dev/null && return
  (exec 3<>"/dev/tcp/${listen%:*}/$port") 2>/dev/null || return 0
  local holder
  holder=$(ss --listening --tcp --numeric --processes "sport = :$port" 2>/dev/null | sed -n 's/.*users:((\("[^"]*",pid=[0-9]*\).*/\1/p' | head -n 1)
  fail "port $port is taken${holder:+ by $holder}: end that program, or choose another port: CARREL_LISTEN=127.0.0.1:$((port + 1)) make quickstart"
}

start_gateway() {
  local pid deadline
  if pid=$(running); then
    if [[ $(readlink "/proc/$pid/exe") == "$root/bin/carreld" ]]; then
      say "carreld dev runs (pid $pid)"
      wait_ready "$pid"
      return
    fi
    say "carreld dev runs another build; starting it anew (workspaces go on)"
    stop_gateway "$pid"
  fi
  check_port
  setsid "$root/bin/carreld" dev --state "$state" --listen "$listen" </dev/null >>"$log" 2>&1 &
  pid=$!
  echo "$pid" >"$pid_file"
  say "carreld dev starts (pid $pid, log $log)"
  wait_ready "$pid"
}

wait_ready() {
  local deadline=$((SECONDS + ready_timeout))
  until curl --silent --fail --noproxy '*' --max-time 5 --output /dev/null "http://$listen/readyz"; do
    if ! kill -0 "$1" 2>/dev/null; then
      tail -n 15 "$log" >&2
      rm -f "$pid_file"
      fail "carreld dev ended (its last lines are above)"
    fi
    if ((SECONDS >= deadline)); then
      tail -n 15 "$log" >&2
      fail "carreld dev is not ready after $ready_timeout s (its last lines are above); CARREL_READY_TIMEOUT waits longer"
    fi
    sleep 0.2
  done
  say "ready at http://$listen"
}

stop_gateway() {
  local deadline=$((SECONDS + 30))
  kill -TERM "$1"
  while kill -0 "$1" 2>/dev/null; do
    if ((SECONDS >= deadline)); then
      say "carreld dev (pid $1) did not end within 30 s; killing it"
      kill -KILL "$1"
      break
    fi
    sleep 0.2
  done
  rm -f "$pid_file"
}

sign_in() {
  # An account at another deployment does not count.
  if [[ -n $(deployment) ]] && carrel_here whoami >/dev/null 2>&1; then
    say "signed in"
    return
  fi
  [[ -s $state/sign-in ]] || fail "$state/sign-in is missing: carreld dev writes it at its first start. Where you are signed in already, 'carrel user sign-in admin' prints another link"
  as_owner bin/carrel login "$(cat "$state/sign-in")" ||
    fail "the sign-in link in $state/sign-in was not accepted (above): it works once. Where you are signed in already, 'carrel user sign-in admin' prints another"
}

# bring_up NVIDIA starts demo; with a driver, on a CUDA image where its registry answers.
bring_up() {
  local options=()
  if [[ $1 == yes ]]; then
    say "pulling $cuda_image for demo"
    if timeout 1800 bash -c 'source deploy/scripts/engine-api.sh; engine_pull "$1"' pull "$cuda_image"; then
      options=(--image "$cuda_image")
    else
      say "$cuda_image could not be pulled, so demo uses carrel/base:local (the driver's own tools are put into it all the same)"
    fi
  fi
  if carrel_here show demo >/dev/null 2>&1; then options=(); fi
  ready=$(carrel_here up demo "${options[@]}")
  echo "$ready"
}

try_ssh() {
  # `up` ends with the line to type: the alias of this deployment, and -F where another ssh configuration is in use.
  local command=${ready##*ready: }
  [[ $command == ssh* ]] || fail "carrel up demo printed no ssh line: $ready"
  say "$command"
  # shellcheck disable=SC2016 # expanded in the workspace
  as_owner bash -c "ssh -o BatchMode=yes ${command#ssh} \"\$1\"" ssh 'echo "hello from $CARREL_WORKSPACE: $(uname -sr), $(nproc) cores"; nvidia-smi -L 2>/dev/null || echo "devices: ${CARREL_DEVICES:-none}"' ||
    fail "$command failed (above); 'bin/carrel doctor' looks for the cause"
}

next_steps() {
  cat <<EOT

Done in $((SECONDS - started)) s. Try next (put $root/bin on your PATH first: export PATH=$root/bin:\$PATH):

  ${ready##*ready: }
                                         a shell in the workspace; scp, rsync and -L work too
  carrel gpus                            who holds which GPU
  carrel up second --gpu 2               another workspace; a fifth GPU waits in the queue and says why
  carrel stop demo && carrel start demo  files in the home stay
  carrel usage --by workspace            GPU-hours, exact to the millisecond
  make quickstart-down                   ends it and keeps all data
EOT
}

up() {
  local nvidia=no status=0
  deploy/scripts/require.sh linux root go gcc git node
  check_listen
  check_owner
  check_port
  deploy/scripts/need.sh curl=curl ssh=openssh-client iptables=iptables ss=iproute2
  say "1/6 engine"
  deploy/scripts/engine.sh
  deploy/quickstart/nvidia.sh || status=$?
  case $status in
    0) nvidia=yes ;;
    1) say "no NVIDIA driver here: carreld dev simulates four GPUs" ;;
    *) exit "$status" ;;
  esac
  say "2/6 programs"
  as_owner mkdir -p bin .cache
  as_owner make --no-print-directory build
  say "3/6 base image"
  deploy/image/image.sh base
  say "4/6 carreld dev"
  install -d -m 0700 "$state"
  echo "$owner" >"$state/owner"
  start_gateway
  say "5/6 sign in"
  sign_in
  say "6/6 workspace demo"
  bring_up "$nvidia"
  try_ssh
  next_steps
}

down() {
  local pid name
  deploy/scripts/require.sh root
  check_owner
  if ! pid=$(running); then
    rm -f "$pid_file"
    say "carreld dev does not run (state $state); nothing to end"
    return
  fi
  if [[ -n $(deployment) ]]; then
    for name in $(carrel_here ls -q 2>/dev/null); do
      as_owner timeout "$stop_timeout" bin/carrel --deployment "$(deployment)" stop "$name" </dev/null ||
        say "$name did not stop (above); its container goes on until the next start"
    done
  fi
  stop_gateway "$pid"
  say "ended. All data stays in $state; 'make quickstart' goes on with it. The Docker engine was left running"
}

case ${1:-} in
  up | down) "$1" ;;
  *) fail "up or down?" ;;
esac
