#!/usr/bin/env bash
# Installs the Debian packages that are missing, and does nothing where none is: need.sh PACKAGE...
# PACKAGE may be COMMAND=PACKAGE: then it is missing only where no such command is on PATH.
# A package installed here starts no service, now or at the next boot: who needs one running starts it.
set -euo pipefail
fail() { echo "need.sh: $*" >&2; exit 1; }

PATH=$PATH:/usr/sbin:/sbin
missing=()
for want in "$@"; do
  package=${want##*=}
  if [[ $want == *=* ]]; then
    command -v "${want%%=*}" >/dev/null 2>&1 && continue
  else
    [[ $(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null) == installed ]] && continue
  fi
  [[ " ${missing[*]:-} " == *" $package "* ]] || missing+=("$package")
done
[[ ${#missing[@]} == 0 ]] && exit 0

command -v apt-get >/dev/null 2>&1 ||
  fail "missing: ${missing[*]}. This is no Debian or Ubuntu (no apt-get): install them with this system's own package manager and try again"
[[ $(id -u) == 0 ]] ||
  fail "missing: ${missing[*]}. You are not root, so install them first: sudo apt-get install --no-install-recommends ${missing[*]}"

exec 9>/run/lock/carrel-need.lock
flock 9
log=$(mktemp)
policy=/usr/sbin/policy-rc.d
made_policy=
cleanup() {
  rm -f "$log"
  if [[ -n $made_policy ]]; then rm -f "$policy"; fi
}
trap cleanup EXIT
if [[ ! -e $policy ]]; then
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod +x "$policy"
  made_policy=1
fi

apt() { DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 "$@" >"$log" 2>&1 9>&-; }
echo "installing ${missing[*]}" >&2
# Lists of the last day will do; where they do not, they are fetched once more.
fresh=$(find /var/lib/apt/lists -maxdepth 1 -name '*Packages*' -mtime -1 -print -quit 2>/dev/null || true)
if [[ -z $fresh ]] || ! apt install --yes --no-install-recommends "${missing[@]}"; then
  apt update || { tail -n 20 "$log" >&2; fail "apt-get update failed (above): does this machine reach its package mirror?"; }
  apt install --yes --no-install-recommends "${missing[@]}" || { tail -n 20 "$log" >&2; fail "apt-get could not install ${missing[*]} (above)"; }
fi
# Tests call sshd themselves, on loopback; this machine gets no open port from us.
if [[ " ${missing[*]} " == *" openssh-server "* && -d /run/systemd/system ]]; then
  systemctl disable --quiet ssh.service ssh.socket 2>/dev/null || true
fi
