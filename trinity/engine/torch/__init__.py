"""The embedded engine: continuous batching over a Hugging Face causal model, in plain PyTorch."""

from trinity.engine.torch.engine import TorchEngine
from trinity.engine.torch.settings import TorchEngineSettings

__all__ = ["TorchEngine", "TorchEngineSettings"]
