"""What of a bucket changed since the last version, bit for bit, and how to put it in place.

In bfloat16 a step of a small learning rate leaves most weights as they are. A message holds the
places of the words that differ and their new bits; what it says nothing of keeps its old ones, so
that the result has every bit of the new weights. It is sent where it is smaller than the bucket.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from trinity.synchronizer.buckets import Bucket

Named = Sequence[tuple[str, Tensor]]

_WORDS = {2: torch.int16, 4: torch.int32}
_PLACE_BYTES = 4


def word_of(bucket: Bucket) -> torch.dtype | None:
    """Words of the size of its elements; None if they are of several sizes, or unusual ones."""
    sizes = {slot.dtype.itemsize for slot in bucket.slots}
    return _WORDS.get(sizes.pop()) if len(sizes) == 1 else None


def message_bytes(bucket: Bucket, count: int) -> int:
    """Size of a message of ``count`` changes."""
    word = word_of(bucket)
    assert word is not None, "there are no changes of such a bucket"
    return count * (_PLACE_BYTES + word.itemsize)


def changes(bucket: Bucket, new: Tensor, old: Tensor) -> tuple[int, Tensor | None]:
    """Number of changed words and the message; -1 and None where the bucket itself is smaller.

    Args:
        new, old: The bucket's bytes now and before.
    """
    word = word_of(bucket)
    if word is None:
        return -1, None
    words = new.view(word)
    places = (words != old.view(word)).nonzero().flatten()
    count = len(places)
    if message_bytes(bucket, count) >= bucket.num_bytes:
        return -1, None
    parts = [places.to(torch.int32).view(torch.uint8), words[places].view(torch.uint8)]
    return count, torch.cat(parts)


class Patcher:
    """Opens messages, in memory of the size of one bucket and a half."""

    def __init__(self) -> None:
        self._values: Tensor | None = None
        self._changed: Tensor | None = None

    def open(self, bucket: Bucket, count: int, message: Tensor) -> tuple[Named, Named]:
        """Each weight's new elements and, as booleans, which of them count; by name."""
        word = word_of(bucket)
        assert word is not None, "who sent it had words"
        end = count * _PLACE_BYTES
        places = message[:end].view(torch.int32).long()
        values, changed = self._memory(bucket, word, message.device)
        changed.zero_()
        changed[places] = True
        values.view(word)[places] = message[end:].view(word)
        starts = [slot.start // word.itemsize for slot in bucket.slots]
        marks = [
            (slot.name, changed[start : start + slot.num_bytes // word.itemsize].view(slot.shape))
            for slot, start in zip(bucket.slots, starts, strict=True)
        ]
        return [(slot.name, slot.of(values)) for slot in bucket.slots], marks

    def _memory(
        self, bucket: Bucket, word: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        size = bucket.num_bytes
        if self._values is None or self._changed is None or len(self._values) < size:
            self._values = torch.empty(size, dtype=torch.uint8, device=device)
            self._changed = torch.empty(size // 2, dtype=torch.bool, device=device)
        return self._values[:size], self._changed[: size // word.itemsize]
