"""What the GPU benchmarks share: models of known shapes, the card's name, results as JSON."""

import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen2Config, Qwen3Config

from trinity.common.config.shape import shape_of
from trinity.trainer.figures import peak_flops_of

RESULTS = Path(os.environ.get("TRINITY_RESULTS", Path(__file__).parents[1] / "results"))
PEAK_FLOPS = peak_flops_of("NVIDIA H200")
SHAPES = ("0.5b", "0.6b", "1.5b")
_CACHE = Path(os.environ.get("TMPDIR", tempfile.gettempdir())) / "trinity_shapes"
_VOCABULARY = 151936


def config_of(shape: str) -> PretrainedConfig:
    """Qwen2.5-0.5B, Qwen3-0.6B and Qwen2.5-1.5B by their sizes."""
    common = {
        "vocab_size": _VOCABULARY,
        "tie_word_embeddings": True,
        "max_position_embeddings": 32768,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    }
    if shape == "0.5b":
        return Qwen2Config(
            hidden_size=896, num_hidden_layers=24, intermediate_size=4864,
            num_attention_heads=14, num_key_value_heads=2, **common,
        )  # fmt: skip
    if shape == "0.6b":
        return Qwen3Config(
            hidden_size=1024, num_hidden_layers=28, intermediate_size=3072, head_dim=128,
            num_attention_heads=16, num_key_value_heads=8, **common,
        )  # fmt: skip
    if shape == "1.5b":
        return Qwen2Config(
            hidden_size=1536, num_hidden_layers=28, intermediate_size=8960,
            num_attention_heads=12, num_key_value_heads=2, **common,
        )  # fmt: skip
    raise ValueError(f"No shape {shape!r}: one of {', '.join(SHAPES)}.")


def model_folder(shape: str, tokenizer: str | None = None) -> str:
    """A folder with random bf16 weights of that shape; made once on a machine.

    A subprocess makes them on the GPU, so that this process holds nothing there.
    """
    folder = _CACHE / shape
    if not (folder / "config.json").exists():
        script = (
            "import sys, torch; from benchmarks.gpu.common import make_model;"
            "make_model(sys.argv[1], sys.argv[2])"
        )
        subprocess.run(["python3", "-c", script, shape, str(folder)], check=True)
    if tokenizer is not None and not (folder / "tokenizer.json").exists():
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    return str(folder)


def make_model(shape: str, folder: str) -> None:
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config_of(shape), dtype=torch.bfloat16)
    model.save_pretrained(folder)


def step_flops(shape: str, lengths: list[int], num_trained: int) -> float:
    """Forward and backward of sequences: matrices, causal attention, head on trained tokens."""
    found = shape_of(config_of(shape).to_dict())
    assert found is not None
    return 3 * found.forward_flops(lengths, num_trained)


def visible_gpus() -> list[str]:
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given:
        return given.split(",")
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
    return [str(number) for number in range(len(listed.stdout.splitlines()))]


def used_bytes() -> int:
    """Of the first visible GPU's memory, by all programs."""
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(int(visible_gpus()[0]))
    return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)


def card() -> str:
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"


def write(name: str, result: dict[str, object]) -> None:
    """Print a result, and keep it in benchmarks/results/<name>.json."""
    import transformers

    whole = {
        "benchmark": name,
        "card": card(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "when": time.strftime("%Y-%m-%d"),
        **result,
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(whole, indent=2) + "\n")
    print(name, json.dumps(whole), flush=True)
