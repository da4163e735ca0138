"""Read the shards that ranks saved, put together tensor by tensor: ours and veRL's (FSDP).

A file of a rank holds plain tensors (one rank) or DTensors, which know how they are cut.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from trinity.checkpoint import layout

_NUMPY_STATE: list[Any] = [
    np.ndarray,
    np.dtype,
    type(np.dtype("uint32")),
    np.empty(0).__reduce__()[0],
]
"""What NumPy's random state is made of, which veRL saves with the step."""


class ShardReader:
    """The shards of one model folder (``.../actor``). Files are mapped, not read as a whole."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.world_size = layout.world_size_of(self.folder)
        self._files: dict[str, list[Any]] = {}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every whole weight."""
        return {name: tuple(tensor.shape) for name, tensor in self._parts("model")[0].items()}

    def check_same(
        self, wanted: Mapping[str, tuple[int, ...]], known_names: Collection[str]
    ) -> None:
        """Refuse a checkpoint of another architecture, by the names and shapes of its weights.

        Args:
            wanted: Shape of each parameter of the model.
            known_names: All that a checkpoint of the model may hold: buffers and tied names too.
        """
        saved = self.shapes()
        missing = sorted(set(wanted) - set(saved))
        unknown = sorted(set(saved) - set(known_names))
        other = [name for name, shape in wanted.items() if saved.get(name, shape) != shape]
        found = None
        if missing:
            found = f"there is no {missing[0]} ({len(missing)} of {len(wanted)} are missing)"
        elif unknown:
            found = f"its {unknown[0]} is not in the model ({len(unknown)} of {len(saved)} are not)"
        elif other:
            found = f"{other[0]} is {saved[other[0]]} there, and {wanted[other[0]]} in the model"
        if found is not None:
            raise ValueError(f"{self.folder} is of another architecture: {found}.")

    def weight(self, name: str) -> Tensor:
        """A whole weight by its name."""
        return merge([part[name] for part in self._parts("model")])

    def weights(self) -> dict[str, Tensor]:
        """All whole weights; those that share memory still do if one rank saved them."""
        return {name: self.weight(name) for name in self.shapes()}

    def moment_names(self) -> list[str]:
        """Parameters that the optimizer has moments of."""
        first = self._parts("optim")[0]
        return [self._name(first, index) for index in first["state"]]

    def moments(self, name: str) -> dict[str, Tensor]:
        """Whole moments (``exp_avg`` ...) of a parameter."""
        found: dict[str, list[Tensor]] = {}
        for part in self._parts("optim"):
            index = next(i for i in part["state"] if self._name(part, i) == name)
            for key, value in part["state"][index].items():
                found.setdefault(key, []).append(torch.as_tensor(value))
        return {key: merge(values) for key, values in found.items()}

    def extra(self) -> dict[str, object]:
        """Step and random state, as rank 0 saved them."""
        found: dict[str, object] = self._parts("extra_state")[0]
        return found

    def num_steps(self) -> int:
        """Optimizer steps made. veRL notes them with its learning rate schedule."""
        extra: Any = self.extra()
        return int(
            extra["num_steps"] if "num_steps" in extra else extra["lr_scheduler"]["last_epoch"]
        )

    def _name(self, optimizer: Mapping[str, Any], index: int | str) -> str:
        """Name of a parameter that the optimizer's state counts."""
        if isinstance(index, str):
            return index
        names = optimizer["param_groups"][0].get("param_names")
        if names:
            return str(names[index])
        return list(self.shapes())[index]

    def _parts(self, kind: str) -> list[Any]:
        if kind not in self._files:
            names = [layout.shard_name(kind, self.world_size, r) for r in range(self.world_size)]
            self._files[kind] = [_load(self.folder / name) for name in names]
        return self._files[kind]


def merge(parts: list[Tensor]) -> Tensor:
    """One tensor from the parts of all ranks, on the CPU, in the dtype it was saved in."""
    first = parts[0]
    if not isinstance(first, DTensor):
        return first.detach()
    if len(parts) == 1:
        return first._local_tensor.detach()
    mesh = first.device_mesh.mesh
    locals_ = [parts[rank]._local_tensor.detach() for rank in mesh.flatten().tolist()]
    for size, placement in zip(mesh.shape[::-1], first.placements[::-1], strict=True):
        groups = [locals_[start : start + size] for start in range(0, len(locals_), size)]
        locals_ = [_joined(group, placement) for group in groups]
    [whole] = locals_
    if whole.shape != first.shape:
        raise ValueError(
            f"Shards of {len(parts)} ranks make {tuple(whole.shape)}, but the tensor is "
            f"{tuple(first.shape)}: a placement of {first.placements} can't be put together."
        )
    return whole


def _joined(group: list[Tensor], placement: Placement) -> Tensor:
    """What ranks along one axis of their mesh hold, as one tensor."""
    if isinstance(placement, Shard):
        return torch.cat(group, dim=placement.dim)
    if isinstance(placement, Replicate):
        return group[0]
    raise ValueError(f"A placement of {placement} can't be put together.")


@contextmanager
def _no_word_of_groups() -> Iterator[None]:
    """Shards that are put together here need no process groups, whose absence PyTorch tells."""
    logger = logging.getLogger("torch.distributed.device_mesh")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _load(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: the checkpoint is not complete.")
    try:
        with torch.serialization.safe_globals(_NUMPY_STATE), _no_word_of_groups():
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise ValueError(f"{path} can't be read as tensors: {error}") from error


def load_full_state_dict(
    folder: Path, rename: Callable[[str], str] = lambda name: name
) -> dict[str, Tensor]:
    """All whole weights of a model folder, under names changed by ``rename``."""
    return {rename(name): tensor for name, tensor in ShardReader(folder).weights().items()}
