"""One low-rank adapter on a model of transformers, through PEFT: put on, named, merged, on disk.

Trainer and embedded engine put it on through here, so that they compute the same.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from trinity.common.models.adapter_files import (
    CONFIG,
    DOWN,
    UP,
    WEIGHTS,
    file_name,
    read_settings,
)
from trinity.utils.tensor_files import save_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel  # takes a second to import

_BASE = ".base_layer."
Named = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True)
class AdapterSettings:
    """What adapter a model gets.

    Args:
        name: Its name, which is part of the names of its weights.
        rank: Rank of the update matrices.
        alpha: The update is multiplied by ``alpha / rank``.
        target_modules: Names of modules that get one, or "all-linear".
        exclude_modules: Names of modules that get none all the same.
        path: Folder of an adapter to start from, whose own settings then hold; None: a fresh one,
            which changes nothing yet.
        base_model: Written into the files of the adapter.
        seed: Of the first values of a fresh one.
    """

    name: str = "lora"
    rank: int = 32
    alpha: float = 32
    target_modules: str | tuple[str, ...] = "all-linear"
    exclude_modules: str | tuple[str, ...] | None = None
    path: str | None = None
    base_model: str = ""
    seed: int = 0


def add_adapter_inplace(model: "PreTrainedModel", settings: AdapterSettings) -> None:
    """Put an adapter on ``model``; from then on only the adapter takes gradients.

    Raises:
        ValueError: No module is a target, or the embedding or output layer is one.
    """
    from peft import LoraConfig, inject_adapter_in_model

    if settings.path is None and (trouble := target_trouble(model, settings.target_modules)):
        raise ValueError(trouble)
    given = read_settings(Path(settings.path)) if settings.path else _config_of(settings)
    config = LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, **given)
    config.base_model_name_or_path = settings.base_model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        try:
            inject_adapter_in_model(config, model, adapter_name=settings.name)
        except re.error as error:
            raise ValueError(f"A name of modules is no regular expression: {error}.") from error
    _refuse_ends(model)
    parameters = adapter_parameters(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in parameters)
    if settings.path:
        _load_inplace(parameters, Path(settings.path), settings.name)


def target_trouble(model: "PreTrainedModel", targets: str | tuple[str, ...]) -> str | None:
    """Why an adapter can't go where it is asked for, in one sentence, or None."""
    if targets == "all-linear":
        return None
    output = model.get_output_embeddings()
    linear = {name: module for name, module in model.named_modules() if _is_linear(module)}
    inner = [name for name, module in linear.items() if module is not output]
    asked = (targets,) if isinstance(targets, str) else targets
    matches = re.fullmatch if isinstance(targets, str) else _is_or_ends_in
    if any(matches(target, name) for target in asked for name in linear.keys() - set(inner)):
        return _refusal_of("output layer")
    missing = [target for target in asked if not any(matches(target, name) for name in inner)]
    if not missing:
        return None
    return (
        f"target_modules has {missing[0]!r}, which is none of the model's {len(inner)} linear "
        f"modules. Their names end in {', '.join(sorted(linear_names(model)))}."
    )


def linear_names(model: "PreTrainedModel") -> set[str]:
    """What the names of a model's linear modules end in, without the output layer."""
    output = model.get_output_embeddings()
    linear = ((name, module) for name, module in model.named_modules() if _is_linear(module))
    return {name.rpartition(".")[2] for name, module in linear if module is not output}


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def _is_or_ends_in(target: str, name: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _refusal_of(end: str) -> str:
    return f"target_modules names the {end}, which gets no adapter."


def empty_model(path: str, trust_remote_code: bool = False) -> "PreTrainedModel":
    """The modules of a model, without weights: made in a moment, of any size."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, trust_remote_code=trust_remote_code
        )
    return model


def adapter_on_empty_model(
    settings: AdapterSettings, model_path: str, trust_remote_code: bool = False
) -> "AdapterFolder":
    """The adapter that ``settings`` make of a model: names, shapes and PEFT's settings.

    Its weights have no values; nothing is loaded.
    """
    model = empty_model(model_path, trust_remote_code)
    add_adapter_inplace(model, settings)
    weights = {name: parameter.data for name, parameter in adapter_parameters(model).items()}
    return AdapterFolder(weights, _config_on(model))


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The adapter's parameters by their names in the model; {} if it has none."""
    return {n: p for n, p in model.named_parameters() if is_adapter_name(n)}


def is_adapter_name(name: str) -> bool:
    """Whether a parameter of that name belongs to an adapter."""
    return DOWN in name or UP in name


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """Compute as the model did without its adapter; without gradients."""
    layers = list(_layers(model))
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def merged(weights: Named, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Weights of a model with an adapter as plain ones: ``W + alpha / r * B @ A``, in float32.

    Args:
        weights: All its parameters in their order, by the names in the model.
        model: Tells the scale of each update.
    """
    scales = {name: _only(layer.scaling) for name, layer in _named_layers(model)}
    held: dict[str, Tensor] = {}
    down: Tensor | None = None
    for name, tensor in weights:
        if _BASE in name:
            held[name] = tensor
        elif DOWN in name:
            down = tensor
        elif UP in name:
            module = name.partition(UP)[0]
            assert down is not None, "the matrices of an update come side by side"
            base = f"{module}{_BASE}weight"
            update = scales[module] * (tensor.float() @ down.float())
            held[base] = (held[base].float() + update).to(held[base].dtype)
            for own, whole in held.items():
                yield own.replace(_BASE, "."), whole
            held = {}
        else:
            yield name, tensor


@dataclass(frozen=True)
class AdapterFolder:
    """An adapter as PEFT and vLLM load it: ``adapter_model.safetensors``, ``adapter_config.json``.

    Args:
        weights: The adapter's, by their names in the model.
        config: PEFT's settings of it.
    """

    weights: Mapping[str, Tensor]
    config: Mapping[str, object]

    @classmethod
    def of(cls, model: nn.Module, weights: Named) -> "AdapterFolder":
        """The adapter on ``model``, with a copy of its ``weights``; others are passed over."""
        own = {n: w.detach().cpu().clone() for n, w in weights if is_adapter_name(n)}
        return cls(own, _config_on(model))

    def write(self, folder: Path) -> None:
        """Write both files."""
        folder.mkdir(parents=True, exist_ok=True)
        weights = {file_name(name): weight.contiguous() for name, weight in self.weights.items()}
        save_tensors(weights, folder / WEIGHTS, metadata={"format": "pt"})
        (folder / CONFIG).write_text(json.dumps(dict(self.config), indent=2))


def _config_of(settings: AdapterSettings) -> dict[str, Any]:
    def names(value: str | tuple[str, ...] | None) -> str | list[str] | None:
        return list(value) if isinstance(value, tuple) else value

    return {
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "target_modules": names(settings.target_modules),
        "exclude_modules": names(settings.exclude_modules),
    }


def _config_on(model: nn.Module) -> dict[str, object]:
    """PEFT's settings of the adapter on ``model``, for its file."""
    config = _only(model.peft_config).to_dict() | {"inference_mode": True}
    return {key: _plain(value) for key, value in config.items()}


def _load_inplace(parameters: Mapping[str, nn.Parameter], folder: Path, adapter: str) -> None:
    found = load_file(folder / WEIGHTS)
    for name, parameter in parameters.items():
        weight = found.pop(file_name(name), None)
        if weight is None or weight.shape != parameter.shape:
            shape = "missing" if weight is None else f"{tuple(weight.shape)}"
            raise ValueError(
                f"The adapter in {folder} doesn't fit the model: its {file_name(name)} is {shape},"
                f" and the model's is {tuple(parameter.shape)}."
            )
        parameter.data.copy_(weight)
    if found:
        raise ValueError(
            f"The adapter in {folder} doesn't fit the model: it has {min(found)}, for which the "
            f"model with its {CONFIG} has no place."
        )


def _refuse_ends(model: "PreTrainedModel") -> None:
    """The heads here read the output layer's weight by itself, and tied embeddings with it."""
    ends = {
        "embedding": model.get_input_embeddings(),
        "output layer": model.get_output_embeddings(),
    }
    for what, module in ends.items():
        if hasattr(module, "base_layer"):
            raise ValueError(_refusal_of(what))


def _named_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
            yield name, module


def _layers(model: nn.Module) -> Iterator[Any]:
    return (layer for _, layer in _named_layers(model))


def _only(values: Any) -> Any:
    [value] = values.values()
    return value


def _plain(value: object) -> object:
    """As JSON can hold it."""
    if isinstance(value, set | frozenset | tuple | list):
        return sorted(value)
    return value.value if hasattr(value, "value") else value
