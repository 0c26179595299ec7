#!/usr/bin/env bash
# All that is to be measured on a GPU, in order of worth: bash benchmarks/gpu.sh [minutes] [--small] [--parts bits …]
# Weft is installed, or its source tree and what it needs are on PYTHONPATH. PYTHON, if set, is the Python to use; PEER
# the one with torch and transformers, by default the same if it has them.
cd "$(dirname "$0")/.." || exit 1
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec "${PYTHON:-python3}" -m benchmarks.gpu "$@"
