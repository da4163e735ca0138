"""Keys and values of many sequences: one dense row a sequence, per layer, grown as needed.

Shape suffixes: R = rows, H = key/value heads, L = positions, D = head size, N = tokens written.
"""

from torch import Tensor

TILE = 64  # positions of one page of a prompt
GRAIN = 16  # attention works on whole grains of positions: see `tiled_attention`


def round_up(length: int, multiple: int = TILE) -> int:
    """The least multiple not below ``length``."""
    return -(-length // multiple) * multiple


class KVRows:
    """Rows of keys and values. What is not written yet is finite: weighted by 0 it adds nothing."""

    def __init__(self, num_layers: int) -> None:
        self._keys: list[Tensor | None] = [None] * num_layers
        self._values: list[Tensor | None] = [None] * num_layers
        self.num_layers = num_layers
        self.num_rows = 0
        self.length = 0

    @property
    def size_bytes(self) -> int:
        return sum(t.nbytes for t in (*self._keys, *self._values) if t is not None)

    def reserve(self, num_rows: int, length: int) -> None:
        """Make room for ``num_rows`` rows of ``length`` positions; what was written stays."""
        if num_rows <= self.num_rows and length <= self.length:
            return
        if num_rows > self.num_rows:
            self.num_rows = max(num_rows, self.num_rows + self.num_rows // 4)
        if length > self.length:
            self.length = round_up(max(length, self.length * 9 // 8), GRAIN)
        for store in (self._keys, self._values):
            for layer, old_RHLD in enumerate(store):
                if old_RHLD is not None:
                    store[layer] = self._grown(old_RHLD)

    def _grown(self, old_RHLD: Tensor) -> Tensor:
        rows, heads, length, size = old_RHLD.shape
        new_RHLD = old_RHLD.new_zeros(self.num_rows, heads, self.length, size)
        new_RHLD[:rows, :, :length] = old_RHLD
        return new_RHLD

    def write(
        self, layer: int, row_N: Tensor, position_N: Tensor, key_NHD: Tensor, value_NHD: Tensor
    ) -> None:
        """Put the keys and values of N tokens in their places."""
        for rows_RHLD, new_NHD in zip(
            self.room(layer, key_NHD, value_NHD), (key_NHD, value_NHD), strict=True
        ):
            rows_RHLD[row_N, :, position_N] = new_NHD

    def room(self, layer: int, key_NHD: Tensor, value_NHD: Tensor) -> tuple[Tensor, Tensor]:
        """All rows of a layer, [R, H, L, D], made for keys and values like these if need be."""
        for store, new_NHD in ((self._keys, key_NHD), (self._values, value_NHD)):
            if store[layer] is None:
                _, heads, size = new_NHD.shape
                store[layer] = new_NHD.new_zeros(self.num_rows, heads, self.length, size)
        return self._key(layer), self._value(layer)

    def view(self, layer: int, num_rows: int, length: int) -> tuple[Tensor, Tensor]:
        """The first rows and positions of a layer, without a copy."""
        return self._key(layer)[:num_rows, :, :length], self._value(layer)[:num_rows, :, :length]

    def move(self, source_N: Tensor, target_N: Tensor, length: int) -> None:
        """Copy whole rows within the store."""
        for layer, key_RHLD in enumerate(self._keys):
            if key_RHLD is not None:
                for rows_RHLD in (key_RHLD, self._value(layer)):
                    rows_RHLD[target_N, :, :length] = rows_RHLD[source_N, :, :length]

    def fill(self, layer: int, first: int, key_NHLD: Tensor, value_NHLD: Tensor) -> None:
        """Put sequences into the rows from ``first`` on; positions that rows lack are left out."""
        num_rows, heads, length, _ = key_NHLD.shape
        length = min(length, self.length)
        for store, new in ((self._keys, key_NHLD), (self._values, value_NHLD)):
            rows_RHLD = store[layer]
            if rows_RHLD is None:
                rows_RHLD = new.new_zeros(self.num_rows, heads, self.length, new.shape[-1])
                store[layer] = rows_RHLD
            rows_RHLD[first : first + num_rows, :, :length] = new[:, :, :length]

    def clear(self, keep_bytes: int = 0) -> None:
        """Free the memory, unless it is at most ``keep_bytes``."""
        if self.size_bytes <= keep_bytes:
            return
        self._keys = [None] * len(self._keys)
        self._values = [None] * len(self._values)
        self.num_rows = self.length = 0

    def _key(self, layer: int) -> Tensor:
        key_RHLD = self._keys[layer]
        assert key_RHLD is not None, f"layer {layer} has not been written"
        return key_RHLD

    def _value(self, layer: int) -> Tensor:
        value_RHLD = self._values[layer]
        assert value_RHLD is not None, f"layer {layer} has not been written"
        return value_RHLD
