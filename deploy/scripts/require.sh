#!/usr/bin/env bash
# Says what is missing on this machine to build Carrel, all at once: require.sh go|gcc|node|git|root...
set -euo pipefail
missing=()
for want in "$@"; do
  case $want in
    go)
      if ! command -v go >/dev/null 2>&1; then
        missing+=("Go is not on PATH: install Go 1.26 or newer from https://go.dev/dl")
      elif ! printf 'go1.26\n%s\n' "$(GOTOOLCHAIN=local go env GOVERSION)" | sort --version-sort --check=quiet; then
        missing+=("$(GOTOOLCHAIN=local go env GOVERSION) is too old: Carrel needs Go 1.26 or newer from https://go.dev/dl")
      fi
      ;;
    gcc) command -v "${CC:-gcc}" >/dev/null 2>&1 || missing+=("no C compiler: carreld reads GPUs through cgo. On Debian and Ubuntu: apt-get install gcc libc6-dev (CC names another compiler)") ;;
    git) command -v git >/dev/null 2>&1 || missing+=("git is not on PATH. On Debian and Ubuntu: apt-get install git") ;;
    node)
      if ! command -v node >/dev/null 2>&1 || ! command -v npm >/dev/null 2>&1; then
        missing+=("Node.js with npm is not on PATH: install Node.js 20 or newer. On Debian and Ubuntu: apt-get install nodejs npm")
      elif (($(node -p 'process.versions.node.split(".")[0]') < 20)); then
        missing+=("Node.js $(node --version) is too old: version 20 or newer is needed")
      fi
      ;;
    root) [[ $(id -u) == 0 ]] || missing+=("you are $(id -un), not root: the agent starts containers and owns volumes. Run it as root: sudo -E env PATH=\"\$PATH\" make ...") ;;
    linux) [[ $(uname -s) == Linux ]] || missing+=("this is $(uname -s): workspaces run on Linux hosts. On this machine 'make dist' builds the CLI") ;;
    *) missing+=("require.sh knows no $want") ;;
  esac
done
[[ ${#missing[@]} == 0 ]] && exit 0
printf 'cannot go on:\n' >&2
printf '  - %s\n' "${missing[@]}" >&2
exit 1
