#!/usr/bin/env bash
# Cross-builds the release files into dist/VERSION; called by `make dist`, which names version and targets.
#
#   carrel-<os>-<arch>[.exe]        the CLI, without cgo; a copy goes to bin/cli, from where the gateway serves it
#   carreld-linux-<arch>            gateway and agent; with NVML only for this machine's architecture: another would
#                                   need a C cross compiler (CC_arm64, CC_amd64 name one)
#   carrel-init-linux-<arch>        the program inside workspaces, without cgo
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out=dist/$VERSION
rm -rf "$out"
mkdir -p "$out" bin/cli

build() { # FILE PACKAGE OS ARCH CGO
  GOOS=$3 GOARCH=$4 CGO_ENABLED=$5 go build -trimpath -ldflags "$LDFLAGS" -o "$out/$1" "$2"
  printf '%s  %5d KiB\n' "$out/$1" $(($(stat --format %s "$out/$1") / 1024))
}

for target in $CLI_TARGETS; do
  os=${target%/*} arch=${target#*/} suffix=
  [[ $os == windows ]] && suffix=.exe
  build "carrel-$os-$arch$suffix" ./cli/cmd/carrel "$os" "$arch" 0
  cp "$out/carrel-$os-$arch$suffix" "bin/cli/.carrel-$os-$arch$suffix.new"
  mv "bin/cli/.carrel-$os-$arch$suffix.new" "bin/cli/carrel-$os-$arch$suffix"
done
for target in $HOST_TARGETS; do
  arch=${target#*/}
  compiler=CC_$arch
  if [[ $arch == $(go env GOHOSTARCH) ]]; then
    build "carreld-linux-$arch" ./services/cmd/carreld linux "$arch" 1
  elif [[ -n ${!compiler:-} ]]; then
    CC=${!compiler} build "carreld-linux-$arch" ./services/cmd/carreld linux "$arch" 1
  else
    build "carreld-linux-$arch" ./services/cmd/carreld linux "$arch" 0
    echo "note: carreld-linux-$arch reads no GPUs (no cgo, so no NVML): build it on such a machine, or name a C cross compiler in $compiler"
  fi
  build "carrel-init-linux-$arch" ./agent/cmd/carrel-init linux "$arch" 0
done
(cd "$out" && sha256sum -- * >SHA256SUMS)
echo "$out/SHA256SUMS"
