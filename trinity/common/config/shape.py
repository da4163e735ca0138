"""The size and reach of a model: from its `config.json` if that is on this machine.

Without one the name may still tell the size.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trinity.common.constants import EXPERT_COUNTS

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([bm])(?![a-z])", re.IGNORECASE)
_USUAL = (
    (0.15e9, 30, 576, 1536, 49152),
    (0.6e9, 24, 896, 4864, 151936),
    (2e9, 28, 1536, 8960, 151936),
    (4.5e9, 36, 2048, 11008, 151936),
    (10e9, 32, 4096, 11008, 102400),
    (20e9, 48, 5120, 13824, 152064),
    (45e9, 64, 5120, 27648, 152064),
    (float("inf"), 80, 8192, 29568, 152064),
)
"""Up to how many parameters: layers, hidden size, MLP size and vocabulary, as is usual."""
_NORMING_HEADS = ("qwen3", "gemma3", "gemma4", "olmo2", "olmo3", "olmoe", "exaone4", "apertus")
"""What the types of models begin with that normalise queries and keys; configs do not say it."""
_JOINABLE = ("llama", "mistral", "qwen2", "qwen3")
"""Types of models whose layers `trinity.trainer.backends.torch.layers` joins."""


@dataclass(frozen=True)
class ModelShape:
    """What memory depends on.

    Args:
        parameters: Number of weights.
        layers: Transformer layers.
        hidden: Width of the residual stream.
        mlp: Width of the MLP; of all active experts of a mixture.
        kv: Width of keys, and of values.
        query: Width of queries.
        vocabulary: Tokens.
        is_guess: Whether only the name told the size.
        norms_heads: Whether queries and keys are normalised, head by head (Qwen3, Gemma 3).
        is_tied: Whether the output layer has the embedding's weight.
        is_joinable: Whether a layer is built as Llama's, so that a CPU may compute it in one call.
    """

    parameters: int
    layers: int
    hidden: int
    mlp: int
    kv: int
    query: int
    vocabulary: int
    is_guess: bool = False
    norms_heads: bool = False
    is_tied: bool = True
    is_joinable: bool = True

    def forward_flops(self, lengths: Sequence[int], num_logits: int) -> float:
        """FLOPs of a forward pass over sequences of ``lengths`` tokens, each computed alone.

        Matrices, causal attention, and the output layer on ``num_logits`` tokens. A backward pass
        takes twice as many.
        """
        matrices = self.hidden * (2 * self.query + 2 * self.kv + 3 * self.mlp)
        pairs = sum(length * (length + 1) // 2 for length in lengths)
        layer = 2 * sum(lengths) * matrices + 4 * pairs * self.query
        return float(self.layers * layer + 2 * num_logits * self.vocabulary * self.hidden)


def find_shape(model_path: str) -> ModelShape | None:
    """The shape of the model at ``model_path``; None if neither files nor name tell it."""
    config = _config_json(model_path)
    if config is not None:
        return shape_of(config)
    return guess_shape(model_path)


def shape_of(config: dict[str, Any]) -> ModelShape | None:
    """The shape that a Hugging Face ``config.json`` describes."""
    config = config.get("text_config", config)
    try:
        hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
        heads = int(config["num_attention_heads"])
    except (KeyError, TypeError, ValueError):
        return None
    head = int(config.get("head_dim") or hidden // heads)
    kv = head * int(config.get("num_key_value_heads") or heads)
    query, vocabulary = head * heads, int(config.get("vocab_size", 32000))
    mlp, experts, active = _mlp(config, hidden)
    attention = hidden * (query + 2 * kv) + query * hidden
    layer = attention + 3 * hidden * mlp * experts + 2 * hidden
    is_tied = bool(config.get("tie_word_embeddings", False))
    parameters = layers * layer + vocabulary * hidden * (1 if is_tied else 2) + hidden
    kind = str(config.get("model_type", ""))
    return ModelShape(
        *(parameters, layers, hidden, mlp * active, kv, query, vocabulary),
        norms_heads=kind.startswith(_NORMING_HEADS),
        is_tied=is_tied,
        is_joinable=kind in _JOINABLE,
    )


def find_positions(model_path: str, rope_scaling: Mapping[str, Any] | None = None) -> int | None:
    """`positions_of` the model at ``model_path``; None also if no file of it is here."""
    config = _config_json(model_path)
    return None if config is None else positions_of(config, rope_scaling)


def positions_of(
    config: dict[str, Any], rope_scaling: Mapping[str, Any] | None = None
) -> int | None:
    """Tokens of the longest sequence that a ``config.json`` is for; None if it tells no limit.

    Some models tell the length before RoPE scaling and its factor, some the length behind it.

    Args:
        rope_scaling: Laid over the model's own.
    """
    text = config.get("text_config")
    config = text if isinstance(text, dict) else config
    most = config.get("max_position_embeddings")
    if not isinstance(most, int):
        return None
    own = config.get("rope_parameters") or config.get("rope_scaling")
    scaling = {**(own if isinstance(own, dict) else {}), **(rope_scaling or {})}
    before = _number(scaling.get("original_max_position_embeddings"), most)
    return max(most, int(before * _number(scaling.get("factor"), 1)))


def _number(value: object, default: float) -> float:
    return value if isinstance(value, int | float) and math.isfinite(value) else default


def _mlp(config: dict[str, Any], hidden: int) -> tuple[int, int, int]:
    """MLP width of one expert, experts, and active experts; 1 and 1 for a dense model."""
    experts = next((config[name] for name in EXPERT_COUNTS if config.get(name)), None)
    if experts:
        width = int(config.get("moe_intermediate_size") or config["intermediate_size"])
        return width, int(experts), int(config.get("num_experts_per_tok", 2))
    return int(config.get("intermediate_size") or 4 * hidden), 1, 1


def guess_shape(name: str) -> ModelShape | None:
    """A usual shape for a size in ``name``, such as `Qwen2.5-1.5B`."""
    found = _SIZE.findall(os.path.basename(name.rstrip("/")))
    if not found:
        return None
    number, unit = found[0]
    parameters = int(float(number) * (1e9 if unit.lower() == "b" else 1e6))
    _, layers, hidden, mlp, vocabulary = next(row for row in _USUAL if parameters <= row[0])
    kv = hidden // 4
    return ModelShape(parameters, layers, hidden, mlp, kv, hidden, vocabulary, is_guess=True)


def _config_json(model_path: str) -> dict[str, Any] | None:
    path = Path(model_path).expanduser()
    places = [path / "config.json", *_cached(model_path)]
    for place in places:
        try:
            config = json.loads(place.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(config, dict):
            return config
    return None


def _cached(name: str) -> list[Path]:
    """``config.json`` of a hub name in the cache of `huggingface_hub`."""
    home = os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub"))
    folder = cache / f"models--{name.replace('/', '--')}" / "snapshots"
    return sorted(folder.glob("*/config.json")) if "/" in name and name[0] not in "/.~" else []
