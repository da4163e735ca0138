"""Selectors that need nothing but the size of the data: in order, shuffled, at random."""

import numpy as np

from trinity.buffer.selector.base import BaseSelector


class SequentialSelector(BaseSelector):
    """Rows in their order, over and over."""

    def get_indices(
        self, batch_size: int, return_extra_info: bool = False
    ) -> list[int] | tuple[list[int], dict[str, object]]:
        indices = (self.current_index + np.arange(batch_size)) % self.size
        self.current_index += batch_size
        return self._with_info(indices, return_extra_info)


class ShuffleSelector(BaseSelector):
    """A new permutation each epoch; a batch may cross from one into the next."""

    _epoch = -1
    _order: np.ndarray

    def get_indices(
        self, batch_size: int, return_extra_info: bool = False
    ) -> list[int] | tuple[list[int], dict[str, object]]:
        indices: list[int] = []
        while len(indices) < batch_size:
            epoch, start = divmod(self.current_index, self.size)
            taken = self._order_of(epoch)[start : start + batch_size - len(indices)]
            indices.extend(taken.tolist())
            self.current_index += len(taken)
        return self._with_info(indices, return_extra_info)

    def _order_of(self, epoch: int) -> np.ndarray:
        if epoch != self._epoch:
            generator = np.random.Generator(np.random.PCG64(self.seed + epoch))
            self._epoch, self._order = epoch, generator.permutation(self.size)
        return self._order


class RandomSelector(BaseSelector):
    """Each batch drawn afresh, without repetition within the batch where the data allow."""

    def get_indices(
        self, batch_size: int, return_extra_info: bool = False
    ) -> list[int] | tuple[list[int], dict[str, object]]:
        generator = np.random.default_rng(self.seed + self.current_index)
        indices: list[int] = []
        while len(indices) < batch_size:
            count = min(batch_size - len(indices), self.size)
            indices.extend(generator.choice(self.size, count, replace=False).tolist())
        self.current_index += batch_size
        return self._with_info(indices, return_extra_info)
