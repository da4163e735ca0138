"""Whether the model hub has what a name stands for, asked once and quickly, before a run starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

_TIMEOUT_S = 5.0


def hub_problem(name: str, kind: Literal["model", "dataset"]) -> str | None:
    """Why ``name`` can't be had from the hub, in one sentence; None if it can.

    What lies in the cache of `huggingface_hub` needs no hub.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    if is_cached(name, kind):
        return None
    api = HfApi()
    try:
        (api.model_info if kind == "model" else api.dataset_info)(name, timeout=_TIMEOUT_S)
    except RepositoryNotFoundError:
        what = "model" if kind == "model" else "data set"
        return (
            f"There is no folder of this name here, and no such {what} on the hub "
            f"({api.endpoint}), or it is private and HF_TOKEN is not set."
        )
    except Exception as error:  # whatever the network does
        return (
            f"There is no folder of this name here, nor a copy in the cache, and the hub "
            f"({api.endpoint}) can't be asked: {type(error).__name__}: {error}."
        )
    return None


def is_cached(name: str, kind: Literal["model", "dataset"]) -> bool:
    """Whether some version of ``name`` lies in a cache of the hub's packages."""
    from huggingface_hub.constants import HF_HOME, HF_HUB_CACHE

    folder = Path(HF_HUB_CACHE) / f"{kind}s--{name.replace('/', '--')}" / "snapshots"
    if kind == "model":
        return any(folder.glob("*/config.json"))
    prepared = Path(os.environ.get("HF_DATASETS_CACHE") or Path(HF_HOME) / "datasets")
    return any(folder.glob("*/*")) or (prepared / name.replace("/", "___")).is_dir()
