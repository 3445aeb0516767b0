#!/usr/bin/env bash
# The long tests: soak.sh [PACKAGE PATTERN...] (default ./...). They are named TestSoak... and built with the tag soak only.
#
#   SOAK_TIME   how long each goes on, a Go duration (default 30m)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
deploy/scripts/require.sh go gcc linux root
deploy/scripts/need.sh ssh=openssh-client rsync=rsync iptables=iptables ip=iproute2 curl=curl procps
deploy/scripts/engine.sh
deploy/image/image.sh all
[[ $# -gt 0 ]] || set -- ./...
export SOAK_TIME=${SOAK_TIME:-30m}
CARREL_BIN=$PWD/bin exec go test -race -tags soak -run '^TestSoak' -v -timeout 0 -p 1 "$@"
