#!/usr/bin/env bash
# The long run of cli/bench/soak: churn, faults and leaks on real programs. Writes docs/soak-report.md.
#
#   SOAK_TIME    how long it goes on, a Go duration (default 30m)
#   SOAK_FLAGS   flags for the program (SOAK_FLAGS=-h lists them)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
deploy/scripts/require.sh go gcc git linux root
deploy/scripts/need.sh ssh=openssh-client iptables=iptables ip=iproute2 curl=curl
deploy/scripts/engine.sh
deploy/image/image.sh test
read -r -a flags <<<"${SOAK_FLAGS:-}"
export SOAK_TIME=${SOAK_TIME:-30m}
mkdir -p .cache/bin
go build -trimpath -o .cache/bin/carrel-soak ./cli/bench/soak
CARREL_TEST_BIN=$PWD/bin exec .cache/bin/carrel-soak "${flags[@]}"
