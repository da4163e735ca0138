"""Checkpoints of a trainer -> Hugging Face folders: `convert`, for one ``global_step_N``."""

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file
from torch import Tensor

from trinity.checkpoint import atomic, huggingface, layout
from trinity.checkpoint.megatron import load_dist_checkpoint
from trinity.checkpoint.shards import load_full_state_dict

_STEP = re.compile(r"global_step_\d+")
_WRAPPED = "base_model.model."
_LORA = re.compile(r"(.*)\.lora_(A|B)(?:\.\w+)?\.weight")
_NOT_MERGED = ("alpha_pattern", "fan_in_fan_out", "use_dora")


@dataclass(frozen=True)
class Outcome:
    """What became of one checkpoint."""

    folder: Path
    status: Literal["converted", "skipped", "failed"]
    message: str


def find_step_folders(path: Path) -> list[Path]:
    """The ``global_step_N`` folder that ``path`` is in, or all those below it, by step."""
    path = Path(path).absolute()
    for folder in (path, *path.parents):
        if _STEP.fullmatch(folder.name):
            return [folder]
    found = [p for p in path.rglob("global_step_*") if _STEP.fullmatch(p.name) and p.is_dir()]
    return sorted(found, key=lambda p: (str(p.parent), layout.step_of(p)))


def convert(folder: Path, base_model: Path | None = None, merges: bool = False) -> Outcome:
    """Write ``actor/huggingface`` of one checkpoint, unless it is there. Never raises for its data.

    Args:
        folder: ``.../global_step_N``.
        base_model: Model folder that brings what is missing: config, tokenizer, and of an adapter
            the weights below it.
        merges: Add a LoRA adapter into the weights.
    """
    actor = folder / layout.ACTOR
    target = actor / layout.HUGGING_FACE
    try:
        if huggingface.has_weights(target) and (target / "config.json").is_file():
            return Outcome(folder, "skipped", "already in Hugging Face format")
        if (actor / layout.TINKER).is_file() and not (actor / layout.LORA_ADAPTER).is_dir():
            return Outcome(folder, "skipped", "its weights are at the Tinker service")
        if not actor.is_dir():
            raise FileNotFoundError(f"{folder.name} has no folder actor.")
        _complete_companions(target, base_model)
        config = json.loads((target / "config.json").read_text())
        source, weights = _read(actor, config, base_model, merges)
        _write(_saved_once(weights, config), target)
    except Exception as error:  # of one checkpoint: the others are converted all the same
        return Outcome(folder, "failed", str(error).strip("'\"") or repr(error))
    return Outcome(folder, "converted", f"from {source}")


def _complete_companions(target: Path, base_model: Path | None) -> None:
    """Config, tokenizer and templates, as far as they are missing, from the base model."""
    if base_model is not None:
        if not (base_model / "config.json").is_file():
            raise FileNotFoundError(f"--base-model-dir is {base_model}, which has no config.json.")
        huggingface.copy_companions(base_model, target, only_missing=True)
    if not (target / "config.json").is_file():
        raise FileNotFoundError(
            f"{target} has no config.json: name the model it was trained from by --base-model-dir."
        )


def _read(
    actor: Path, config: Mapping[str, object], base_model: Path | None, merges: bool
) -> tuple[str, dict[str, Tensor]]:
    """What the weights came from, and the weights by Hugging Face name."""
    adapter = actor / layout.LORA_ADAPTER
    if (of_megatron := layout.dist_checkpoint(actor)).is_dir():
        return "Megatron", load_dist_checkpoint(of_megatron, config)
    if any(actor.glob("model_world_size_*_rank_*.pt")):
        weights = load_full_state_dict(actor)
        if _is_adapter(weights):
            return _with_adapter(weights, adapter_config(adapter), base_model, merges)
        return "FSDP shards", weights
    if not adapter.is_dir():
        raise FileNotFoundError(
            f"{actor} holds neither FSDP shards, nor dist_ckpt, nor an adapter."
        )
    if not merges or base_model is None:
        raise ValueError(
            "The checkpoint is a LoRA adapter alone: pass --merge and --base-model-dir."
        )
    found, base = load_file(adapter / "adapter_model.safetensors"), load_folder(base_model)
    return "an adapter and its base", merge_lora(base, found, adapter_config(adapter))


def _with_adapter(
    weights: Mapping[str, Tensor],
    settings: Mapping[str, object],
    base_model: Path | None,
    merges: bool,
) -> tuple[str, dict[str, Tensor]]:
    """Shards that hold an adapter, with the weights below it or without, merged."""
    if not merges:
        raise ValueError("The weights carry a LoRA adapter: pass --merge to add it in.")
    base = {n: w for n, w in weights.items() if "lora_" not in n}
    found = {n: w for n, w in weights.items() if "lora_" in n}
    if base:
        return "FSDP shards and their adapter", merge_lora(base, found, settings)
    if base_model is None:
        raise ValueError(
            "The checkpoint is a LoRA adapter alone: name the model below it by --base-model-dir."
        )
    return "an adapter and its base", merge_lora(load_folder(base_model), found, settings)


def _is_adapter(weights: Mapping[str, Tensor]) -> bool:
    return any("lora_" in name for name in weights)


def adapter_config(adapter: Path) -> Mapping[str, object]:
    """Settings of the adapter in a folder of PEFT's form."""
    path = adapter / "adapter_config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: rank and alpha of the adapter are unknown.")
    settings: Mapping[str, object] = json.loads(path.read_text())
    return settings


def merge_lora(
    base: Mapping[str, Tensor], adapter: Mapping[str, Tensor], settings: Mapping[str, object]
) -> dict[str, Tensor]:
    """Weights with ``alpha / r * B @ A`` added, in float32, under plain Hugging Face names.

    Raises:
        ValueError: The adapter is more than that, or not for this model.
    """
    _check_is_plain(base, adapter, settings)
    merged = {_plain_name(name): tensor for name, tensor in base.items()}
    for name, down in adapter.items():
        match = _LORA.fullmatch(name)
        if match is None or match[2] == "B":
            continue
        divisor = len(down) ** 0.5 if settings.get("use_rslora") else len(down)
        scale = float(str(settings["lora_alpha"])) / divisor
        up = adapter[name.replace("lora_A", "lora_B")]
        target = _plain_name(f"{match[1]}.weight")
        if target not in merged:
            raise ValueError(f"The adapter changes {target}, which the base model does not have.")
        whole = merged[target]
        merged[target] = (whole.float() + scale * (up.float() @ down.float())).to(whole.dtype)
    return merged


def _check_is_plain(
    base: Mapping[str, Tensor], adapter: Mapping[str, Tensor], settings: Mapping[str, object]
) -> None:
    """Refuse what would be left out of the sum: whole layers, magnitudes, embeddings."""
    odd = [name for name in adapter if _LORA.fullmatch(name) is None]
    odd += [name for name in base if ".modules_to_save." in name]
    odd += [key for key in _NOT_MERGED if settings.get(key)]
    if odd:
        raise ValueError(
            f"The adapter has {odd[0]}, which can't be merged here: "
            "merge it with PEFT's merge_and_unload()."
        )


def _plain_name(name: str) -> str:
    return name.removeprefix(_WRAPPED).replace(".base_layer.", ".")


def load_folder(folder: Path) -> dict[str, Tensor]:
    """All weights of a Hugging Face folder."""
    files = huggingface.weight_files(folder)
    if not files:
        raise FileNotFoundError(
            f"{folder} holds neither {huggingface.WEIGHTS} nor {huggingface.INDEX}."
        )
    return {name: tensor for path in files for name, tensor in load_file(path).items()}


def _saved_once(
    weights: Mapping[str, Tensor], config: Mapping[str, object]
) -> Iterator[tuple[str, Tensor]]:
    """Weights in the dtype that the config names (bfloat16 without), tied ones once.

    Tied are also those that share memory: a config does not say what is usual with its model.
    """
    name = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    dtype: torch.dtype = getattr(torch, name.removeprefix("torch."))
    is_tied = bool(config.get("tie_word_embeddings"))
    seen: set[tuple[int, torch.Size]] = set()
    for key, tensor in weights.items():
        place = (tensor.data_ptr(), tensor.shape)
        if (is_tied and key == "lm_head.weight") or (tensor.numel() and place in seen):
            continue
        seen.add(place)
        yield key, tensor.to(dtype) if tensor.is_floating_point() else tensor


def _write(weights: Iterator[tuple[str, Tensor]], target: Path) -> None:
    """Put the weights beside the config; the file by which they are found comes last."""
    aside = atomic.begin_folder(target / "weights")
    try:
        huggingface.save_weights(weights, aside)
        last = (huggingface.WEIGHTS, huggingface.INDEX)
        for path in sorted(aside.iterdir(), key=lambda p: p.name in last):
            path.replace(target / path.name)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def steps_among(folders: Sequence[Path], steps: Sequence[int]) -> list[Path]:
    """The folders of the given steps, all of them if none are given.

    Raises:
        FileNotFoundError: A step has no folder.
    """
    if not steps:
        return list(folders)
    found = {layout.step_of(folder) for folder in folders}
    missing = [step for step in steps if step not in found]
    if missing:
        raise FileNotFoundError(f"No global_step_{missing[0]} here; there are {sorted(found)}.")
    return [folder for folder in folders if layout.step_of(folder) in set(steps)]
