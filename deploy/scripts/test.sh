#!/usr/bin/env bash
# All tests: test.sh [PACKAGE PATTERN...]. Brings what they need (packages, engine, programs, images), then runs them with -race.
#
#   TEST_TIMEOUT   limit for one package (default 20m)
#   TEST_PARALLEL  packages at a time (default: the number of cores)
#   TEST_FLAGS     more flags for go test, for example "-run TestAttach -count 3"
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
deploy/scripts/require.sh go gcc git node linux root

steps=()
timed() { # NAME COMMAND...
  local name=$1 started=$SECONDS
  shift
  echo "== $name"
  "$@"
  steps+=("$(printf '%5d s  %s' $((SECONDS - started)) "$name")")
}

packages() {
  deploy/scripts/need.sh ssh=openssh-client sshd=openssh-server sftp=openssh-client rsync=rsync socat=socat \
    iptables=iptables ip=iproute2 curl=curl procps
}

# Output of a passing test is kept in .cache/test.json and not shown.
go_tests() {
  local flags=()
  read -r -a flags <<<"${TEST_FLAGS:-}"
  go build -o .cache/bin/testreport ./deploy/testreport
  CARREL_TEST_BIN=$PWD/bin go test -json -race -timeout "${TEST_TIMEOUT:-20m}" -p "${TEST_PARALLEL:-$(nproc)}" "${flags[@]}" "$@" 2>&1 |
    tee .cache/test.json | .cache/bin/testreport
}

typescript_tests() {
  local dir
  for dir in services/web vscode-extension; do
    [[ -e $dir/package.json ]] || continue
    echo "-- $dir"
    deploy/scripts/npm.sh "$dir"
    npm test --prefix "$dir"
  done
}

mkdir -p .cache/bin
timed "packages" packages
timed "engine" deploy/scripts/engine.sh
timed "programs" make --no-print-directory build
timed "images" deploy/image/image.sh all
if [[ $# -gt 0 ]]; then
  timed "go tests" go_tests "$@"
else
  timed "typescript tests" typescript_tests
  timed "go tests" go_tests ./...
fi
echo
echo "steps, slowest first"
printf '%s\n' "${steps[@]}" | sort --numeric-sort --reverse
