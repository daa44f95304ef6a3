#!/bin/sh
# Run a command and, where there is no terminal, say now and then that it still runs: installers show
# their progress on terminals only, and a first install takes a minute or more.
#
#   telling.sh WHAT COMMAND...    WHAT: what it does, for the lines
#
# TELLING_EVERY_S: seconds between two lines.
set -eu
what=$1
shift
if [ -t 1 ] && [ -t 2 ]; then
    exec "$@"
fi

tell() {
    seconds=0
    # The pipe that reads our output is not held open by a sleep; after a kill of ours this ends too.
    while sleep 1 >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do
        seconds=$((seconds + 1))
        [ $((seconds % ${TELLING_EVERY_S:-10})) -ne 0 ] || echo "$what: $seconds s so far"
    done
}

tell &
teller=$!
trap 'kill "$teller" 2>/dev/null || true' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
"$@"
