"""New weights straight to where a vLLM model keeps them.

vLLM's own loading finds for every weight its place among stacked and cut parameters, in Python. It
is watched once, and the copies that it made are made again at the next update, many in one call.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

Named = Sequence[tuple[str, Tensor]]


class Move(NamedTuple):
    """A part of a weight, and the part of a parameter that it is copied to."""

    target: Tensor
    start: int
    size: Sequence[int]
    stride: Sequence[int]

    def source(self, weight: Tensor) -> Tensor:
        return weight.as_strided(self.size, self.stride, weight.storage_offset() + self.start)


class DirectLoader:
    """Loads weights into ``model``, by plain copies as soon as it has seen all of them loaded.

    Where a copy converts what comes, or leaves a parameter half filled, it never does: then every
    update is loaded as vLLM does it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model: Any = model
        self._moves: dict[str, list[Move]] = {}
        self._is_complete = False

    def load(self, weights: Named) -> None:
        """Load some of the weights; what they are copied from may change afterwards."""
        if not self._is_complete:
            watch = _Watch(weights)
            with watch:
                self._model.load_weights(iter(weights))
            self._moves |= watch.moves
            return
        moves = [(move, weight) for name, weight in weights for move in self._moves[name]]
        if moves:
            sources = [move.source(weight) for move, weight in moves]
            torch._foreach_copy_([move.target for move, _ in moves], sources)

    @property
    def is_complete(self) -> bool:
        """Whether it knows where every element of the model comes from, and so can `patch`."""
        return self._is_complete

    def patch(self, weights: Named, changed: Named) -> None:
        """Load the elements of some weights that are marked in ``changed``, of the same names."""
        for (name, weight), (_, marks) in zip(weights, changed, strict=True):
            for move in self._moves[name]:
                target = move.target
                torch.where(move.source(marks), move.source(weight), target, out=target)

    def finish(self) -> None:
        """All weights came."""
        moves = [move for moves in self._moves.values() for move in moves]
        filled = sum(move.target.numel() for move in moves)
        self._is_complete = filled == sum(p.numel() for p in self._model.parameters())


class _Watch(TorchDispatchMode):
    """Notes every copy from one of ``weights``."""

    def __init__(self, weights: Named) -> None:
        super().__init__()
        self.moves: dict[str, list[Move]] = {name: [] for name, _ in weights}
        self._weights = sorted(weights, key=lambda entry: entry[1].data_ptr())
        self._starts = [weight.data_ptr() for _, weight in self._weights]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default:
            self._note(args[0], args[1])
        return func(*args, **(kwargs or {}))

    def _note(self, target: Tensor, source: Tensor) -> None:
        place = bisect_right(self._starts, source.data_ptr()) - 1
        if place < 0 or source.dtype != target.dtype or source.shape != target.shape:
            return
        name, weight = self._weights[place]
        start = (source.data_ptr() - weight.data_ptr()) // weight.element_size()
        if start < weight.numel():
            move = Move(target.detach(), start, tuple(source.shape), tuple(source.stride()))
            self.moves[name].append(move)
