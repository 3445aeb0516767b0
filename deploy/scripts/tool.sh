#!/usr/bin/env bash
# Installs the pinned build tools into .cache/bin, once per version: tool.sh NAME...
# Names: buf protoc-gen-go protoc-gen-connect-go protoc-gen-es gofumpt golangci-lint govulncheck indexdb
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root"
bin=$root/.cache/bin
mkdir -p "$bin"

fail() { echo "tool.sh: $*" >&2; exit 1; }
deploy/scripts/require.sh go

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
    indexdb) echo golang.org/x/vulndb/cmd/indexdb@v0.0.0-20261105234957-e22db6528018 ;;
    *) fail "unknown tool $1" ;;
  esac
}

install_go_tool() {
  local name=$1 package stamp started log
  package=$(package_of "$name")
  stamp=$bin/.$name@${package##*@}-$(go env GOVERSION)
  [[ -e $stamp && -x $bin/$name ]] && return
  started=$SECONDS
  log=$bin/.$name.log
  echo "installing $package (the first time takes up to two minutes)" >&2
  if ! GOBIN=$bin GOFLAGS=-buildvcs=false CGO_ENABLED=0 go install -trimpath -ldflags='-s -w' "$package" >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    fail "$package did not install (above): does the Go module proxy answer? 'go env GOPROXY' says which one is asked"
  fi
  rm -f "$log" "$bin/.$name@"*
  touch "$stamp"
  echo "installed $name in $((SECONDS - started)) s" >&2
}

# Two makes in one checkout must not write one binary at the same time.
exec 9>"$root/.cache/tools.lock"
flock 9
for name in "$@"; do
  case $name in
    # Pinned by gen/ts/package-lock.json.
    protoc-gen-es) deploy/scripts/require.sh node && deploy/scripts/npm.sh gen/ts ;;
    *) install_go_tool "$name" ;;
  esac
done
