"""The embedded engine: continuous batching over a Hugging Face causal model, in plain PyTorch.

Importing this loads no engine: the trainer shares its attention and does without Ray.
"""

from typing import TYPE_CHECKING

from trinity.utils.lazy import lazy_names

if TYPE_CHECKING:
    from trinity.engine.torch.engine import TorchEngine
    from trinity.engine.torch.settings import TorchEngineSettings

__all__ = ["TorchEngine", "TorchEngineSettings"]

__getattr__ = lazy_names(__name__, {"TorchEngine": "engine", "TorchEngineSettings": "settings"})
