"""Weights laid out in buckets of bytes, alike on both ends of a transfer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_ALIGNMENT = 256  # bytes; any dtype's, and what copies like

#: name, dtype without "torch.", shape: what messages can carry
Entry = tuple[str, str, Sequence[int]]


@dataclass(frozen=True)
class Slot:
    """Where a tensor lies in its bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    def of(self, buffer: Tensor) -> Tensor:
        """The tensor in a bucket's bytes."""
        return buffer[self.start : self.start + self.num_bytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Bucket:
    """Tensors that travel together."""

    slots: tuple[Slot, ...]
    num_bytes: int


def describe(name: str, tensor: Tensor) -> Entry:
    """What the other end must know of a tensor."""
    return name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def lay_out(entries: Sequence[Entry], bucket_bytes: int) -> list[Bucket]:
    """Buckets of at most ``bucket_bytes``; a tensor that is larger has one of its own."""
    return list(_buckets(entries, bucket_bytes))


def _buckets(entries: Sequence[Entry], bucket_bytes: int) -> Iterator[Bucket]:
    slots: list[Slot] = []
    end = 0
    for name, dtype, shape in entries:
        slot = Slot(name, getattr(torch, dtype), tuple(shape), end)
        if slots and slot.start + slot.num_bytes > bucket_bytes:
            yield Bucket(tuple(slots), end)
            slots, slot = [], Slot(slot.name, slot.dtype, slot.shape, 0)
        slots.append(slot)
        end = -(-(slot.start + slot.num_bytes) // _ALIGNMENT) * _ALIGNMENT
    if slots:
        yield Bucket(tuple(slots), end)
