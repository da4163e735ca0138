#!/usr/bin/env bash
# On the GPU machine, from the repository's root, once every part of pack.sh lies in the folder PARTS:
# unpacks them, makes the model folder examples/demo_llm/model (SmolLM2-135M-Instruct), and compiles the large
# packages to bytecode, as an installation would. Then: source unpack.sh PARTS.
# Usage: prepare.sh PARTS [SITES]
set -euo pipefail
parts=${1:?usage: prepare.sh PARTS [SITES]}; sites=${2:-/tmp/site}
here=$(cd "$(dirname "$0")" && pwd); python=${PYTHON:-python3}
source "$here/unpack.sh" "$parts" "$sites"
"$python" -W ignore examples/demo_llm/prepare.py
cd "$sites" && "$python" -m compileall -q -j 0 . >/dev/null 2>&1 || true   # some packages carry files of other Pythons
