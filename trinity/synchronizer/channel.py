"""Carry a set of weights from the trainer to the engines: `MemoryChannel`, `CheckpointChannel`.

The trainer's side sends and gets a `WeightTicket`; an engine opens the ticket with
`open_weights`. Which version is out is `trinity.synchronizer.board`.
"""

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from trinity.common.models.protocol import WeightTicket
from trinity.utils import actor
from trinity.utils.digest import weights_digest

NamedTensors = Iterable[tuple[str, Tensor]]


class WeightChannel(Protocol):
    """The trainer's end of a channel."""

    def send(self, version: int, weights: NamedTensors) -> WeightTicket:
        """Put the weights where engines can fetch them. Earlier ones may be dropped."""
        ...

    def close(self) -> None:
        """Free what the channel holds."""
        ...


class MemoryChannel:
    """Weights through shared memory: Ray's object store, one copy whatever the number of engines.

    ``keep`` versions stay fetchable, so that an engine that starts again gets the newest.
    """

    method = "memory"

    def __init__(self, keep: int = 1) -> None:
        self._keep = keep
        self._out: list[object] = []

    def send(self, version: int, weights: NamedTensors) -> WeightTicket:
        named = [(name, tensor.detach().cpu().contiguous()) for name, tensor in weights]
        digest = weights_digest(named)
        packed = {
            name: (
                t.view(torch.uint8).numpy() if t.ndim else t.reshape(1).view(torch.uint8).numpy(),
                str(t.dtype),
                tuple(t.shape),
            )
            for name, t in named
        }
        reference = actor.put(packed)
        self._out = [*self._out, reference][-self._keep :]
        return WeightTicket(version, self.method, digest, reference)

    def close(self) -> None:
        self._out.clear()


class CheckpointChannel:
    """Weights through files: ``<folder>/weights_<version>/model.safetensors``, renamed into place.

    Any process that sees the file system can fetch them, in this run or another one.
    """

    method = "checkpoint"

    def __init__(self, folder: str | os.PathLike[str], keep: int = 2) -> None:
        self._folder = Path(folder)
        self._keep = keep

    def send(self, version: int, weights: NamedTensors) -> WeightTicket:
        named = {name: tensor.detach().cpu().contiguous() for name, tensor in weights}
        digest = weights_digest(named.items())
        self._folder.mkdir(parents=True, exist_ok=True)
        target = self._folder / f"weights_{version}"
        aside = Path(tempfile.mkdtemp(prefix=".saving_", dir=self._folder))
        try:
            save_file(named, aside / "model.safetensors", metadata={"digest": digest})
            if target.exists():
                shutil.rmtree(target)
            aside.rename(target)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        self._drop_old()
        return WeightTicket(version, self.method, digest, str(target / "model.safetensors"))

    def _drop_old(self) -> None:
        folders = sorted(self._folder.glob("weights_*"), key=lambda p: int(p.name.split("_")[1]))
        for folder in folders[: -self._keep]:
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """The files stay: other processes may still fetch them."""


def open_weights(ticket: WeightTicket, timeout_s: float = 600) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a ticket, one at a time, on the CPU. They must not be written to.

    Raises:
        TimeoutError: The object store does not deliver within ``timeout_s``.
        FileNotFoundError: The file of a checkpoint ticket is gone.
    """
    if ticket.method == MemoryChannel.method:
        packed = actor.fetch(ticket.payload, timeout_s)
        for name, (array, dtype, shape) in packed.items():  # type: ignore[attr-defined]  # by send
            tensor = torch.from_numpy(array).view(getattr(torch, dtype.removeprefix("torch.")))
            yield name, tensor.reshape(shape)
    elif ticket.method == CheckpointChannel.method:
        with safe_open(str(ticket.payload), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # not a dict
                yield name, file.get_tensor(name)
    else:
        raise ValueError(f"No way to open weights sent by {ticket.method!r}.")
