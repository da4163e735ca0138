"""A digest of weights that trainer and engine compute alike, on the device the weights are on."""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

_CHUNK = 1 << 24
_PERIOD = 65_521  # prime: an element moved elsewhere changes the weighted sum
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def weights_digest(weights: Iterable[tuple[str, Tensor]]) -> str:
    """Hex digest over names, dtypes, shapes and every bit of the tensors, in any order of names."""
    parts = [f"{name} {_tensor_digest(tensor)}" for name, tensor in weights]
    return hashlib.blake2b("\n".join(sorted(parts)).encode(), digest_size=16).hexdigest()


@torch.no_grad()
def _tensor_digest(tensor: Tensor) -> str:
    """Sum and position-weighted sum of the bit patterns, modulo 2**64: exact on any device."""
    bits = tensor.detach().contiguous().flatten().view(_BITS[tensor.element_size()])
    total, weighted = 0, 0
    for start in range(0, bits.numel(), _CHUNK):
        chunk = bits[start : start + _CHUNK].long()
        place = torch.arange(start, start + chunk.numel(), device=chunk.device) % _PERIOD + 1
        total += int(chunk.sum())
        weighted += int((chunk * place).sum())
    return f"{tensor.dtype} {tuple(tensor.shape)} {total % 2**64:x} {weighted % 2**64:x}"
