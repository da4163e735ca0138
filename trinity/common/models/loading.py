"""Load a Hugging Face causal model or tokenizer from a folder; random weights where it has none.

Trainer and engines load through here, so that they start from identical weights.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:  # the models of transformers take a second and a half to import
    from transformers import PretrainedConfig, PreTrainedModel
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

_WEIGHT_PATTERNS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")


def load_causal_lm(
    path: str | Path,
    dtype: str | torch.dtype = "auto",
    seed: int = 0,
    *,
    device: str | torch.device = "cpu",
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    config_overrides: Mapping[str, Any] | None = None,
) -> "tuple[PreTrainedModel, bool]":
    """A causal language model in evaluation mode, and whether its weights are random.

    It may read images besides (`image_features`).

    A folder that holds a config but no weights is initialised from ``seed``: in float32 on the
    CPU, then cast, so the same seed gives the same weights everywhere.

    Args:
        dtype: "bfloat16", "float32", "float16" or "auto", the one the config names (float32 if
            it names none).
        config_overrides: Fields of the model's config to replace. ``rope_theta`` and
            ``rope_scaling`` go into its ``rope_parameters``.

    Raises:
        FileNotFoundError: The folder or its config is missing.
    """
    folder = Path(path)
    if folder.exists() and not (folder / "config.json").is_file():
        raise FileNotFoundError(f"model_path is {str(path)!r}, but {folder} has no config.json.")
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    override_inplace(config, config_overrides or {})
    wanted = resolve_dtype(dtype, getattr(config, "dtype", None))
    options = {"trust_remote_code": trust_remote_code}
    has_vision = hasattr(config, "vision_config")
    if attn_implementation is not None:
        options["attn_implementation"] = attention_of_text(config, attn_implementation)  # type: ignore[assignment]  # no bool
    kind = AutoModelForImageTextToText if has_vision else AutoModelForCausalLM
    is_random = folder.is_dir() and not has_weights(folder)
    if is_random:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = kind.from_config(config, dtype=torch.float32, **options)
        cast_parameters(model, wanted)
    else:
        model = kind.from_pretrained(path, config=config, dtype=wanted, **options)
    return model.to(device).eval(), is_random


def attention_of_text(config: "PretrainedConfig", name: str) -> str | dict[str, str]:
    """``name`` as attention of a model's text part; what sees images keeps its own."""
    if not hasattr(config, "vision_config"):
        return name
    return {"": name, "text_config": name, "vision_config": "sdpa"}


def image_features(model: "PreTrainedModel", images: Tensor) -> Tensor:
    """[tokens of all images, D] what stands in place of the embeddings of image tokens.

    Args:
        images: [images, C, H, W].
    """
    parameter = next(model.parameters())
    pixels = images.to(parameter.device, parameter.dtype)
    found: Any = model.get_image_features(pixel_values=pixels)  # type: ignore[operator]  # has it
    features = getattr(found, "pooler_output", found)
    parts = list(features) if isinstance(features, (list, tuple)) else [features]
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def cast_parameters(model: "PreTrainedModel", dtype: torch.dtype) -> None:
    """Change the dtype of a model's parameters, as loading with that dtype does.

    Buffers keep theirs: the frequencies of rotary positions are float32 in every model.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype


def override_inplace(config: "PretrainedConfig", overrides: Mapping[str, Any]) -> None:
    """Replace fields of a model's config, as `load_causal_lm` says."""
    rope = dict(getattr(config, "rope_parameters", None) or {})
    for name, value in overrides.items():
        if name == "rope_theta":
            rope["rope_theta"] = value
        elif name == "rope_scaling":
            scaling = dict(value)
            rope |= {"rope_type": scaling.pop("type", rope.get("rope_type", "default")), **scaling}
        else:
            setattr(config, name, value)
    if overrides.keys() & {"rope_theta", "rope_scaling"}:
        config.rope_parameters = rope  # type: ignore[attr-defined]  # every rotary model has it


def load_tokenizer(path: str | Path, trust_remote_code: bool = False) -> "PreTrainedTokenizerBase":
    """The tokenizer of a model folder; `FileNotFoundError` where there is none."""
    folder = Path(path)
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    if folder.is_dir() and not any((folder / name).is_file() for name in names):
        raise FileNotFoundError(
            f"model_path is {str(path)!r}, but the folder has no tokenizer (tokenizer.json or "
            "tokenizer.model). Copy the tokenizer's files there."
        )
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)


def has_weights(folder: str | Path) -> bool:
    """Whether a model folder holds weights (and not only a config and a tokenizer)."""
    return any(any(Path(folder).glob(pattern)) for pattern in _WEIGHT_PATTERNS)


def resolve_dtype(name: str | torch.dtype, default: torch.dtype | str | None) -> torch.dtype:
    """The torch dtype called ``name``; "auto" is ``default``, or float32 without one."""
    if isinstance(name, torch.dtype):
        return name
    if name == "auto":
        return torch.float32 if default in (None, "auto") else resolve_dtype(default, None)  # type: ignore[arg-type]  # not None
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype is {name!r}; use 'bfloat16', 'float16', 'float32' or 'auto'.")
    return found


def end_of_sequence_ids(path: str | Path) -> tuple[int, ...]:
    """Token ids that end a reply, from generation_config.json and config.json of a model."""
    for name in ("generation_config.json", "config.json"):
        file = _file_of_model(path, name)
        if file is None:
            continue
        value = json.loads(file.read_text()).get("eos_token_id")
        if value is not None:
            return tuple(value) if isinstance(value, list) else (value,)
    return ()


def _file_of_model(path: str | Path, name: str) -> Path | None:
    """A file of a model's folder, or of a hub name's copy in the cache."""
    if Path(path).is_dir():
        file = Path(path) / name
        return file if file.is_file() else None
    from transformers.utils import cached_file

    found = cached_file(
        str(path),
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return Path(found) if found else None
