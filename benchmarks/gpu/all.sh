#!/usr/bin/env bash
# All GPU benchmarks; results in benchmarks/results. Run from the repository's root. On two GPUs what needs
# one runs side by side. What is not done in BUDGET_S seconds (530) is left out, and said to be. The
# packages have to be there, and a first run leaves what it compiled in the caches of torch and vLLM.
# Usage: benchmarks/gpu/all.sh TOKENIZER_FOLDER   (any tokenizer with a chat template)
set -euo pipefail
tokenizer=${1:?usage: all.sh TOKENIZER_FOLDER}
python=${PYTHON:-python3}
gpus=$(nvidia-smi -L | wc -l)
budget=${BUDGET_S:-530}; began=$SECONDS
# run SECONDS NAME ARGS...: at most so long, and not at all where the time of the whole is up
run() {
  local left=$((budget - SECONDS + began)) most=$1; shift
  ((left > 30)) || { echo "LEFT OUT, no time: $*"; return 0; }
  local start=$SECONDS
  timeout -k 5 $((left < most ? left : most)) "$python" -m "benchmarks.gpu.$@" || echo "FAILED: $*"
  echo "== $((SECONDS - start)) s, at $((SECONDS - began)): $*"
}
train() { run 150 train; }
rollout() { run 210 rollout --tokenizer "$tokenizer" --new-tokens 256 --rounds 1; }
grpo() { run 300 grpo --tokenizer "$tokenizer" --steps 6; }

if ((gpus == 1)); then
  train
  rollout
  grpo
  run 140 verl
  echo "LEFT OUT, they need two GPUs: sync ranks overlap"
else
  (export CUDA_VISIBLE_DEVICES=0; train; run 150 verl) &
  (export CUDA_VISIBLE_DEVICES=1; rollout) &
  wait
  grpo
  run 90 sync --tokenizer "$tokenizer"
  run 90 ranks
  run 190 overlap --tokenizer "$tokenizer" --steps 9 --offset 1
fi
