#!/usr/bin/env bash
# The benchmarks of cli/bench: each reports ratios against a bare counterpart (docker create and start, sshd on loopback)
# measured in the same run; only those are to be quoted. docs/performance.md says what is measured and what the targets are.
#
#   BENCH         which of standing up copy roundtrip bulk idle copy-tls go (default all)
#   BENCH_SIZE    MiB of each transfer (default 256; 1024 for a long run)
#   BENCH_FLAGS   more flags for the program (BENCH_FLAGS=-h lists them; -gate fails where a target is missed by a fifth)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
deploy/scripts/require.sh go gcc git linux root
deploy/scripts/need.sh ssh=openssh-client sshd=openssh-server socat=socat iptables=iptables ip=iproute2 curl=curl
deploy/scripts/engine.sh
deploy/image/image.sh test
read -r -a flags <<<"${BENCH_FLAGS:-}"
[[ -z ${BENCH:-} ]] || flags=(-bench "$BENCH" "${flags[@]}")
mkdir -p .cache/bin
go build -trimpath -o .cache/bin/carrel-bench ./cli/bench
CARREL_TEST_BIN=$PWD/bin exec .cache/bin/carrel-bench -size "${BENCH_SIZE:-256}" "${flags[@]}"
