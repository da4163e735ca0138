"""How new weights reach the explorer: the version board and the channels."""
