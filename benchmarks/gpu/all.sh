#!/usr/bin/env bash
# All GPU benchmarks one after the other; results in benchmarks/results. Run from the repository's root.
# What is not done in BUDGET_S seconds (530) is left out.
# Usage: benchmarks/gpu/all.sh TOKENIZER_FOLDER   (any tokenizer with a chat template)
set -euo pipefail
tokenizer=${1:?usage: all.sh TOKENIZER_FOLDER}
python=${PYTHON:-python3}
gpus=$(nvidia-smi -L | wc -l)
budget=${BUDGET_S:-530}; began=$SECONDS
# run SECONDS MODULE ARGS...: at most so long, and not at all where the time of the whole is up
run() {
  local left=$((budget - SECONDS + began)) most=$1; shift
  ((left > 20)) || { echo "NO TIME: $*"; return 0; }
  echo "== $*"
  timeout -k 5 $((left < most ? left : most)) "$python" -m "$@" || echo "FAILED: $*"
}

run 60 pytest -q tests/gpu/test_trainer.py
run 150 benchmarks.gpu.train
run 190 benchmarks.gpu.rollout --tokenizer "$tokenizer" --new-tokens 256 --rounds 1
run 230 benchmarks.gpu.grpo --tokenizer "$tokenizer" --steps 6
if ((gpus > 1)); then
  run 90 benchmarks.gpu.sync --tokenizer "$tokenizer"
  run 90 benchmarks.gpu.ranks
  run 150 benchmarks.gpu.overlap --tokenizer "$tokenizer" --steps 8 --offset 1 model.max_response_tokens=64
  run 150 benchmarks.gpu.verl
fi
