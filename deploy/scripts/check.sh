#!/usr/bin/env bash
# All static checks: check.sh [STEP...]. Every step runs, also after a failed one; the closing table tells times and failures.
# A step exits 0 (passed), 1 (failed) or 77 (not done, with the reason printed).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
bin=$PWD/.cache/bin
not_done=77

go_files() { git ls-files -z --cached --others --exclude-standard '*.go' ':!gen'; }

step_format() {
  local wrong
  deploy/scripts/tool.sh gofumpt || return 1
  wrong=$(go_files | xargs -0 --no-run-if-empty "$bin/gofumpt" -l) || return 1
  [[ -z $wrong ]] && return
  echo "not formatted (run 'make format'):"
  echo "$wrong"
  return 1
}

step_lint() {
  deploy/scripts/tool.sh golangci-lint || return 1
  "$bin/golangci-lint" run ./...
}

step_modules() {
  go mod verify || return 1
  go mod tidy -diff >.cache/tidy.diff 2>&1 && return
  grep '^[-+]' .cache/tidy.diff | grep -v 'go.sum' | head -n 20
  echo "go.mod and go.sum are not tidy (the first lines are above): run 'go mod tidy'"
  return 1
}

step_proto() {
  deploy/scripts/tool.sh buf || return 1
  "$bin/buf" lint
}

step_breaking() {
  local release
  deploy/scripts/tool.sh buf || return 1
  release=$(git describe --tags --abbrev=0 --match 'v*' 2>/dev/null) || {
    echo "no release yet, so there is nothing to stay compatible with"
    return $not_done
  }
  "$bin/buf" breaking --against ".git#tag=$release"
}

step_generate() { deploy/scripts/generate.sh --check; }

# The database comes as a Go module, so that this needs no other host than the module proxy.
step_vulnerabilities() {
  local version dir database
  if ! version=$(cd / && go list -m -f '{{.Version}}' golang.org/x/vulndb@latest 2>/dev/null) ||
    ! dir=$(cd / && go mod download -json "golang.org/x/vulndb@$version" 2>/dev/null | sed -n 's/.*"Dir": "\(.*\)".*/\1/p') ||
    [[ -z $dir ]] || ! deploy/scripts/tool.sh govulncheck indexdb; then
    echo "vulnerabilities not checked: the database (Go module golang.org/x/vulndb) cannot be had"
    return $not_done
  fi
  database=$PWD/.cache/vulndb/$version
  if [[ ! -e $database/index/db.json ]]; then
    rm -rf "$PWD/.cache/vulndb"
    "$bin/indexdb" -vulns "$dir/data/osv" -out "$database" || return 1
  fi
  echo "database $version"
  # 3 is "found some"; what else is not 0 is a failure of the tool, for example because the code does not compile.
  "$bin/govulncheck" -db "file://$database" ./... >.cache/vulnerabilities.txt
  case $? in
    0 | 3) awk -f deploy/scripts/vulnerabilities.awk .ci/accepted-vulnerabilities .cache/vulnerabilities.txt ;;
    *) return 1 ;;
  esac
}

# Without cgo everything builds (agent/nvml as a stub), and the CLI builds for every system that it is released for.
step_cgo_off() {
  CGO_ENABLED=0 go build ./... || return 1
  local os
  for os in darwin windows; do
    [[ -d cli/cmd/carrel ]] || break
    CGO_ENABLED=0 GOOS=$os GOARCH=arm64 go vet ./cli/cmd/carrel || return 1
  done
}

step_sizes() { go run ./deploy/sizecheck; }

step_shell() {
  bash -n deploy/scripts/*.sh deploy/image/*.sh deploy/image/*/*.sh deploy/quickstart/*.sh .ci/run || return 1
  if ! command -v shellcheck >/dev/null 2>&1; then
    echo "syntax only: shellcheck is not on PATH (Debian package shellcheck)"
    return
  fi
  shellcheck --shell=bash --severity=warning --external-sources deploy/scripts/*.sh deploy/image/*.sh deploy/image/*/*.sh deploy/quickstart/*.sh .ci/run
}

step_typescript() {
  local dir script found=
  for dir in services/web vscode-extension; do
    [[ -e $dir/package.json ]] || continue
    found=1
    deploy/scripts/npm.sh "$dir" || return 1
    for script in typecheck lint; do npm run --silent "$script" --prefix "$dir" || return 1; done
  done
  [[ -n $found ]] || { echo "no TypeScript yet"; return $not_done; }
}

steps=(format sizes shell modules proto breaking generate cgo_off lint vulnerabilities typescript)
[[ $# -gt 0 ]] && steps=("$@")
deploy/scripts/require.sh go git node || exit 1
mkdir -p .cache
table=() failed=()
for step in "${steps[@]}"; do
  if [[ $(type -t "step_$step") != function ]]; then
    echo "unknown step $step" >&2
    exit 2
  fi
  echo "== $step"
  started=$SECONDS
  "step_$step"
  case $? in
    0) result=passed ;;
    "$not_done") result="not done" ;;
    *) result=FAILED && failed+=("$step") ;;
  esac
  table+=("$(printf '%5d s  %-9s %s' $((SECONDS - started)) "$result" "$step")")
done
echo
echo "checks, slowest first"
printf '%s\n' "${table[@]}" | sort --numeric-sort --reverse
if [[ ${#failed[@]} -gt 0 ]]; then
  echo "check failed: ${failed[*]}" >&2
  exit 1
fi
