"""Keys and values of prompts in pages of one tile each; prompts that start alike share pages.

Shape suffixes: P = pages, H = key/value heads, D = head size, N = tokens written, B = prompts,
T = pages of each, L = T * TILE positions.
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from trinity.engine.torch.kv import TILE


@dataclass
class PromptSlot:
    """Where one prompt lies.

    Args:
        pages: Page of each tile of the prompt.
        num_known: Tokens from the start whose keys and values are there.
        generation: Of the weights that it began with.
        keys: What each page is known by to prompts that start alike; empty: it is not shared.
    """

    pages: np.ndarray
    num_known: int
    generation: int
    keys: list[bytes] = field(default_factory=list)


class PromptPages:
    """Pages of keys and values, and which of them later prompts may use again.

    A page is free, owned by running prompts (counted), or only kept: known by its key, in the
    order of last use, and given up when memory is wanted.

    Args:
        max_kept_bytes: Memory that kept pages may fill; 0: prompts share nothing.
    """

    def __init__(self, num_layers: int, max_kept_bytes: int) -> None:
        self._keys: list[Tensor | None] = [None] * num_layers
        self._values: list[Tensor | None] = [None] * num_layers
        self.num_layers = num_layers
        self._max_kept_bytes = max_kept_bytes
        self._num_pages = 0
        self._free: list[int] = []
        self._owners: Counter[int] = Counter()
        self._known: OrderedDict[bytes, int] = OrderedDict()
        self._key_of: dict[int, bytes] = {}
        self._in_work: set[bytes] = set()
        self._generation = 0

    @property
    def size_bytes(self) -> int:
        return sum(t.nbytes for t in (*self._keys, *self._values) if t is not None)

    @property
    def bytes_per_token(self) -> float:
        """Memory of one token; 0 before anything was written."""
        return self.size_bytes / (self._num_pages * TILE) if self._num_pages else 0.0

    def open(self, tokens: np.ndarray, is_shared: bool) -> PromptSlot | None:
        """A place for a prompt; None while another prompt computes a page that this one needs.

        Args:
            is_shared: Whether the prompt may use pages of others and others may use its.
        """
        count = -(-len(tokens) // TILE)
        keys = _page_keys(tokens) if is_shared and self._max_kept_bytes else []
        known: list[int] = []
        for key in keys:
            if key in self._in_work:
                return None
            if key not in self._known:
                break
            self._known.move_to_end(key)
            known.append(self._known[key])
        self._owners.update(known)
        fresh = [self._take_page() for _ in range(count - len(known))]
        self._owners.update(fresh)
        self._in_work.update(keys[len(known) :])
        num_known = min(len(known) * TILE, len(tokens) - 1)
        pages = np.array(known + fresh, dtype=np.int64)
        return PromptSlot(pages, num_known, self._generation, keys)

    def publish(self, slot: PromptSlot, num_done: int, num_tokens: int) -> None:
        """Let others use the pages of ``slot`` that its first ``num_done`` tokens fill.

        Not if the weights have changed since it began: some may be of the old ones.
        """
        if slot.generation != self._generation:
            return
        whole = len(slot.pages) if num_done == num_tokens else num_done // TILE
        for key, page in zip(slot.keys[:whole], slot.pages.tolist(), strict=False):
            self._in_work.discard(key)
            if key not in self._known:
                self._known[key] = page
                self._key_of[page] = key

    def close(self, slot: PromptSlot) -> None:
        """The prompt of ``slot`` is done with; its known pages are kept."""
        if slot.generation == self._generation:
            self._in_work.difference_update(slot.keys)
        for page in slot.pages.tolist():
            self._owners[page] -= 1
            if self._owners[page] == 0:
                del self._owners[page]
                if page not in self._key_of:
                    self._free.append(page)

    def forget(self) -> None:
        """Keep no page: the weights have changed. Owned pages stay with their owners."""
        self._generation += 1
        for page in self._key_of:
            if page not in self._owners:
                self._free.append(page)
        self._known.clear()
        self._key_of.clear()
        self._in_work.clear()

    def clear_if_empty(self) -> None:
        """Free all memory, unless pages are owned or kept."""
        if not self._owners and not self._known:
            self._keys = [None] * len(self._keys)
            self._values = [None] * len(self._values)
            self._num_pages, self._free = 0, []

    def write(
        self, layer: int, page_N: Tensor, position_N: Tensor, key_NHD: Tensor, value_NHD: Tensor
    ) -> None:
        """Put the keys and values of N tokens into their pages; positions are those in a page."""
        for pages_PHLD, new_NHD in zip(
            self.room(layer, key_NHD, value_NHD), (key_NHD, value_NHD), strict=True
        ):
            pages_PHLD[page_N, :, position_N] = new_NHD

    def room(self, layer: int, key_NHD: Tensor, value_NHD: Tensor) -> tuple[Tensor, Tensor]:
        """All pages of a layer, [P, H, TILE, D], made for keys and values like these if need be."""
        for store, new_NHD in ((self._keys, key_NHD), (self._values, value_NHD)):
            pages_PHLD = store[layer]
            if pages_PHLD is None or len(pages_PHLD) < self._num_pages:
                store[layer] = _grown(pages_PHLD, self._num_pages, new_NHD)
        return _written(self._keys[layer]), _written(self._values[layer])

    def gather(self, layer: int, page_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, L, D] of chosen pages, in a row for each prompt."""
        return _rows(self._keys[layer], page_BT), _rows(self._values[layer], page_BT)

    def _take_page(self) -> int:
        if not self._free and self._is_full:
            self._drop_oldest()
        if self._free:
            return self._free.pop()
        grown = max(self._num_pages + 1, self._num_pages * 5 // 4)
        self._free = list(range(grown - 1, self._num_pages - 1, -1))
        self._num_pages = grown
        return self._free.pop()

    @property
    def _is_full(self) -> bool:
        return self.size_bytes >= self._max_kept_bytes

    def _drop_oldest(self) -> None:
        """Give up the kept page that was not used for longest."""
        for key, page in self._known.items():
            if page not in self._owners:
                del self._known[key], self._key_of[page]
                self._free.append(page)
                return


def _page_keys(tokens: np.ndarray) -> list[bytes]:
    """A key for each page: the tokens up to its end. The last page may be partly filled."""
    keys, key = [], b""
    for start in range(0, len(tokens), TILE):
        key = blake2b(key + tokens[start : start + TILE].tobytes(), digest_size=16).digest()
        keys.append(key)
    return keys


def _grown(old_PHLD: Tensor | None, num_pages: int, like_NHD: Tensor) -> Tensor:
    _, heads, size = like_NHD.shape
    new_PHLD = like_NHD.new_zeros(num_pages, heads, TILE, size)
    if old_PHLD is not None:
        new_PHLD[: len(old_PHLD)] = old_PHLD
    return new_PHLD


def _written(pages_PHLD: Tensor | None) -> Tensor:
    assert pages_PHLD is not None, "the layer has not been written"
    return pages_PHLD


def _rows(pages: Tensor | None, page_BT: Tensor) -> Tensor:
    pages_PHLD = _written(pages)
    batch, count = page_BT.shape
    _, heads, tile, size = pages_PHLD.shape
    found = torch.index_select(pages_PHLD, 0, page_BT.flatten())
    found = found.view(batch, count, heads, tile, size).transpose(1, 2)
    return found.reshape(batch, heads, count * tile, size)
