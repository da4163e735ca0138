"""Workflows that learn from a teacher's probabilities."""
