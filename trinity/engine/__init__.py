"""Who generates tokens: one folder a third party, found by ``engine_type`` in `ENGINES`."""

from typing import TYPE_CHECKING

from trinity.utils.registry import Registry

if TYPE_CHECKING:
    from trinity.common.models.protocol import InferenceEngine

ENGINES: Registry[type] = Registry(
    "engine",
    {
        "torch": "trinity.engine.torch.engine.TorchEngine",
        "vllm": "trinity.engine.vllm.engine.VLLMEngine",
        "openai": "trinity.engine.openai.engine.OpenAIEngine",
        "tinker": "trinity.engine.tinker.engine.TinkerEngine",
        "external": "trinity.engine.openai.engine.OpenAIEngine",
    },
)
"""``engine_type`` of the config -> class of the engine."""


def engine_class(engine_type: str) -> type:
    """The engine behind ``engine_type``; every spelling that begins with ``vllm`` is vLLM."""
    return ENGINES.get("vllm" if engine_type.startswith("vllm") else engine_type)


def make_engine(engine_type: str, settings: object) -> "InferenceEngine":
    """An engine in this process: what its class imports stays out of others'."""
    engine: InferenceEngine = engine_class(engine_type)(settings)
    return engine


__all__ = ["ENGINES", "engine_class", "make_engine"]
