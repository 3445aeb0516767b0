#!/usr/bin/env bash
# Looks whether containers on this machine can get its NVIDIA GPUs, for quickstart.sh.
# Exit 0: they can. Exit 1: there is no driver, so there is nothing to do. Exit 2: the toolkit is missing; says what to do.
#
#   CARREL_INSTALL_TOOLKIT=yes  install and configure nvidia-container-toolkit instead of printing the commands
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
say() { echo "[nvidia] $*" >&2; }

command -v nvidia-smi >/dev/null 2>&1 || exit 1
if ! gpus=$(nvidia-smi -L 2>&1); then
  say "nvidia-smi is there, but the driver does not answer: $gpus"
  exit 1
fi
say "the driver answers:"
sed 's/^/  /' <<<"$gpus" >&2

if command -v nvidia-container-runtime-hook >/dev/null 2>&1; then
  say "nvidia-container-toolkit is installed"
  exit 0
fi

list=/etc/apt/sources.list.d/nvidia-container-toolkit.list
key=/usr/share/keyrings/nvidia-container-toolkit-keyring.gpg
commands="curl -fsSL https://nvidia.github.io/libnvidia-container/gpgkey | gpg --batch --yes --dearmor -o $key
echo 'deb [signed-by=$key] https://nvidia.github.io/libnvidia-container/stable/deb/\$(ARCH) /' >$list
apt-get update
apt-get install --yes nvidia-container-toolkit
nvidia-ctk runtime configure --runtime=docker"

if [[ ${CARREL_INSTALL_TOOLKIT:-} != yes ]]; then
  say "nvidia-container-toolkit is missing, so containers here get no GPU. As root:"
  { echo "$commands"; echo "systemctl restart docker"; } | sed 's/^/    /' >&2
  say "then run make quickstart again; or let it do this: CARREL_INSTALL_TOOLKIT=yes make quickstart"
  exit 2
fi
say "installing nvidia-container-toolkit"
"$here/../scripts/need.sh" curl=curl gpg=gpg
bash -euo pipefail -c "$commands" >&2
# The engine reads its runtimes and looks for the hook when it starts.
if [[ -d /run/systemd/system ]]; then
  systemctl restart docker.service
else
  say "start the Docker engine anew (its process is not systemd's), then run make quickstart again"
  exit 2
fi
