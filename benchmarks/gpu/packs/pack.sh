#!/usr/bin/env bash
# Packs wheels for a GPU machine that reaches no package index but has Python 3.12 with torch
# 2.11.0+cu130 and transformers 5.17. What goes into a pack says NAME.txt beside this.
# Usage: pack.sh OUT_DIR NAME...       e.g. pack.sh .gpu/packs base trl model gym verl flash
#   OUT_DIR gets NAME.0/NAME.0, NAME.1/NAME.1 ...: a folder a part, of at most PART_BYTES (58000000).
#   Copy all files to one folder there, then: source unpack.sh FOLDER (it lies beside this).
# Needs pip, unzip, tar and xz, and python3.12 (PYTHON312) for what is published as source only.
# About 5 minutes the first time; downloads are kept in ~/.cache/trinity-gpu.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${1:?usage: pack.sh OUT_DIR NAME...}; shift
cache=${XDG_CACHE_HOME:-$HOME/.cache}/trinity-gpu
wheels=$cache/wheels; mkdir -p "$wheels" "$out"; out=$(cd "$out" && pwd)

platforms=()
for minor in 39 36 35 34 31 28 27 24 17 12 5; do platforms+=(--platform "manylinux_2_${minor}_x86_64"); done
for year in 2014 2010 1; do platforms+=(--platform "manylinux${year}_x86_64"); done
# wheel_of NAME==VERSION: its file, which is downloaded, or built, the first time
wheel_of() {
  local name=${1%%==*} version=${1##*==}
  local glob="$wheels/${name//-/[-_]}-$version-*.whl"
  if ! compgen -G "$glob" >/dev/null; then
    python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
      --abi cp312 --abi abi3 --abi none "${platforms[@]}" --platform any -d "$wheels" "$1" >&2 ||
      "${PYTHON312:-python3.12}" -m pip wheel -q --no-deps -w "$wheels" "$1" >&2
  fi
  compgen -G "$glob" | head -1
}
# what a dense model on a Hopper GPU does not use
prune() {
  rm -rf vllm/vllm-rs vllm/_moe_C_stable_libtorch.abi3.so vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so \
    vllm/third_party/deep_gemm vllm/third_party/fmha_sm100 ray/dashboard/client ray/jars ray/cpp \
    ray/core/src/ray/cpp mistral_common/data/tekken_2407* nvidia_cutlass_dsl/include
  find . \( -name '*.hpp' -o -name '*.h' -o -name '*.pyi' \) -delete
}
for pack in "$@"; do
  site=$cache/site/$pack
  rm -rf "$site" "$out/$pack".[0-9]*; mkdir -p "$site"
  for requirement in $(grep -v '^#' "$here/$pack.txt"); do unzip -q -o "$(wheel_of "$requirement")" -d "$site"; done
  (cd "$site" && prune && tar cf - .) | xz -6 -T0 | split -b "${PART_BYTES:-58000000}" -d -a 1 - "$out/$pack."
  for part in "$out/$pack".[0-9]; do mv "$part" "$part.part"; mkdir "$part"; mv "$part.part" "$part/${part##*/}"; done
  du -sm "$out/$pack".[0-9]
done
