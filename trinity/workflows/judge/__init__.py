"""Workflows whose reward is the judgement of a model."""
