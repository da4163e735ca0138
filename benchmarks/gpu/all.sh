#!/usr/bin/env bash
# All GPU benchmarks one after the other; results in benchmarks/results. Run from the repository's root.
# Usage: benchmarks/gpu/all.sh TOKENIZER_FOLDER   (any tokenizer with a chat template)
set -euo pipefail
tokenizer=${1:?usage: all.sh TOKENIZER_FOLDER}
python=${PYTHON:-python3}
gpus=$(nvidia-smi -L | wc -l)
run() { echo "== $*"; timeout 200 "$python" -m "$@" || echo "FAILED: $*"; }

run pytest -q tests/gpu
run benchmarks.gpu.train
run benchmarks.gpu.rollout --tokenizer "$tokenizer" --new-tokens 256 --rounds 1
if ((gpus > 1)); then
  run benchmarks.gpu.sync --tokenizer "$tokenizer"
  run benchmarks.gpu.ranks
fi
