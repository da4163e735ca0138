"""`SplitMasters`: float32 masters of bfloat16 weights, of which only the lower halves are kept."""

import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress

import torch
from torch import Tensor, nn

#: Values that are float32 at a time. A power of two, so that vectors of the CPU begin as they do
#: in a whole tensor, and the last digits of what is computed with them are the same.
_BLOCK = 1 << 18
_TIE = 0x8000
_ROW = 1 << 12
_ALIGNED = 64  # elements: vectors of the CPU


class SplitMasters(Mapping[str, Tensor]):
    """Masters by name, put together when one is asked for: a copy, with the kept gradient.

    A weight is its master rounded to bfloat16, so the master is the bits of the weight and what
    they are away from it: a remainder of -0x8000 to 0x8000. 16 bits hold it but for the last, where
    a master lies half way between an even weight and the next: one in 2^17 does, and their places
    are kept. So a master takes 2 bytes instead of 4, and comes out as it went in, bit for bit (a
    NaN as some NaN).

    Remainders and gradients take memory only once they are not 0. For weights that lie whole in CPU
    memory: where they are on a GPU, or cut over ranks (FSDP keeps float32 parts by itself), masters
    are tensors of their own.

    Attributes:
        weights: The model's own, by name.
        gradients: Float32, by name; theirs for good.

    Args:
        weights: Parameters in float32, by name. They become bfloat16, in memory of their own beside
            each other, and must be changed by nobody else.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter]) -> None:
        self.weights = dict(weights)
        shapes = [weight.shape for weight in weights.values()]
        self.gradients = dict(zip(weights, untouched_zeros(shapes, torch.float32), strict=True))
        remainders = untouched_zeros(shapes, torch.int16)
        self._remainders = dict(zip(weights, remainders, strict=True))
        self._ties: dict[tuple[str, int], Tensor] = {}
        places = untouched_zeros(shapes, torch.bfloat16)
        for (name, weight), place in zip(weights.items(), places, strict=True):
            values = weight.detach().reshape(-1)
            weight.data = place.copy_(weight.detach())
            for block in _blocks(place):
                away = _away(values[block], place.view(-1)[block])
                if away.any():  # else its pages stay untouched
                    self._keep(name, block, away)

    def __getitem__(self, name: str) -> Tensor:
        master = torch.empty_like(self.weights[name], dtype=torch.float32, requires_grad=False)
        for block in _blocks(master):
            self._read(name, block, master.view(-1)[block])
        master.grad = self.gradients[name]
        return master

    def __contains__(self, name: object) -> bool:
        return name in self.weights

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)

    @torch.no_grad()
    def set(self, name: str, values: Tensor) -> None:
        """Give a master new values, and its weight their rounded ones."""
        for block in _blocks(self.weights[name]):
            self._write(name, block, values.reshape(-1)[block].float())

    @torch.no_grad()
    def change(self, name: str, change: Callable[[slice, Tensor], None]) -> None:
        """Change a master, a block at a time.

        Args:
            change: Gets where a block lies in the flat tensor, and its values to be changed.
        """
        weight = self.weights[name]
        scratch = torch.empty(min(_BLOCK, weight.numel()), dtype=torch.float32)
        for block in _blocks(weight):
            values = scratch[: block.stop - block.start]
            self._read(name, block, values)
            change(block, values)
            self._write(name, block, values)

    def _read(self, name: str, block: slice, values: Tensor) -> None:
        values.copy_(self.weights[name].detach().view(-1)[block])
        bits = values.view(torch.int32)
        bits.add_(self._remainders[name].view(-1)[block])
        ties = self._ties.get((name, block.start))
        if ties is not None:
            bits[ties] += 2 * _TIE

    def _write(self, name: str, block: slice, values: Tensor) -> None:
        rounded = self.weights[name].detach().view(-1)[block]
        rounded.copy_(values)
        self._keep(name, block, _away(values, rounded))

    def _keep(self, name: str, block: slice, away: Tensor) -> None:
        self._remainders[name].view(-1)[block].copy_(away)  # the tie becomes -0x8000
        self._ties.pop((name, block.start), None)
        ties = _ties(away)
        if len(ties):
            self._ties[name, block.start] = ties


def untouched_zeros(shapes: Iterable[torch.Size], dtype: torch.dtype) -> list[Tensor]:
    """Zeros in CPU memory outside the heap, which take none until something is written there."""
    shapes = list(shapes)
    sizes = [shape.numel() for shape in shapes]
    starts, total = [], 0
    for size in sizes:
        starts.append(total)
        total += -(-size // _ALIGNED) * _ALIGNED
    if not total:
        return [torch.zeros(shape, dtype=dtype) for shape in shapes]
    pages = mmap.mmap(-1, total * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # where the system has no huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)  # fewer faults at first, and fewer look-ups for good
    flat = torch.frombuffer(pages, dtype=dtype)
    return [
        flat[start : start + size].view(shape)
        for start, size, shape in zip(starts, sizes, shapes, strict=True)
    ]


def _blocks(tensor: Tensor) -> Iterator[slice]:
    size = tensor.numel()
    for start in range(0, size, _BLOCK):
        yield slice(start, min(start + _BLOCK, size))


def _away(values: Tensor, rounded: Tensor) -> Tensor:
    """What the bits of ``values`` are away from those of ``rounded``."""
    bits = rounded.float().view(torch.int32)
    return torch.sub(values.view(torch.int32), bits, out=bits)


def _ties(away: Tensor) -> Tensor:
    """Where a remainder does not fit. Looked for by rows: to compare each value is slow."""
    width = _ROW if len(away) % _ROW == 0 else len(away)
    rows = away.view(-1, width)
    having = (rows.amax(dim=1) >= _TIE).nonzero().flatten().tolist()
    found = [(rows[row] == _TIE).nonzero().flatten() + row * width for row in having]
    return torch.cat(found).to(torch.int32) if found else away[:0]
