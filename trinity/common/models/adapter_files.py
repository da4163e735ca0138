"""Adapters as PEFT writes them, which others may have written: settings and weights, checked."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
DOWN, UP = ".lora_A.", ".lora_B."
_PREFIX = "base_model.model."
_PLAIN = {
    "bias": "none",
    "layer_replication": None,
    "lora_bias": False,
    "modules_to_save": None,
    "target_parameters": None,
    "trainable_token_indices": None,
    "use_dora": False,
}
"""Those by which an adapter is more than its updates -> the value with which it is not."""


class _Settings(BaseModel, extra="allow"):
    """PEFT's settings that say where an update is, how wide and how it is scaled."""

    r: int = Field(ge=1)
    lora_alpha: int | float
    target_modules: str | list[str]
    exclude_modules: str | list[str] | None = None
    use_rslora: bool = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    layers_to_transform: int | list[int] | None = None
    layers_pattern: str | list[str] | None = None
    peft_type: str = "LORA"


_KEPT = _Settings.model_fields.keys() - {"peft_type"}


def read_settings(folder: Path) -> dict[str, Any]:
    """The settings that the adapter in ``folder`` was made with, as `peft.LoraConfig` takes them.

    Raises:
        FileNotFoundError: There is none.
        ValueError: It is none that can be read, is more than a pair of matrices for each module,
            or is wider by its settings than its weights are, which would take memory for nothing.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is no adapter: it has no {CONFIG}.")
    try:
        settings = _Settings.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        what = ".".join(map(str, first["loc"])) or "its text"
        raise ValueError(f"{path} is not PEFT's: {what}: {first['msg']}.") from error
    if settings.peft_type != "LORA":
        raise ValueError(f"The adapter in {folder} is of the kind {settings.peft_type}, not LORA.")
    found = settings.model_dump(exclude_unset=True)
    for name, harmless in _PLAIN.items():
        if found.get(name) and found[name] != harmless:
            raise ValueError(
                f"The adapter in {folder} was made with {name}: {found[name]}, and only the two "
                "matrices of each update are read here."
            )
    _refuse_too_wide(folder, settings)
    return {name: found[name] for name in found.keys() & _KEPT if found[name] is not None}


def rank_in(folder: Path) -> int:
    """Rank of the widest update of the adapter in ``folder``; raises as `read_settings`."""
    return _widest(_Settings.model_validate(read_settings(folder)))


def read_adapter(folder: Path, adapter: str) -> Iterator[tuple[str, Tensor]]:
    """Weights of the adapter in ``folder``, by their names in a model that calls it ``adapter``."""
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  # not a dict
            module, kind = _split(name)
            yield f"{module.removeprefix(_PREFIX)}{kind}{adapter}.weight", file.get_tensor(name)


def file_name(name: str) -> str:
    """Name of a weight of an adapter in its file: without the adapter's own name."""
    module, kind = _split(name)
    return f"{_PREFIX}{module}{kind}weight"


def _split(name: str) -> tuple[str, str]:
    kind = DOWN if DOWN in name else UP
    return name.partition(kind)[0], kind


def _widest(settings: _Settings) -> int:
    return max([settings.r, *(settings.rank_pattern or {}).values()])


def _refuse_too_wide(folder: Path, settings: _Settings) -> None:
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            names = [name for name in file.keys() if DOWN in name]  # noqa: SIM118  # not a dict
            ranks = [file.get_slice(name).get_shape()[0] for name in names]
    except SafetensorError as error:
        raise ValueError(f"{folder / WEIGHTS} can't be read: {error}.") from error
    if not ranks:
        raise ValueError(f"{folder / WEIGHTS} holds no update.")
    if _widest(settings) > max(ranks):
        raise ValueError(
            f"The adapter in {folder} has rank {_widest(settings)} by its {CONFIG}, and its "
            f"widest update has {max(ranks)}."
        )
