#!/usr/bin/env bash
# The end-to-end benchmarks: bench.sh [PACKAGE PATTERN...] (default ./cli/e2e/...). Each reports ratios against a bare counterpart
# (docker create and start, sshd on loopback) measured in the same run; only those are to be quoted.
#
#   BENCH       which benchmarks, a regular expression (default all)
#   BENCHTIME   go test's -benchtime (default 1x: each takes its own samples)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
deploy/scripts/require.sh go gcc linux root
deploy/scripts/need.sh ssh=openssh-client sshd=openssh-server rsync=rsync iptables=iptables ip=iproute2 curl=curl procps
deploy/scripts/engine.sh
deploy/image/image.sh all
[[ $# -gt 0 ]] || set -- ./cli/e2e/...
echo "$(nproc) cores, $(uname -sr), $(go env GOVERSION), load $(cut -d ' ' -f 1-3 /proc/loadavg)"
CARREL_BIN=$PWD/bin exec go test -run '^$' -bench "${BENCH:-.}" -benchtime "${BENCHTIME:-1x}" -timeout 60m -p 1 "$@"
