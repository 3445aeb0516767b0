#!/usr/bin/env bash
# Installs the pinned build tools into .cache/bin, once per version: tool.sh NAME...
# Names: buf protoc-gen-go protoc-gen-connect-go protoc-gen-es gofumpt golangci-lint govulncheck vulndb-index
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root"
bin=$root/.cache/bin
mkdir -p "$bin"

have() { command -v "$1" >/dev/null 2>&1; }
fail() { echo "tool.sh: $*" >&2; exit 1; }
have go || fail "go is not on PATH: install Go 1.26 or newer (https://go.dev/dl) and try again"

# The plugins follow the runtime that go.mod names, so that generated code and runtime always agree.
required() { awk -v m="$1" '$1 == m || $2 == m { for (i = 1; i <= NF; i++) if ($i ~ /^v[0-9]/) { print $i; exit } }' go.mod; }

package_of() {
  case $1 in
    buf) echo github.com/bufbuild/buf/cmd/buf@v1.75.0 ;;
    protoc-gen-go) echo "google.golang.org/protobuf/cmd/protoc-gen-go@$(required google.golang.org/protobuf)" ;;
    protoc-gen-connect-go) echo "connectrpc.com/connect/cmd/protoc-gen-connect-go@$(required connectrpc.com/connect)" ;;
    gofumpt) echo mvdan.cc/gofumpt@v0.12.0 ;;
    golangci-lint) echo github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.15.0 ;;
    govulncheck) echo golang.org/x/vuln/cmd/govulncheck@v1.9.0 ;;
    *) fail "unknown tool $1" ;;
  esac
}

install_go_tool() {
  local name=$1 package stamp started
  package=$(package_of "$name")
  stamp=$bin/.$name@${package##*@}-$(go env GOVERSION)
  [[ -e $stamp && -x $bin/$name ]] && return
  started=$SECONDS
  echo "installing $package (the first time takes up to two minutes)" >&2
  GOBIN=$bin GOFLAGS=-buildvcs=false CGO_ENABLED=0 go install -trimpath -ldflags='-s -w' "$package" ||
    fail "$package did not install: the Go module proxy must answer (go env GOPROXY says which one is asked)"
  rm -f "$bin/.$name@"*
  touch "$stamp"
  echo "installed $name in $((SECONDS - started)) s" >&2
}

# protoc-gen-es is pinned by gen/ts/package-lock.json.
install_protoc_gen_es() {
  local lock=gen/ts/package-lock.json stamp=gen/ts/node_modules/.carrel-lock
  cmp -s "$lock" "$stamp" && return
  have npm || fail "npm is not on PATH: install Node.js 20 or newer (on Debian and Ubuntu: apt-get install nodejs npm) and try again"
  echo "installing protoc-gen-es from $lock" >&2
  npm ci --prefix gen/ts --ignore-scripts --no-fund --no-audit --loglevel=error >&2 || fail "npm ci in gen/ts failed: the npm registry must answer"
  cp "$lock" "$stamp"
}

# Two makes in one checkout must not write one binary at the same time.
exec 9>"$root/.cache/tools.lock"
flock 9
for name in "$@"; do
  case $name in
    protoc-gen-es) install_protoc_gen_es ;;
    *) install_go_tool "$name" ;;
  esac
done
