"""Models behind an OpenAI-compatible service of somebody else."""
