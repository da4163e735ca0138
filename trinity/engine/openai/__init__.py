"""Models behind an OpenAI-compatible service of somebody else."""

from trinity.engine.openai.engine import OpenAIEngine
from trinity.engine.openai.settings import OpenAIEngineSettings

__all__ = ["OpenAIEngine", "OpenAIEngineSettings"]
