"""What depends on the release of veRL, which is 0.9.1, and on what is installed beside it."""

import importlib
import importlib.metadata
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from trinity.common.errors import MissingExtraError, TrinityError

_RELEASE = "0.9"
_MEGATRON = {
    "megatron.core": "megatron-core",
    "megatron.bridge": "megatron-bridge",
    "transformer_engine": "transformer-engine",
}
"""Module -> package that veRL's Megatron engine needs."""

_TRL_CLASS = "AutoModelForCausalLMWithValueHead"
_TRL_PLACES = ("experimental/ppo/__init__.py", "__init__.py")


def require_verl(strategy: str) -> None:
    """See that veRL is there and can do what is asked.

    Raises:
        MissingExtraError: veRL is not installed.
        TrinityError: It is another release.
    """
    if find_spec("verl") is None:
        raise MissingExtraError("verl", "verl")
    found = importlib.metadata.version("verl")
    if not found.startswith(f"{_RELEASE}."):
        raise TrinityError(
            f"veRL {found} is installed; trainer_type: verl drives veRL {_RELEASE}.x. "
            "Install it with pip install 'trinity-rft[verl]'."
        )
    missing = missing_for_megatron() if strategy == "megatron" else None
    if missing is not None:
        raise MissingExtraError(missing, "megatron")


def missing_for_megatron() -> str | None:
    """The first package of veRL's Megatron engine that is not installed; None if all are."""
    has_namespace = find_spec("megatron") is not None
    for module, package in _MEGATRON.items():
        if (module.startswith("megatron.") and not has_namespace) or find_spec(module) is None:
            return package
    return None


@cache
def load_engines(device: str, strategy: str) -> None:
    """Import veRL's engines and have them registered for ``device``."""
    if device != "cpu":
        importlib.import_module("verl.workers.engine")
        if strategy == "megatron":  # its import error, if any: veRL only warns
            importlib.import_module("verl.workers.engine.megatron")
        return
    importlib.import_module("trinity.trainer.backends.verl.platform")
    registry = importlib.import_module("verl.workers.engine").EngineRegistry
    engines = importlib.import_module("verl.workers.engine.fsdp.transformer_impl")
    for kind, engine in (
        ("language_model", engines.FSDPEngineWithLMHead),
        ("value_model", engines.FSDPEngineWithValueHead),
    ):
        registry.register(kind, ["fsdp", "fsdp2"], "cpu")(engine)


def can_pack(device: str) -> bool:
    """Whether sequences can go through a model without padding: veRL needs flash-attn for it.

    FlashAttention 4 alone, which puts its kernels into a folder of that name, does not do.
    """
    found = None if device == "cpu" else find_spec("flash_attn")
    return found is not None and found.origin is not None


def flash_attn_fault(device: str) -> str | None:
    """Why flash-attn, though installed, can't be loaded; None if it can, or is not needed."""
    if can_pack(device):
        try:
            importlib.import_module("flash_attn")
        except ImportError as error:
            return str(error)
    return None


def unusable_trl() -> str | None:
    """The version of an installed TRL that ends veRL's FSDP engines at their start, or None.

    Where TRL is there they import a class of it, by one of two modules; TRL 1.13 and newer lack it.
    The files are looked at, since TRL takes long to import.
    """
    found = find_spec("trl")
    if found is None or found.origin is None:
        return None
    files = [Path(found.origin).parent / place for place in _TRL_PLACES]
    if any(file.is_file() and _TRL_CLASS in file.read_text(encoding="utf-8") for file in files):
        return None
    try:
        return importlib.metadata.version("trl")
    except importlib.metadata.PackageNotFoundError:
        return "of no known version"
