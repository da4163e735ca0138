"""Environments to act in: one folder each, with the package it needs as an extra."""
