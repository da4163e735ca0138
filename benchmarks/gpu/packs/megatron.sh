#!/usr/bin/env bash
# Packs what tests/gpu/test_megatron.py and `python -m benchmarks.gpu.verl --strategies megatron` need for a GPU
# machine that reaches no package index but has Python 3.12 with torch 2.11.0+cu130. Compiles Transformer Engine's
# PyTorch part. Usage: megatron.sh OUT_DIR
#   OUT_DIR gets m1/part.tar.xz (13 MB) and m2/part.tar.xz (29 MB). There, both into one folder, by
#   tar -xJf part.tar.xz -C /tmp/megatron; then PYTHONPATH=/tmp/megatron.
# Needs g++, xz and python3.12 (PYTHON); 20 minutes on one core and 10 GB in WORK (a folder of its own, which may be
# kept: what lies there is not made again). No GPU, no nvcc.
set -euo pipefail
here=$(cd "$(dirname "$0")/../../.." && pwd)
out=${1:?usage: megatron.sh OUT_DIR}; mkdir -p "$out"; out=$(cd "$out" && pwd)
work=${WORK:-$(mktemp -d)}
release=2.12.0   # of Transformer Engine
# what the other machine has, in the same version or one that does as well
there=accelerate,huggingface-hub,ml-dtypes,numpy,onnx,onnx-ir,onnxscript,protobuf,safetensors,scipy,torch,triton,typer
cd "$work"

# torch and CUDA's headers, to compile against
[[ -x build/bin/python ]] || "${PYTHON:-python3.12}" -m venv build
pip() { PIP_CONSTRAINT='' build/bin/python -m pip --disable-pip-version-check "$@"; }
pip install -q torch==2.11.0 'nvidia-cuda-crt==13.0.*' 'nvidia-cuda-cccl==13.0.*' setuptools wheel packaging
packages=$(echo build/lib/python3.12/site-packages)

# Transformer Engine's PyTorch part, published as source: 28 files that begin with the same headers
name=transformer_engine_torch
[[ -e $name-$release.tar.gz ]] ||
  pip download -q --no-deps --no-binary=:all: --no-build-isolation -d . "transformer-engine-torch==$release"
tar -xzf $name-$release.tar.gz
compile() {
  g++ -O2 -g0 -std=c++17 -fPIC -fvisibility=hidden -w -DTORCH_API_INCLUDE_EXTENSION_H "-DTORCH_EXTENSION_NAME=$name" \
    -I objects $(for folder in $name-$release/common_headers{,/common,/common/include} $name-$release/csrc \
      $packages/torch/include{,/torch/csrc/api/include} $packages/nvidia/{cu13,cudnn,nccl}/include \
      "$(build/bin/python -c 'import sysconfig; print(sysconfig.get_path("include"))')"; do echo "-I $folder"; done) "$@"
}
mkdir -p objects
echo "#include \"$work/$name-$release/csrc/extensions.h\"" > objects/all.h
[[ -e objects/all.h.gch ]] || compile -x c++-header objects/all.h -o objects/all.h.gch
for source in $(cd $name-$release && find csrc -name '*.cpp'); do
  object=objects/$(echo "${source%.cpp}.o" | tr / _)
  [[ -e $object ]] || { compile -include all.h -c "$name-$release/$source" -o "$object.new" && mv "$object.new" "$object"; }
done

# All packages, without what an H200 and the tests do not touch
rm -rf site && mkdir site
sed 's/#.*//' "$here/requirements/megatron-gpu.txt" | grep -vE "^($(echo $there | tr , '|')|transformer-engine-torch)==" > wanted.txt
pip install -q --no-deps --no-compile --target site -r wanted.txt pytest-asyncio
g++ -shared -o site/$name.so objects/*.o -Wl,--no-as-needed -L "$packages/torch/lib" -l{c10,c10_cuda,torch,torch_cpu,torch_cuda,torch_python}
mkdir site/$name-$release.dist-info
printf 'Metadata-Version: 2.1\nName: transformer-engine-torch\nVersion: %s\n' $release > site/$name-$release.dist-info/METADATA
touch site/$name-$release.dist-info/RECORD
rm -rf site/tests site/ray/{jars,rllib,serve,tune,dashboard/client,cpp} site/transformer_engine/jax site/pulp/solverdir site/bin
find site -type d \( -name tests -o -name test \) -prune -exec rm -rf {} +
find site -name '*.so' -exec strip --strip-unneeded {} +
strip site/ray/core/src/ray/gcs/gcs_server site/ray/core/src/ray/raylet/raylet
# GPU code in containers of one entry an architecture: all but the H200's (sm_90) becomes zeros
build/bin/python - site/transformer_engine/wheel_lib/libtransformer_engine.so <<'PYTHON'
import mmap, struct, sys

with open(sys.argv[1], "r+b") as file, mmap.mmap(file.fileno(), 0) as data:
    at = 0
    while (at := data.find(b"\x50\xed\x55\xba", at)) >= 0:
        header, size = struct.unpack_from("<6xHQ", data, at)
        entry, end = at + header, at + header + size
        if header != 16 or end > len(data):  # the four bytes stand for something else here
            at += 4
            continue
        while entry < end:
            kind, header, size, arch = struct.unpack_from("<H2xIQ12xI", data, entry)
            if (kind, arch) != (2, 90):  # 1 is source for later cards
                data[entry + header : entry + header + size] = bytes(size)
            entry += header + size
        at = end
PYTHON

# Ray and what is beside it in one part, Transformer Engine and Megatron in the other
part() { mkdir -p "$out/$1" && tar -C site --sort=name --owner=0 --group=0 -c "${@:2}" | xz -9e > "$out/$1/part.tar.xz"; }
cd site && engine=$(ls -d transformer_engine* megatron* nvidia* modelopt*) && cd ..
part m1 $engine
part m2 $(cd site && for one in *; do grep -qxF "$one" <<< "$engine" || echo "$one"; done)
ls -l "$out"/m?/part.tar.xz
