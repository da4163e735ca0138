"""Agents: models that use tools, in turns."""
