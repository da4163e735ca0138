"""Workflows of tasks whose answer can be checked as mathematics."""
