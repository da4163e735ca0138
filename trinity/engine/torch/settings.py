"""What a `TorchEngine` is told: plain values, no config section."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from trinity.common.models.adapters import AdapterSettings
from trinity.common.models.protocol import NamedAdapter

UpdateMode = Literal["pause", "keep", "abort"]


@dataclass(frozen=True)
class TorchEngineSettings:
    """Settings of one engine.

    Args:
        model_path: Model folder or hub name. A folder without weights is initialised at random.
        dtype: "bfloat16", "float32", "float16" or "auto" (the dtype the model's config names).
        seed: Seed of requests that bring none.
        init_seed: Seed of the random weights of a folder without weights.
        max_model_len: Prompt and response tokens of one sequence; None: what the model allows.
        max_batch_tokens: Prompt tokens computed in one step beside the running samples. Longer
            prompts are computed in pieces, so that they don't stall the others. At least 64.
        max_running: Samples that decode at the same time.
        kv_cache_bytes: Memory for keys and values; None: 40 % of what is free at the start.
        num_threads: CPU threads of the forward pass; None: as PyTorch decides.
        update_mode: What happens to running requests at a weight update. "pause": they finish on
            the old weights while new ones wait; "keep": they go on with the new weights (each
            token is tagged with its version); "abort": they start again with the new weights.
        enable_prefix_caching: Keep keys and values of prompts, for prompts that start alike.
        device: Where the model runs.
        trust_remote_code: Run model code that comes with the model folder.
        version: Version of the weights at ``model_path``.
        config_overrides: Fields of the model's config to replace (``rope_parameters`` ...).
        adapter: On the model from the start; weight updates are then its own. None: none.
        named_adapters: Adapters that requests may name, beside it.
        loads_adapters: Whether more may come while it runs.
        returns_routes: Tell the experts that each token went to, of a mixture-of-experts model.
    """

    model_path: str
    dtype: str = "bfloat16"
    seed: int = 42
    init_seed: int = 0
    max_model_len: int | None = None
    max_batch_tokens: int = 512
    max_running: int = 1024
    kv_cache_bytes: int | None = None
    num_threads: int | None = None
    update_mode: UpdateMode = "pause"
    enable_prefix_caching: bool = True
    device: str = "cpu"
    trust_remote_code: bool = False
    version: int = 0
    config_overrides: Mapping[str, object] = field(default_factory=dict)
    adapter: AdapterSettings | None = None
    named_adapters: tuple[NamedAdapter, ...] = ()
    loads_adapters: bool = False
    returns_routes: bool = False

    @property
    def has_named_adapters(self) -> bool:
        """Whether requests may ever name an adapter."""
        return bool(self.named_adapters) or self.loads_adapters
