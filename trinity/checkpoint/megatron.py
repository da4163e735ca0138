"""Megatron's ``dist_ckpt`` (PyTorch's distributed checkpoint format) -> Hugging Face weights.

For the dense Llama family (Llama, Qwen2, Qwen3, Mistral). Layers lie stacked along the first axis,
query, key and value of a head group side by side, gate and up projection one above the other.
Tables of tokens have rows beyond the vocabulary, to suit the number of ranks: these are left out.
"""

import pickle
import re
from collections.abc import Mapping
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""What ``model_type`` says of the models that can be read."""

_LAYER = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)")
_OUTER = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_TABLES = ("embedding.word_embeddings.weight", "output_layer.weight")
_INNER = {
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
_QKV = re.compile(r"self_attention\.linear_qkv\.(weight|bias)")
_RANDOM_STATE = re.compile(r"rng_state/shard_\d+\.\d+_(\d+)\.(\d+)")
_IGNORED = re.compile(r".*_extra_state.*|optimizer\..*|rng_state.*|.*inv_freq")


def load_dist_checkpoint(folder: Path, config: Mapping[str, object]) -> dict[str, Tensor]:
    """All weights of a ``dist_ckpt`` folder by Hugging Face name.

    Raises:
        ValueError: A tensor has no counterpart in the Llama family, or the files are damaged.
    """
    weights: dict[str, Tensor] = {}
    for name, tensor in _read(folder).items():
        plain = re.sub(r"^(model\.|module\.)+", "", name)
        if plain in _OUTER:
            is_table = plain in _TABLES
            weights[_OUTER[plain]] = _without_padding(tensor, config) if is_table else tensor
            continue
        match = _LAYER.fullmatch(plain)
        if match is None:
            raise ValueError(f"{folder} holds {name!r}, which the Llama family does not have.")
        layers = {int(match[1]): tensor} if match[1] else dict(enumerate(tensor))
        for layer, part in layers.items():
            found = _layer_weights(match[2], part, config)
            weights |= {f"model.layers.{layer}.{key}": value for key, value in found.items()}
    return weights


def random_state_grid(folder: Path) -> tuple[int, int] | None:
    """Stages and tensor parallel ranks whose random state an ``extra/dist_ckpt`` folder holds."""
    for name in _Reader(folder).read_metadata().state_dict_metadata:
        if (match := _RANDOM_STATE.fullmatch(name)) is not None:
            return int(match[1]), int(match[2])
    return None


def _read(folder: Path) -> dict[str, Tensor]:
    """All tensors of the checkpoint, whole, but the optimizer's."""
    wanted: dict[str, Tensor] = {}
    for name, entry in _Reader(folder).read_metadata().state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata) and not _IGNORED.fullmatch(name):
            wanted[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    try:
        dcp.load(wanted, storage_reader=_Reader(folder), no_dist=True)
    except CheckpointException as error:  # no `Exception`
        [cause, *_] = [cause for cause, _ in error.failures.values()]
        raise ValueError(f"{folder} can't be read: {cause!r}") from error
    return wanted


class _Reader(dcp.FileSystemReader):
    """Reads the table of contents as data. PyTorch would run whatever that pickle names."""

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        path = Path(self.path) / ".metadata"
        try:
            with path.open("rb") as file:
                metadata: Metadata = _Contents(file).load()
        except (EOFError, pickle.UnpicklingError) as error:
            raise ValueError(f"{path} can't be read: {error}") from error
        metadata.storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Contents(pickle.Unpickler):
    """Knows the classes of a table of contents, which do nothing, and no others."""

    _packages = ("torch.distributed.checkpoint.", "torch.distributed._shard.")
    _names = (("torch", "Size"), ("torch.serialization", "_get_layout"), ("pathlib", "PosixPath"))

    def find_class(self, module: str, name: str) -> object:
        if module.startswith("megatron."):  # which need not be installed
            return _OfMegatron
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if module.startswith(self._packages) or (module, name) in self._names:
            found = super().find_class(module, name)
            is_record = is_dataclass(found) or (isinstance(found, type) and issubclass(found, Enum))
            if is_record or (module, name) in self._names:
                return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a checkpoint")


class _OfMegatron(Metadata):
    """Megatron's own metadata: PyTorch's, and more that is not needed here."""


def _without_padding(table: Tensor, config: Mapping[str, object]) -> Tensor:
    vocabulary = int(str(config.get("vocab_size") or len(table)))
    return table[:vocabulary].clone() if vocabulary < len(table) else table


def _layer_weights(name: str, tensor: Tensor, config: Mapping[str, object]) -> dict[str, Tensor]:
    if name in _INNER:
        return {_INNER[name]: tensor}
    if name == "mlp.linear_fc1.weight":
        gate, up = tensor.chunk(2, dim=0)
        return {"mlp.gate_proj.weight": gate, "mlp.up_proj.weight": up}
    match = _QKV.fullmatch(name)
    if match is None:
        raise ValueError(f"A layer holds {name!r}, which the Llama family does not have.")
    parts = zip("qkv", _split_qkv(tensor, config), strict=True)
    return {f"self_attn.{letter}_proj.{match[1]}": part for letter, part in parts}


def _split_qkv(tensor: Tensor, config: Mapping[str, object]) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value from groups of (queries of the group, key, value)."""
    heads = int(str(config["num_attention_heads"]))
    groups = int(str(config.get("num_key_value_heads") or heads))
    per_group = heads // groups
    size = len(tensor) // (groups * (per_group + 2))
    grouped = tensor.view(groups, per_group + 2, size, *tensor.shape[1:])
    query = grouped[:, :per_group].reshape(heads * size, *tensor.shape[1:])
    key, value = (
        grouped[:, per_group + i].reshape(groups * size, *tensor.shape[1:]) for i in (0, 1)
    )
    return query, key, value
