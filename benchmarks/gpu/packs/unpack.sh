#!/usr/bin/env bash
# On the GPU machine, once every part of pack.sh lies in the folder PARTS: source this file.
#   source unpack.sh PARTS [SITES]
# It unpacks into SITES/NAME (default /tmp/site/NAME) what is not there yet, and sets the environment. PYTHONPATH
# gets all packs but `verl` and `flash`: FLASH_PYTHONPATH has `flash` too, VERL_PYTHONPATH `verl`, and not `trl`.
parts=${1:?usage: source unpack.sh PARTS [SITES]}; sites=${2:-/tmp/site}
without_trl=${PYTHONPATH:-}
names=$(cd "$parts" && ls | sed 's/\.[0-9]$//' | sort -u)
for name in $names; do
  [[ -d $sites/$name ]] && continue
  mkdir -p "$sites/$name" && cat $(ls "$parts/$name".[0-9] | sort) | xz -dc -T0 | tar xf - -C "$sites/$name" &
done
wait
for name in $names; do
  case $name in
    trl) ;;
    verl | flash) continue ;;
    *) without_trl=$sites/$name${without_trl:+:$without_trl} ;;
  esac
  PYTHONPATH=$sites/$name${PYTHONPATH:+:$PYTHONPATH}
done
export PYTHONPATH VERL_PYTHONPATH=$sites/verl:$without_trl
export FLASH_PYTHONPATH=$sites/flash:$sites/flash/nvidia_cutlass_dsl/python_packages:$PYTHONPATH
export VLLM_USE_FLASHINFER_SAMPLER=0   # FlashInfer is not in the pack
export VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 RAY_AUTH_MODE=disabled
