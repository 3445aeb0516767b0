#!/usr/bin/env bash
# Generates gen/go and gen/ts from proto: generate.sh, or generate.sh --check, which changes nothing and fails where gen is out of date.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root"
deploy/scripts/tool.sh buf protoc-gen-go protoc-gen-connect-go protoc-gen-es

fresh=$(mktemp -d "$root/.cache/gen.XXXXXX")
trap 'rm -rf "$fresh"' EXIT
mkdir -p "$fresh/gen/go/carrel" "$fresh/gen/ts/carrel"
if [[ -n $(find proto -name '*.proto' -print -quit 2>/dev/null) ]]; then
  PATH=$root/.cache/bin:$PATH buf generate --output "$fresh"
else
  echo "generate.sh: no .proto file under proto yet; nothing to generate" >&2
fi

# Only what differs is written: an unchanged file keeps its time, and a compile that runs meanwhile sees whole files.
stale=0
for part in gen/go/carrel gen/ts/carrel; do
  while IFS= read -r -d '' file; do
    if ! cmp -s "$fresh/$file" "$file"; then
      stale=1
      if [[ ${1:-} == --check ]]; then
        echo "out of date: $file" >&2
      else
        mkdir -p "$(dirname "$file")"
        cp "$fresh/$file" "$file.new" && mv "$file.new" "$file"
      fi
    fi
  done < <(cd "$fresh" && find "$part" -type f -print0)
  [[ -d $part ]] || continue
  while IFS= read -r -d '' file; do
    [[ -e $fresh/$file ]] && continue
    stale=1
    if [[ ${1:-} == --check ]]; then echo "no longer generated: $file" >&2; else rm "$file"; fi
  done < <(find "$part" -type f -print0)
  [[ ${1:-} == --check ]] || find "$part" -depth -type d -empty -delete
done

if [[ ${1:-} == --check && $stale == 1 ]]; then
  echo "gen is out of date: run 'make generate' and commit what changed" >&2
  exit 1
fi
