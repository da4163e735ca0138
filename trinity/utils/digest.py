"""A digest of weights that trainer and engine compute alike, on the device the weights are on.

A tensor is read as 32-bit words, in rows of a fixed length. The digest of a row is
``sum(word[i] * key[i]) mod 2**64`` with fixed pseudo-random odd 64-bit keys, which is exact in
integer arithmetic whatever the order of summation, so every device gets the same. A changed bit
always changes it; other changes, such as words that moved, go unseen with a chance below 2**-31.
The digests of all rows, with names, dtypes and shapes, go through BLAKE2.
"""

import hashlib
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

_ROW_WORDS = 2**14  # part of the definition: another value gives other digests
_ROWS_AT_ONCE_CPU = 16  # in a core's cache, as 64-bit words
_ROWS_AT_ONCE = 512  # enough to keep a GPU busy


class WeightsDigest:
    """Takes tensors one at a time; see `weights_digest`."""

    def __init__(self) -> None:
        self._parts: list[tuple[str, Tensor]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Take in one tensor; it may be freed afterwards."""
        label = f"{name} {tensor.dtype} {tuple(tensor.shape)} "
        self._parts.append((label, _row_digests(tensor)))

    def hexdigest(self) -> str:
        """The digest of what was taken in so far."""
        digest = hashlib.blake2b(digest_size=16)
        for label, rows in sorted(self._parts, key=lambda part: part[0]):
            digest.update(label.encode() + rows.cpu().numpy().tobytes())
        return digest.hexdigest()


def weights_digest(weights: Iterable[tuple[str, Tensor]]) -> str:
    """Hex digest over names, dtypes, shapes and every bit of the tensors, in any order of names."""
    digest = WeightsDigest()
    for name, tensor in weights:
        digest.add(name, tensor)
    return digest.hexdigest()


@torch.no_grad()
def _row_digests(tensor: Tensor) -> Tensor:
    """One int64 for each row of words."""
    words = _words(tensor.detach())
    keys = _keys(words.device)
    full = words.numel() // _ROW_WORDS * _ROW_WORDS
    at_once = _ROW_WORDS * (_ROWS_AT_ONCE_CPU if words.is_cpu else _ROWS_AT_ONCE)
    digests = [
        _sums(words[start : min(start + at_once, full)].view(-1, _ROW_WORDS), keys)
        for start in range(0, full, at_once)
    ]
    rest = words[full:]
    digests.append((rest * keys[: rest.numel()]).sum(dim=0, keepdim=True))
    return torch.cat(digests)


def _sums(rows: Tensor, keys: Tensor) -> Tensor:
    """``sum(word[i] * key[i])`` of each row.

    On a CPU by NumPy: in one thread, since threads would wait for each other on busy cores, at 2.4
    times PyTorch's speed.
    """
    if not rows.is_cpu:
        return (rows * keys).sum(dim=1)
    return torch.from_numpy(np.einsum("ri,i->r", rows.numpy().astype(np.int64), keys.numpy()))


def _words(tensor: Tensor) -> Tensor:
    """The bits of a tensor as a flat row of int32, padded with zeros."""
    flat = tensor.contiguous().flatten()
    if flat.storage_offset() * flat.element_size() % 4 or flat.nbytes % 4:
        data = flat.view(torch.uint8)
        flat = torch.nn.functional.pad(data, (0, -data.numel() % 4))
    return flat.view(torch.int32)


@lru_cache(maxsize=8)
def _keys(device: torch.device) -> Tensor:
    data = hashlib.shake_128(b"trinity weights digest").digest(8 * _ROW_WORDS)
    keys = torch.frombuffer(bytearray(data), dtype=torch.int64) | 1
    return keys.to(device)
