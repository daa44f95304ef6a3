#!/bin/sh
# Print the path of a uv that this project can use: the one named by UV, the one on PATH, or one
# that pip installs under .cache/tools where there is none. The system's Python is left as it is.
set -eu
cd "$(dirname "$0")/../.."
version=0.13.9
own=.cache/tools/uv-$version

# Old versions lack --torch-backend, the option behind UV_TORCH_BACKEND.
usable() {
    "$1" pip install --help 2>/dev/null | grep -q -e '--torch-backend'
}

if [ -n "${UV:-}" ]; then
    printf '%s\n' "$UV"
    exit 0
fi
for candidate in "$(command -v uv || true)" "$PWD/$own/bin/uv"; do
    if [ -n "$candidate" ] && usable "$candidate"; then
        printf '%s\n' "$candidate"
        exit 0
    fi
done

# Any Python that has pip will do to fetch uv; uv then finds one of the right version.
for python in "${PYTHON:-}" python3 python3.13 python3.12 python3.11 python; do
    if [ -n "$python" ] && "$python" -m pip --version >/dev/null 2>&1; then
        echo "uv is not installed; pip puts uv $version into $own" >&2
        rm -rf "$own"
        PIP_ROOT_USER_ACTION=ignore "$python" -m pip install --quiet --target "$own" "uv==$version" >&2
        printf '%s\n' "$PWD/$own/bin/uv"
        exit 0
    fi
done
echo "Neither uv nor a Python with pip was found. Install uv, or name a Python by PYTHON=..." >&2
exit 1
