#!/bin/sh
# The torch engine on a GPU in at most 4 minutes: correctness, profiles, throughput. Needs Python with
# torch, transformers and grpcio, no network and nothing installed; on a CPU use --smoke. See gpu.py.
set -eu
cd "$(dirname "$0")/../.."
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error
# Torch's threads wait for each other by spinning, which on shared cores makes passes much longer.
export OMP_WAIT_POLICY=PASSIVE
exec timeout 240 "${PYTHON:-python3}" -m ops.bench.gpu "$@"
