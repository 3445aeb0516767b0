#!/usr/bin/env bash
# The long run of cli/bench/soak: churn, faults and leaks on real programs.
#
#   SOAK_TIME    how long it goes on, a Go duration (default 30m)
#   SOAK_FLAGS   flags for the program (SOAK_FLAGS=-h lists them)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
deploy/scripts/require.sh go gcc linux root
deploy/scripts/need.sh ssh=openssh-client rsync=rsync iptables=iptables ip=iproute2 curl=curl procps
deploy/scripts/engine.sh
deploy/image/image.sh all
read -r -a flags <<<"${SOAK_FLAGS:-}"
export SOAK_TIME=${SOAK_TIME:-30m}
go build -trimpath -o .cache/bin/carrel-soak ./cli/bench/soak
CARREL_TEST_BIN=$PWD/bin exec .cache/bin/carrel-soak "${flags[@]}"
