"""Environments of the `verifiers` package as tasks."""
