#!/usr/bin/env bash
# A hook of mmdebstrap: jupyter.sh ROOT RECIPE puts JupyterLab into the root file system at /opt/jupyter.
# The environment sees the system's and the user's packages, so that `pip install` in a workspace lands in the home.
set -euo pipefail
target=$1 recipe=$2

# The host's CA bundle and pip settings hold for this step only; none of them stays in the image.
extra=$target/tmp/carrel-build
mkdir -p "$extra"
trap 'rm -rf "$extra"' EXIT
settings=(PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore)
for file in "${PIP_CONFIG_FILE:-}" "$HOME/.config/pip/pip.conf" "$HOME/.pip/pip.conf" /etc/pip.conf; do
  if [[ -f $file ]]; then
    cp "$file" "$extra/pip.conf"
    settings+=(PIP_CONFIG_FILE=/tmp/carrel-build/pip.conf)
    break
  fi
done
for file in "${PIP_CERT:-}" "${SSL_CERT_FILE:-}" "${REQUESTS_CA_BUNDLE:-}" /etc/ssl/certs/ca-certificates.crt; do
  if [[ -s $file ]]; then
    cp "$file" "$extra/ca.crt"
    settings+=(PIP_CERT=/tmp/carrel-build/ca.crt)
    break
  fi
done
for name in PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_TRUSTED_HOST PIP_DEFAULT_TIMEOUT HTTP_PROXY HTTPS_PROXY NO_PROXY http_proxy https_proxy no_proxy; do
  [[ -n ${!name:-} ]] && settings+=("$name=${!name}")
done

cp "$recipe/requirements.txt" "$extra/"
inside() { chroot "$target" env -i "${settings[@]}" "$@"; }
inside python3 -m venv --system-site-packages /opt/jupyter
inside /opt/jupyter/bin/pip install --quiet --no-input --progress-bar off --requirement /tmp/carrel-build/requirements.txt
install -m 0644 "$recipe/profile.sh" "$target/etc/profile.d/carrel.sh"
inside /opt/jupyter/bin/jupyter lab --version >&2
