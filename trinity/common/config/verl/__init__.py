"""veRL in our files: what becomes of its keys, and how a launch of veRL is taken over."""
