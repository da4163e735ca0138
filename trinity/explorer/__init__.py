"""The rollout loop: which runs are under way, where, and what came of them."""
