"""The composition root: from a configuration to running parts, and to their end."""
