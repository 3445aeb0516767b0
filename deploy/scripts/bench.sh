#!/usr/bin/env bash
# The benchmarks of cli/bench: each reports ratios against a bare counterpart (docker create and start, sshd on loopback)
# measured in the same run; only those are to be quoted.
#
#   BENCH_FLAGS   flags for the program (BENCH_FLAGS=-h lists them)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
deploy/scripts/require.sh go gcc linux root
deploy/scripts/need.sh ssh=openssh-client sshd=openssh-server rsync=rsync iptables=iptables ip=iproute2 curl=curl procps
deploy/scripts/engine.sh
deploy/image/image.sh all
read -r -a flags <<<"${BENCH_FLAGS:-}"
go build -trimpath -o .cache/bin/carrel-bench ./cli/bench
echo "$(nproc) cores, $(uname -sr), $(go env GOVERSION), load $(cut -d ' ' -f 1-3 /proc/loadavg)"
CARREL_TEST_BIN=$PWD/bin exec .cache/bin/carrel-bench "${flags[@]}"
