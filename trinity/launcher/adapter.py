"""Adapters of the file: the one that is trained (`model.lora_configs`), and `lora_modules`."""

from collections.abc import Iterator
from pathlib import Path

from trinity.common.config import Config, InferenceModelConfig
from trinity.common.config.model import LoRAConfig
from trinity.common.errors import Problem
from trinity.common.models.adapter_files import CONFIG, rank_in
from trinity.common.models.adapters import (
    AdapterSettings,
    empty_model,
    target_trouble,
)
from trinity.common.models.protocol import NamedAdapter

_KEY = "model.lora_configs.0"


def adapter_settings(config: Config) -> AdapterSettings | None:
    """The adapter that is trained; None if the whole model is."""
    if not config.model.lora_configs or config.model.tinker.enable:
        return None
    [lora] = config.model.lora_configs
    return AdapterSettings(
        name=lora.name or "lora",
        rank=lora.lora_rank,
        alpha=lora.lora_alpha,
        target_modules=_names(lora.target_modules),
        exclude_modules=None if lora.exclude_modules is None else _names(lora.exclude_modules),
        path=_start(lora),
        base_model=lora.base_model_name or config.model.model_path,
        seed=config.seed,
    )


def named_adapters(model: InferenceModelConfig) -> tuple[NamedAdapter, ...]:
    """The adapters that clients of the API may name from the start."""
    return tuple(
        NamedAdapter(module.name, str(Path(module.path).expanduser()), module.base_model_name or "")
        for module in model.lora_modules or []
    )


def named_adapter_problems(key: str, model: InferenceModelConfig) -> Iterator[Problem]:
    """Folders of `lora_modules` that hold no adapter an engine could serve."""
    for index, adapter in enumerate(named_adapters(model)):
        try:
            rank_in(Path(adapter.path))
        except (OSError, ValueError) as error:
            place = f"{key}.lora_modules.{index}.path"
            yield Problem(place, str(error), "Name the folder of an adapter.", adapter.path)


def adapter_problems(config: Config) -> Iterator[Problem]:
    """What keeps the adapter from being put on the model; a look at its modules takes a second."""
    adapter = adapter_settings(config)
    if adapter is None or not config.model.lora_configs:
        return
    if not adapter.name.isidentifier():
        message = "The name of an adapter is part of the names of its weights."
        yield Problem(f"{_KEY}.name", message, "Use letters, digits and _ only.", adapter.name)
    if adapter.path is not None:
        if not (Path(adapter.path) / CONFIG).is_file():
            message = f"The folder has no {CONFIG}."
            fix = "Name the folder of an adapter, or remove `path` for a fresh one."
            yield Problem(f"{_KEY}.path", message, fix, adapter.path)
        return
    folder = Path(config.model.model_path).expanduser()
    if not (folder / "config.json").is_file():
        return  # a model of the hub, or a folder that is refused anyway
    model = empty_model(str(folder), config.trainer.trust_remote_code)
    if trouble := target_trouble(model, adapter.target_modules):
        fix = "Name linear modules inside of the layers, or `all-linear`."
        value = config.model.lora_configs[0].target_modules
        yield Problem(f"{_KEY}.target_modules", trouble, fix, value)


def _start(lora: LoRAConfig) -> str | None:
    has_weights = lora.path is not None and not lora.is_dummy
    return str(Path(lora.path or "").expanduser()) if has_weights else None


def _names(value: str | list[str]) -> str | tuple[str, ...]:
    return value if isinstance(value, str) else tuple(value)
