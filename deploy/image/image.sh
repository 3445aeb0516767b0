#!/usr/bin/env bash
# Makes the local images: image.sh NAME..., where NAME is base, test, busybox, scratch or all.
#
#   base     carrel/base:local     Debian, Python, JupyterLab, git, rsync: the default image of a workspace
#   test     carrel/test:local     a small Debian for the end-to-end tests
#   busybox  carrel/busybox:local  busybox only: no glibc, bash, python or ssh
#   scratch  carrel/scratch:local  one static binary: no shell at all
#
# An image is made anew only when its recipe changed: the recipe's hash is a label of the image, and a tar of the root
# file system stays in .cache/image for an engine that lost it.
#
#   CARREL_BASE_IMAGE     a reference to pull and use as carrel/base:local instead of building one
#   CARREL_DEBIAN_MIRROR  where packages come from (default http://deb.debian.org/debian)
#   CARREL_DEBIAN_SUITE   the release of the base and the test image (default bookworm)
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
source "$root/deploy/scripts/engine-api.sh"

cache=$root/.cache/image
mirror=${CARREL_DEBIAN_MIRROR:-http://deb.debian.org/debian}
suite=${CARREL_DEBIAN_SUITE:-bookworm}
label=dev.carrel.recipe
started=$SECONDS

fail() { echo "image.sh: $*" >&2; exit 1; }
say() { echo "[image $((SECONDS - started)) s] $*" >&2; }

packages_of() { sed 's/#.*//' "$here/$1/packages" | xargs | tr ' ' ','; }

# recipe NAME prints the hash of all that decides what is in the image.
recipe() {
  {
    echo "$1 $(uname -m) $suite ${CARREL_BASE_IMAGE:-}"
    declare -f "root_$1"
    changes_of "$1"
    if [[ -e $here/$1/packages ]]; then declare -f debian; fi
    if [[ -d $here/$1 ]]; then find "$here/$1" -type f -print0 | sort -z | xargs -0 sha256sum | awk '{ print $1 }'; fi
  } | sha256sum | cut -c 1-32
}

# changes_of NAME prints the image's settings in Dockerfile words, one a line.
changes_of() {
  local path=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
  case $1 in
    base) echo "ENV PATH=/opt/jupyter/bin:$path" && echo "ENV LANG=C.UTF-8" && echo 'CMD ["/bin/bash"]' ;;
    test) echo "ENV PATH=$path" && echo "ENV LANG=C.UTF-8" && echo "ENV IMAGE_MARK=carrel-test" && echo 'CMD ["/bin/bash"]' ;;
    busybox) echo "ENV PATH=/bin" && echo 'CMD ["/bin/sh"]' ;;
    scratch) echo "ENV IMAGE_MARK=carrel-scratch" && echo 'ENTRYPOINT ["/app"]' ;;
  esac
}

# debian TAR PACKAGES [MMDEBSTRAP OPTION...] makes a Debian root file system without documentation and package lists.
debian() {
  local tar=$1 packages=$2
  shift 2
  [[ $(id -u) == 0 ]] || fail "building a Debian root needs root: run this as root, or set CARREL_BASE_IMAGE to an image to pull"
  "$root/deploy/scripts/need.sh" mmdebstrap=mmdebstrap debian-archive-keyring
  mmdebstrap --variant=minbase --include="$packages" --format=tar \
    --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-include=/usr/share/doc/*/copyright' \
    --dpkgopt=force-unsafe-io --aptopt='Acquire::Retries "3"' "$@" \
    --customize-hook='rm -f "$1/etc/hostname" "$1/etc/resolv.conf"' \
    "$suite" "$tar" "deb $mirror $suite main" "deb $mirror $suite-updates main" \
    "deb ${mirror%/debian}/debian-security $suite-security main" >&2 ||
    fail "mmdebstrap failed (above): does $mirror answer? CARREL_DEBIAN_MIRROR names another mirror"
}

root_base() {
  debian "$1" "$(packages_of base)" --customize-hook="$here/base/jupyter.sh \"\$1\" $here/base"
}

root_test() { debian "$1" "$(packages_of test)"; }

root_busybox() {
  local dir
  "$root/deploy/scripts/need.sh" busybox-static
  dir=$(mktemp -d "$cache/busybox.XXXXXX")
  mkdir -p "$dir"/{bin,etc,tmp,root,home,proc,sys,dev}
  chmod 1777 "$dir/tmp"
  cp "$(dpkg -L busybox-static | grep -m 1 -E '/bin/busybox$')" "$dir/bin/busybox"
  (cd "$dir/bin" && for applet in $(./busybox --list); do [[ $applet == busybox ]] || ln -s busybox "$applet"; done)
  echo 'root:x:0:0:root:/root:/bin/sh' >"$dir/etc/passwd"
  echo 'root:x:0:' >"$dir/etc/group"
  tar --create --numeric-owner --owner=0 --group=0 --file "$1" --directory "$dir" .
  rm -rf "$dir"
}

root_scratch() {
  local dir
  dir=$(mktemp -d "$cache/scratch.XXXXXX")
  (cd "$root" && CGO_ENABLED=0 go build -trimpath -ldflags='-s -w' -o "$dir/app" ./deploy/image/scratch)
  tar --create --numeric-owner --owner=0 --group=0 --file "$1" --directory "$dir" app
  rm -rf "$dir"
}

# make NAME leaves carrel/NAME:local in the engine, as its recipe says.
make_image() {
  local name=$1 image=carrel/$1:local hash tar before changes=()
  hash=$(recipe "$name")
  if [[ $(engine_image_label "$image" "$label") == "$hash" ]]; then
    say "$image is there"
    return
  fi
  if [[ $name == base && -n ${CARREL_BASE_IMAGE:-} ]]; then
    say "pulling $CARREL_BASE_IMAGE"
    engine_pull "$CARREL_BASE_IMAGE" || fail "$CARREL_BASE_IMAGE could not be pulled (above): does its registry answer from this machine? Without CARREL_BASE_IMAGE a Debian image is built here"
    engine_tag "$CARREL_BASE_IMAGE" "$image"
    return
  fi

  mkdir -p "$cache"
  tar=$cache/$name-$hash.tar
  if [[ ! -s $tar.gz ]]; then
    say "making $image (kept for the next time)"
    rm -f "$cache/$name-"*
    "root_$name" "$tar"
    gzip -1 --force "$tar"
  fi
  mapfile -t changes < <(changes_of "$name"; echo "LABEL $label=$hash")
  before=$(engine_image_id "$image" || true)
  engine_import "$image" "$tar.gz" "${changes[@]}" || fail "the engine did not take $image (above)"
  # The one that it replaces goes, unless a container still uses it.
  if [[ -n $before ]]; then engine_call "/images/$before" -X DELETE >/dev/null 2>&1 || true; fi
  say "$image made"
}

[[ $# -gt 0 ]] || fail "which image? base, test, busybox, scratch or all"
engine_version >/dev/null || fail "no Docker engine answers at $(engine_socket): run deploy/scripts/engine.sh"
[[ $1 == all ]] && set -- scratch busybox test base
for name in "$@"; do
  [[ $(type -t "root_$name") == function ]] || fail "unknown image $name: base, test, busybox, scratch or all"
done
# One builder at a time: two would fill the same cache file.
mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9
for name in "$@"; do make_image "$name"; done
