"""Carry a set of weights from the trainer to the engines: `MemoryChannel`, `CheckpointChannel`.

The trainer's side sends and gets a `WeightTicket`; an engine opens the ticket with
`open_weights`. Which version is out is `trinity.synchronizer.board`; from GPU to GPU go
`trinity.synchronizer.nccl` and, within one GPU, `trinity.synchronizer.ipc`.
"""

import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from trinity.common.models.protocol import WeightTicket
from trinity.utils import actor
from trinity.utils.digest import weights_digest
from trinity.utils.tensor_files import save_tensors

NamedTensors = Iterable[tuple[str, Tensor]]

_BUCKET_BYTES = 256 * 2**20


class WeightChannel(Protocol):
    """The trainer's end of a channel."""

    def send(self, version: int, weights: NamedTensors) -> WeightTicket:
        """Put the weights where engines can fetch them. Earlier ones may be dropped."""
        ...

    def before_change(self) -> None:
        """The trainer is about to change the weights that it sent last."""
        ...

    def close(self) -> None:
        """Free what the channel holds."""
        ...


class _Packed(NamedTuple):
    """A tensor as NumPy bytes, which the object store reads in place."""

    data: Any
    dtype: str
    shape: tuple[int, ...]


class MemoryChannel:
    """Weights through shared memory: Ray's object store, one copy whatever the number of engines.

    They go in buckets, so that beside that copy only one bucket is held here. ``keep`` versions
    stay fetchable, so that an engine that starts again gets the newest.
    """

    method = "memory"

    def __init__(self, keep: int = 1, bucket_bytes: int = _BUCKET_BYTES) -> None:
        self._keep = keep
        self._bucket_bytes = bucket_bytes
        self._out: list[list[object]] = []

    def send(self, version: int, weights: NamedTensors) -> WeightTicket:
        references: list[object] = []
        digest = weights_digest(self._putting(weights, references))
        self._out = [*self._out, references][-self._keep :]
        return WeightTicket(version, self.method, digest, references)

    def _putting(self, weights: NamedTensors, references: list[object]) -> Iterator[Any]:
        """Pass ``weights`` on, putting them into the store on the way."""
        bucket: dict[str, _Packed] = {}
        size = 0
        for name, tensor in weights:
            bucket[name] = _pack(tensor)
            size += tensor.nbytes
            yield name, tensor
            if size >= self._bucket_bytes:
                references.append(actor.put(bucket))
                bucket, size = {}, 0
        references.append(actor.put(bucket))

    def before_change(self) -> None:
        """What was sent is a copy."""

    def close(self) -> None:
        self._out.clear()


class CheckpointChannel:
    """Weights through files: ``<folder>/weights_<version>/model.safetensors``, renamed into place.

    Any process that sees the file system can fetch them, in this run or another one. One trainer
    writes to a folder. ``on_sent`` is called with each version that can be fetched.
    """

    method = "checkpoint"

    def __init__(
        self,
        folder: str | os.PathLike[str],
        keep: int = 2,
        on_sent: Callable[[int], None] | None = None,
    ) -> None:
        self._folder = Path(folder)
        self._keep = keep
        self._on_sent = on_sent

    def send(self, version: int, weights: NamedTensors) -> WeightTicket:
        named = _without_sharing(weights)
        digest = weights_digest(named.items())
        self._folder.mkdir(parents=True, exist_ok=True)
        for torn in self._folder.glob(".saving_*"):
            shutil.rmtree(torn, ignore_errors=True)
        target = self._folder / f"weights_{version}"
        aside = Path(tempfile.mkdtemp(prefix=".saving_", dir=self._folder))
        try:
            aside.chmod(self._folder.stat().st_mode)  # an explorer of another user reads it too
            save_tensors(named, aside / "model.safetensors", {"digest": digest})
            if target.exists():  # of an earlier run: a folder can't replace it
                target.rename(aside / "replaced")
            aside.rename(target)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        shutil.rmtree(target / "replaced", ignore_errors=True)
        self._drop_others(version)
        if self._on_sent is not None:
            self._on_sent(version)
        return WeightTicket(version, self.method, digest, str(target / "model.safetensors"))

    def _drop_others(self, version: int) -> None:
        """Older versions but the newest of them, and newer ones: those of a trainer that was killed
        after the checkpoint this one goes on from."""
        folders = {
            int(path.name.removeprefix("weights_")): path
            for path in self._folder.glob("weights_*")
            if path.name.removeprefix("weights_").isdigit()
        }
        kept = sorted(found for found in folders if found <= version)[-self._keep :]
        for found in folders.keys() - kept:
            shutil.rmtree(folders[found], ignore_errors=True)

    def before_change(self) -> None:
        """What was sent is a copy."""

    def close(self) -> None:
        """The files stay: other processes may still fetch them."""


def open_weights(ticket: WeightTicket, timeout_s: float = 600) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a ticket, one at a time, on the CPU. They must not be written to.

    Raises:
        TimeoutError: The object store does not deliver within ``timeout_s``.
        ProcessDied: The trainer is gone, and what it put into the object store with it.
        FileNotFoundError: The file of a checkpoint ticket is gone.
    """
    if ticket.method == MemoryChannel.method:
        for reference in ticket.payload:  # type: ignore[attr-defined]  # by send
            bucket: Any = actor.fetch(reference, timeout_s)
            for name, packed in bucket.items():
                yield name, _unpack(packed)
    elif ticket.method == CheckpointChannel.method:
        with safe_open(str(ticket.payload), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # not a dict
                yield name, file.get_tensor(name)
    else:
        raise ValueError(f"No way to open weights sent by {ticket.method!r}.")


def _pack(tensor: Tensor) -> _Packed:
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return _Packed(data, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def _unpack(packed: _Packed) -> Tensor:
    with warnings.catch_warnings():  # of read-only memory: the contract forbids writing
        warnings.simplefilter("ignore", UserWarning)
        data = torch.from_numpy(packed.data)
    return data.view(getattr(torch, packed.dtype)).view(packed.shape)


def _without_sharing(weights: NamedTensors) -> dict[str, Tensor]:
    """``weights`` on the CPU, where safetensors can store them: tied ones as copies."""
    named: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in weights:
        tensor = tensor.detach().cpu().contiguous()
        is_shared = tensor.untyped_storage().data_ptr() in seen
        named[name] = tensor.clone() if is_shared else tensor
        seen.add(tensor.untyped_storage().data_ptr())
    return named
