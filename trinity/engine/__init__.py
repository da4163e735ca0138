"""Who generates tokens: one folder a third party, found by ``engine_type`` in `ENGINES`."""

from trinity.utils.registry import Registry

ENGINES: Registry[type] = Registry(
    "engine",
    {
        "torch": "trinity.engine.torch.engine.TorchEngine",
        "vllm": "trinity.engine.vllm.engine.VLLMEngine",
        "openai": "trinity.engine.openai.engine.OpenAIEngine",
        "external": "trinity.engine.openai.engine.OpenAIEngine",
    },
)
"""``engine_type`` of the config -> class of the engine."""


def engine_class(engine_type: str) -> type:
    """The engine behind ``engine_type``; every spelling that begins with ``vllm`` is vLLM."""
    return ENGINES.get("vllm" if engine_type.startswith("vllm") else engine_type)


__all__ = ["ENGINES", "engine_class"]
