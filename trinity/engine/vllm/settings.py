"""What a `VLLMEngine` is told: plain values, no config section."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from trinity.common.models.adapters import AdapterSettings
from trinity.common.models.protocol import NamedAdapter

UpdateMode = Literal["pause", "keep", "abort"]


@dataclass(frozen=True)
class VLLMEngineSettings:
    """Settings of one engine.

    Args:
        model_path: Model folder or hub name. A folder without weights is initialised at random.
        dtype: "bfloat16", "float16", "float32" or "auto".
        seed: Seed of requests that bring none.
        init_seed: Seed of the random weights of a folder without weights.
        max_model_len: Prompt and response tokens of one sequence; None: what the model allows.
        tensor_parallel_size, pipeline_parallel_size, data_parallel_size: GPUs are their product.
        enable_expert_parallel: Spread the experts of a layer over the GPUs.
        gpu_memory_utilization: Share of each GPU's memory. On a CPU see ``kv_cache_bytes``.
        kv_cache_bytes: Memory for keys and values; None: what vLLM makes of
            ``gpu_memory_utilization``, on a CPU 1 GiB.
        enforce_eager: No compilation and no CUDA graphs: starts faster, samples slower.
        enable_prefix_caching, enable_chunked_prefill, enable_log_requests: As vLLM has them.
        keeps_seeds: Sample with the seeds of requests. Off, sampling is a little faster on GPUs
            and a run can't be repeated.
        update_mode: What happens to running requests at a weight update. "pause": they finish on
            the old weights; "keep": they go on with the new ones (each token is tagged with its
            version); "abort": they start again with the new ones.
        sleeps: Be able to give the GPU's memory to the trainer in between.
        trust_remote_code: Run model code that comes with the model folder.
        version: Version of the weights at ``model_path``.
        adapter: Every request that names no other goes through it; weight updates are then its
            own. None: none.
        named_adapters: Adapters that requests may name, beside it.
        loads_adapters: Whether more may come while it runs.
        max_cpu_loras, fully_sharded_loras: As vLLM has them.
        lora_kwargs: More of vLLM's settings for adapters; they win over these.
        config_overrides: Fields of the model's config to replace (``rope_theta`` ...).
        returns_routes: Tell the experts that each token went to, of a mixture-of-experts model. On
            a CPU vLLM can't.
        extra_engine_args: More of vLLM's own engine arguments; they win.
        name: By which the trainer knows the engine again after a restart; None: it does not.
    """

    model_path: str
    dtype: str = "bfloat16"
    seed: int = 42
    init_seed: int = 0
    max_model_len: int | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    gpu_memory_utilization: float = 0.9
    kv_cache_bytes: int | None = None
    enforce_eager: bool = False
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    enable_log_requests: bool = False
    keeps_seeds: bool = True
    update_mode: UpdateMode = "pause"
    sleeps: bool = False
    trust_remote_code: bool = False
    version: int = 0
    adapter: AdapterSettings | None = None
    named_adapters: tuple[NamedAdapter, ...] = ()
    loads_adapters: bool = False
    max_cpu_loras: int | None = None
    fully_sharded_loras: bool = False
    lora_kwargs: Mapping[str, Any] = field(default_factory=dict)
    config_overrides: Mapping[str, Any] = field(default_factory=dict)
    returns_routes: bool = False
    extra_engine_args: Mapping[str, Any] = field(default_factory=dict)
    name: str | None = None

    @property
    def has_named_adapters(self) -> bool:
        """Whether requests may ever name an adapter."""
        return bool(self.named_adapters) or self.loads_adapters
