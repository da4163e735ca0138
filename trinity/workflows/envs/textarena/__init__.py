"""Games of `textarena`."""
