"""FrozenLake of `gymnasium`, played in words."""
