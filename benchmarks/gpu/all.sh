#!/usr/bin/env bash
# All GPU benchmarks; results in benchmarks/results. Run from the repository's root. What is measured
# on one GPU is measured alone there: programs that share one start side by side and take turns
# (turns.py). What is not done in BUDGET_S seconds (530) is left out, and said to be. The packages
# have to be there, and a first run leaves what it compiled in the caches of torch and vLLM.
# Usage: benchmarks/gpu/all.sh TOKENIZER_FOLDER   (any tokenizer with a chat template)
#   VERL_PYTHONPATH: instead of PYTHONPATH for veRL, which wants other versions of some packages
set -euo pipefail
tokenizer=${1:?usage: all.sh TOKENIZER_FOLDER}
python=${PYTHON:-python3}
budget=${BUDGET_S:-530}; began=$SECONDS
turns=$(mktemp -d)
if [[ -n ${CUDA_VISIBLE_DEVICES:-} ]]; then gpus=(${CUDA_VISIBLE_DEVICES//,/ }); else gpus=($(nvidia-smi -L | sed 's/GPU \([0-9]*\).*/\1/')); fi
# run SECONDS NAME ARGS...: at most so long, and not at all where the time of the whole is up
run() {
  local left=$((budget - SECONDS + began)) most=$1 start=$SECONDS; shift
  if ((left > 30)); then
    timeout -k 5 $((left < most ? left : most)) "$python" -m "benchmarks.gpu.$@" || echo "FAILED: $*"
    echo "== $((SECONDS - start)) s, at $((SECONDS - began)): $*"
  else
    echo "LEFT OUT, no time: $*"
  fi
  [[ -z ${TRINITY_BENCH_TURNS:-} ]] || touch "$TRINITY_BENCH_TURNS/$1.ended.ready"
}
# in_turns NAME COUNT: from here on, of that many programs that wait for each other
in_turns() { export TRINITY_BENCH_TURNS=$turns/$1 TRINITY_BENCH_PROGRAMS=$2; mkdir -p "$TRINITY_BENCH_TURNS"; }
rollout() { run 230 rollout --tokenizer "$tokenizer" --new-tokens 256 --rounds 1 "$@"; }
verl() { PYTHONPATH=${VERL_PYTHONPATH:-${PYTHONPATH:-}} run 230 verl --strategies fsdp2; }
grpo() { run 300 grpo --tokenizer "$tokenizer" --steps 2 "$@"; }

if ((${#gpus[@]} == 1)); then
  run 150 train
  # rollout's three programs and verl on one GPU
  (in_turns samplers 4; rollout --kinds with_logprobs without & verl & wait)
  grpo
  echo "LEFT OUT, they need two GPUs: sync ranks overlap"
else
  (export CUDA_VISIBLE_DEVICES=${gpus[0]}; run 150 train; grpo --only trl) &
  (export CUDA_VISIBLE_DEVICES=${gpus[1]}; rollout --kinds with_logprobs without; grpo --only trinity) &
  wait
  # weights on their way to an engine, and a trainer's two ranks, ours and veRL's, on two GPUs
  (in_turns pairs 3; run 150 ranks & run 150 sync --tokenizer "$tokenizer" & verl & wait)
  # its trainer waits for samples: not compiled it starts 20 s earlier
  run 190 overlap trainer.use_torch_compile=false --tokenizer "$tokenizer" --steps 9 --offset 1
  echo "LEFT OUT, no time for it: rollout --engines 2 --rounds 5 --kinds without"
  ((${#gpus[@]} < 4)) || echo "and of four GPUs: overlap --gpus 4 --engines 2 --offset 1 --name gpu_overlap_4"
fi
rm -rf "$turns"
