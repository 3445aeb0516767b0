#!/usr/bin/env bash
# Installs the Debian packages that are missing, and does nothing where none is: need.sh PACKAGE...
# PACKAGE may be COMMAND=PACKAGE: then it is missing only where no such command is on PATH.
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
  missing+=("$package")
done
[[ ${#missing[@]} == 0 ]] && exit 0

command -v apt-get >/dev/null 2>&1 ||
  fail "missing: ${missing[*]}. This is no Debian or Ubuntu (no apt-get), so install them by this system's own package manager and try again"
[[ $(id -u) == 0 ]] ||
  fail "missing: ${missing[*]}. Install them as root and try again: sudo apt-get install ${missing[*]}"

# One update a day is enough; a package that is not found gets one more.
echo "installing ${missing[*]}" >&2
lock=(-o DPkg::Lock::Timeout=300)
log=$(mktemp)
trap 'rm -f "$log"' EXIT
install() { DEBIAN_FRONTEND=noninteractive apt-get "${lock[@]}" install --yes --no-install-recommends "${missing[@]}" >"$log" 2>&1; }
if [[ -z $(find /var/lib/apt/lists -maxdepth 1 -name '*Packages*' -mtime -1 -print -quit 2>/dev/null) ]] || ! install; then
  apt-get "${lock[@]}" update >"$log" 2>&1 || { tail -n 20 "$log" >&2; fail "apt-get update failed (above): is this machine's package mirror reached?"; }
  install || { tail -n 20 "$log" >&2; fail "apt-get could not install ${missing[*]} (above)"; }
fi
