"""Model folders that plain transformers loads: weights, config and what goes with them."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_MAX_SHARD_BYTES = 2_000_000_000
_COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template.*",
    "*.tiktoken",
    "*processor_config.json",
    "*.py",
)


def has_weights(folder: Path) -> bool:
    """Whether the folder holds all its weights: one file, or every file of its index."""
    files = weight_files(folder)
    return bool(files) and all(path.is_file() for path in files)


def weight_files(folder: Path) -> list[Path]:
    """Where the weights of a folder lie, or would: one file, or those of its index; [] without.

    Other safetensors beside them, as an adapter or the weights in their maker's form, are none.
    """
    folder = Path(folder)
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        return []
    names = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
    return [folder / name for name in sorted(names)]


def copy_companions(source: Path, target: Path, only_missing: bool = False) -> list[str]:
    """Copy config, tokenizer, templates and code of a model folder, but no weights; their names."""
    Path(target).mkdir(parents=True, exist_ok=True)
    copied = []
    for pattern in _COMPANIONS:
        for path in sorted(Path(source).glob(pattern)):
            place = Path(target) / path.name
            if path.is_file() and not (only_missing and place.exists()):
                shutil.copyfile(path, place)
                copied.append(path.name)
    return copied


def save_weights(
    weights: Iterable[tuple[str, "Tensor"]], folder: Path, max_shard_bytes: int = _MAX_SHARD_BYTES
) -> None:
    """Write weights as safetensors: one file, or numbered ones with an index above the bound.

    Tensors that share memory (tied embeddings) must come once.
    """
    from trinity.utils.tensor_files import save_tensors  # brings PyTorch

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    sizes = [0]
    for name, tensor in weights:
        if sizes[-1] and sizes[-1] + tensor.nbytes > max_shard_bytes:
            shards.append({})
            sizes.append(0)
        shards[-1][name] = tensor.detach().cpu().contiguous()
        sizes[-1] += tensor.nbytes
    metadata = {"format": "pt"}
    if len(shards) == 1:
        save_tensors(shards[0], folder / WEIGHTS, metadata=metadata)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_tensors(shard, folder / file_name, metadata=metadata)
        weight_map |= dict.fromkeys(shard, file_name)
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2))
