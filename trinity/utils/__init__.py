"""Helpers that know nothing of trinity: registry, actors, logs, metrics, monitors."""
