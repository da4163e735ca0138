#!/usr/bin/env bash
# On the GPU machine, once every part of pack.sh lies in the folder PARTS: source this file.
#   source unpack.sh PARTS [SITES]
# It unpacks into SITES/NAME (default /tmp/site/NAME) what is not there yet, and sets the environment; of the
# packs only `verl` and `flash` are not put into PYTHONPATH but named in VERL_PYTHONPATH and FLASH_PYTHONPATH.
parts=${1:?usage: source unpack.sh PARTS [SITES]}; sites=${2:-/tmp/site}
names=$(cd "$parts" && ls | sed 's/\.[0-9]$//' | sort -u)
for name in $names; do
  [[ -d $sites/$name ]] && continue
  mkdir -p "$sites/$name" && cat $(ls "$parts/$name".[0-9] | sort) | xz -dc -T0 | tar xf - -C "$sites/$name" &
done
wait
for name in $names; do
  [[ $name == verl || $name == flash ]] || PYTHONPATH=$sites/$name${PYTHONPATH:+:$PYTHONPATH}
done
export PYTHONPATH VERL_PYTHONPATH=$sites/verl:$PYTHONPATH FLASH_PYTHONPATH=$sites/flash:$sites/flash/nvidia_cutlass_dsl/python_packages:$PYTHONPATH
export VLLM_USE_FLASHINFER_SAMPLER=0   # FlashInfer is not in the pack
export VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 RAY_AUTH_MODE=disabled
