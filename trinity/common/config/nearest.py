"""The known word that a wrong one was probably meant to be."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known word most like ``word``; one of the same letters comes first."""
    close = get_close_matches(word.lower(), sorted(known), n=3, cutoff=cutoff)
    swapped = [name for name in close if sorted(name) == sorted(word.lower())]
    return next(iter(swapped or close), None)
