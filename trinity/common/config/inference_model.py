"""One model that generates: `explorer.rollout_model` and `explorer.auxiliary_models[]`."""

from typing import Annotated, Any, Literal

from pydantic import Field

from trinity.common.config.base import LEAVES_DIGITS, ConfigModel
from trinity.common.config.model import ExternalModelConfig
from trinity.common.constants import EngineType


class LoRAModuleConfig(ConfigModel):
    """One adapter that clients of the API may name as the model. It is not trained."""

    name: str = ""
    """What requests call it."""

    path: str = ""
    """Folder of the adapter, with the two files that PEFT writes."""

    base_model_name: str | None = None
    """Model it was made for, as `/v1/models` shows it. Unset: the name of this one."""


class InferenceModelConfig(ConfigModel):
    """One model that generates, and the engines it runs on."""

    model_path: str | None = None
    """Folder or hub name of the model. Unset for the rollout model: `model.model_path`."""

    name: str | None = None
    """Name under which workflows find the model. Unset: its `model_path`."""

    trust_remote_code: bool = False
    """Allow Python code that comes with the model to run in the engine."""

    engine_type: EngineType = EngineType.VLLM
    """What generates tokens: `torch` (built in), `vllm`, `openai` (an outside service) or
    `tinker`."""

    engine_num: int = Field(1, ge=1)
    """Engines of this model that run side by side."""

    tensor_parallel_size: int = Field(1, ge=1)
    """GPUs that share each matrix of one engine."""

    data_parallel_size: int = Field(1, ge=1)
    """Copies of the model inside one engine."""

    pipeline_parallel_size: int = Field(1, ge=1)
    """GPUs that share the layers of one engine."""

    enable_expert_parallel: bool = False
    """Spread whole experts of a mixture-of-experts model over GPUs."""

    nnodes: int = Field(1, ge=1)
    """Machines one engine spans. Here it is one: any other value is refused."""

    extra_engine_args: dict[str, Any] = {}
    """Arguments handed to the engine as they are, over all others."""

    use_v1: bool = True
    """vLLM's V1 engine; only true is accepted, V0 no longer exists."""

    enforce_eager: bool = False
    """Run vLLM without CUDA graphs: starts faster, generates slower."""

    enable_prefix_caching: bool = True
    """Reuse the cache of prompts that begin alike."""

    update_mode: Literal["pause", "keep", "abort"] = "pause"
    """What new weights do to running requests: with `pause` they finish on the old ones, with
    `keep` they go on with the new ones (each token is tagged with its version), with `abort` they
    start again."""

    enable_chunked_prefill: bool = True
    """Let vLLM cut long prompts into pieces that share a step with generation."""

    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    """Share of each GPU's memory that vLLM takes."""

    dtype: Literal["bfloat16", "float16", "float32", "auto"] = "bfloat16"
    """Number format of weights and computation."""

    seed: int = 42
    """Seed of sampling."""

    temperature: Annotated[float | None, LEAVES_DIGITS] = Field(None, ge=0)
    """Sampling temperature; 0 is greedy. Unset: `model.temperature`."""

    top_p: float | None = Field(None, gt=0, le=1)
    """Probability mass that is sampled from. Unset: `model.top_p`."""

    top_k: int | None = Field(None, ge=-1)
    """Number of tokens that are sampled from. Unset: `model.top_k`."""

    logprobs: int | None = Field(None, ge=0)
    """As `model.logprobs`: above 0 it has no effect."""

    max_model_len: int | None = Field(None, ge=1)
    """Longest sequence in tokens. Unset: `model.max_model_len`."""

    max_prompt_tokens: int | None = Field(None, ge=1)
    """Longest prompt in tokens. Unset: `model.max_prompt_tokens`."""

    max_response_tokens: int | None = Field(None, ge=1)
    """Longest response in tokens. Unset: `model.max_response_tokens`."""

    min_response_tokens: int | None = Field(None, ge=0)
    """Tokens generated before the end of the text may be sampled. Unset: as in `model`."""

    enable_prompt_truncation: bool | None = None
    """Cut prompts to `max_prompt_tokens`. Unset: `model.enable_prompt_truncation`."""

    repetition_penalty: float | None = Field(None, gt=0)
    """Divides the logits of tokens seen before. Unset: `model.repetition_penalty`."""

    ignore_eos: bool = False
    """Generate to the length limit, past the end of the text; for measurements."""

    enable_multimodal: bool = False
    """Accept images in prompts: models with a fixed number of tokens an image (LLaVA and alike)."""

    chat_template: str | None = None
    """Chat template as text. Unset: the one of `model`."""

    enable_thinking: bool | None = None
    """Passed to the chat template. Unset: `model.enable_thinking`."""

    enable_history: bool = False
    """Record every call as an experience, to be fetched with `extract_experience_from_history`."""

    enable_openai_api: bool = False
    """Serve an OpenAI-compatible API next to the engine; always on for auxiliary models."""

    enable_log_requests: bool = False
    """Write every request to the engine's log."""

    base_port: int | None = Field(None, ge=1, le=65535)
    """TCP port of the first engine's API; the next ones count up. Unset: free ports."""

    api_key: str = "EMPTY"
    """Key that the engine's API asks for; `EMPTY` makes a random one for the run."""

    enable_auto_tool_choice: bool = False
    """Let the API turn generated tool calls into `tool_calls`."""

    tool_call_parser: str | None = None
    """How generated tool calls look, e.g. `hermes`; needed by `enable_auto_tool_choice`."""

    reasoning_parser: str | None = None
    """How generated reasoning looks, e.g. `qwen3`. Unset: it stays in the text."""

    external_model_config: ExternalModelConfig = ExternalModelConfig()
    """The service behind `engine_type: openai`."""

    enable_return_routed_experts: bool = False
    """Keep the experts that each token was routed to, `routed_experts` of an experience. Set by
    `algorithm.enable_router_replay`."""

    weight_sync_buffer_size: int = Field(1024, ge=1)
    """MiB sent in one piece of a weight sync, of earlier releases. Here the size is fixed: any
    other value is refused."""

    enable_lora: bool = False
    """Serve adapters on this auxiliary model; the rollout model follows `model.lora_configs`."""

    enable_runtime_lora_updating: bool = False
    """Let clients of the API load and unload adapters while the run goes on."""

    lora_modules: list[LoRAModuleConfig] | None = None
    """Adapters that the API offers from the start, beside the model itself."""

    lora_kwargs: dict[str, Any] = {}
    """vLLM's settings for adapters, by its names (`max_loras`, `max_lora_rank` ...)."""

    rope_scaling: dict[str, Any] | None = None
    """RoPE scaling. Unset: `model.rope_scaling`."""

    rope_theta: float | None = Field(None, gt=0)
    """RoPE base. Unset: `model.rope_theta`."""
