"""Shapes of known models, and folders that hold no more than such a shape."""

import json
from collections.abc import Mapping
from pathlib import Path

QWEN_1_5B = {
    "hidden_size": 1536,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 8960,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
LLAMA_8B = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}


def shape_folder(folder: Path, shape: Mapping[str, object]) -> str:
    """Write the config of a model into ``folder``."""
    (folder / "config.json").write_text(json.dumps(shape))
    return str(folder)
