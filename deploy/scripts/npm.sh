#!/usr/bin/env bash
# Installs what DIR/package-lock.json pins, and does nothing where that is done: npm.sh DIR
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../$1"
cmp --silent package-lock.json node_modules/.carrel-lock && exit 0
echo "npm ci in $1" >&2
npm ci --no-fund --no-audit --loglevel=error >&2 || { echo "npm ci in $1 failed (above): does this machine reach the npm registry?" >&2; exit 1; }
cp package-lock.json node_modules/.carrel-lock
