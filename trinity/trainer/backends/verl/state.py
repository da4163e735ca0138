"""A `VerlModel` in a checkpoint: the files of the torch trainer, which veRL reads too."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule

from trinity.checkpoint.shards import ShardReader
from trinity.trainer.backends.torch.state import HuggingFaceFolder, ModelState, held
from trinity.trainer.backends.verl.model import VerlModel


@torch.no_grad()
def copy_of(
    model: VerlModel, hf: HuggingFaceFolder | None, rank: int, world_size: int
) -> ModelState:
    """A copy of this rank's part, cut off from further training; called on all ranks at once."""
    return ModelState(
        held(get_model_state_dict(model.module), copies=True),  # type: ignore[arg-type]  # a dict
        held(_moments(model), copies=True),  # type: ignore[arg-type]  # a dict
        _extra(model),
        rank,
        world_size,
        hf,
    )


def load(model: VerlModel, folder: Path, rank: int, weights_only: bool) -> None:
    """Take up what any number of ranks of either trainer, or veRL, saved; on all ranks at once.

    Raises:
        ValueError: The checkpoint is of another architecture.
    """
    reader = ShardReader(folder)
    shapes = {name: tuple(p.shape) for name, p in model.plain.named_parameters()}
    reader.check_same(shapes, model.plain.state_dict().keys())
    whole = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    weights: dict[str, Any] = dict(reader.weights()) if rank == 0 else {}
    set_model_state_dict(model.module, weights, options=whole)
    if weights_only:
        return
    moments = _whole_moments(model, reader) if rank == 0 else {}
    set_optimizer_state_dict(model.module, model.optimizer, moments, options=whole)
    extra: Any = reader.extra()
    model.num_steps = reader.num_steps()
    model.engine.lr_scheduler.last_epoch = model.num_steps
    torch.set_rng_state(extra["rng"]["cpu"])


def _moments(model: VerlModel) -> dict[str, Any]:
    """The optimizer's state as any optimizer of PyTorch has it, with names of its parameters.

    FSDP1 holds parameters of a layer as one; PyTorch takes their moments apart, by name.
    """
    module = model.module
    if not isinstance(module, FSDPModule):
        return dict(get_optimizer_state_dict(module, model.optimizer))
    state = model.optimizer.state_dict()
    names = [name for name, _ in model.module.named_parameters()]
    for group in state["param_groups"]:
        group["param_names"] = [names[index] for index in group["params"]]
    return state


def _extra(model: VerlModel) -> dict[str, Any]:
    """Step and random state, in plain values; ``lr_scheduler`` and all of ``rng`` are for veRL."""
    kind, keys, *rest = tuple(np.random.get_state(legacy=True))
    return {
        "format": 1,
        "num_steps": model.num_steps,
        "lr_scheduler": model.engine.lr_scheduler.state_dict(),
        "rng": {
            "cpu": torch.get_rng_state(),
            "numpy": (kind, np.asarray(keys).tolist(), *rest),
            "random": random.getstate(),
        },
    }


def _whole_moments(model: VerlModel, reader: ShardReader) -> dict[str, Any]:
    """Whole moments by name, with the settings of this run."""
    names = reader.moment_names()
    state: Any = get_optimizer_state_dict(model.module, model.optimizer)
    [settings] = state["param_groups"]
    return {
        "state": {name: reader.moments(name) for name in names},
        "param_groups": [{**settings, "params": names}],
    }
