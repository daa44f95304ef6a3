#!/bin/sh
# Measure what a first `make demo` downloads and takes on disk: a copy of the last commit, an empty
# cache, a new environment, all removed afterwards. Downloads gigabytes. Linux: bytes received on all
# interfaces but loopback, so leave the machine alone meanwhile.
set -eu
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
received() {
    awk -F '[: ]+' '/:/ && !/lo:/ { sub(/^ +/, ""); total += $2 } END { printf "%.0f", total }' /proc/net/dev
}
git archive HEAD | tar -x -C "$work" -f -
before=$(received)
UV_CACHE_DIR=$work/cache sh "$work/ops/env/install.sh" run >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
echo "downloaded: $((($(received) - before) / 1000000)) MB"
echo "on disk: $(du -sm "$work/.venv" | cut -f 1) MiB in the environment"
tail -n 1 "$work/log"
