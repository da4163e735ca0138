"""The `model:` section: the model that is trained, its lengths and its sampling defaults."""

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from trinity.common.config.base import LEAVES_DIGITS, ConfigModel


class LoRAConfig(ConfigModel):
    """One low-rank adapter. With it only the adapter is trained, saved and synced."""

    name: str | None = None
    """Name of the adapter. Unset: `lora`."""

    path: str | None = None
    """Folder of an adapter to start from. Unset: a fresh one that changes nothing yet."""

    base_model_name: str | None = None
    """Model that the adapter belongs to. Unset: `model.model_path`."""

    lora_rank: int = Field(32, ge=1)
    """Rank of the update matrices."""

    lora_alpha: float = Field(32, gt=0)
    """Scale of the update; it is multiplied by `lora_alpha / lora_rank`."""

    lora_dtype: str = "auto"
    """Number format of the adapter in the engine; `auto` is that of the model."""

    target_modules: str | list[str] = "all-linear"
    """Modules that get an adapter: names, or `all-linear`."""

    exclude_modules: str | list[str] | None = None
    """Modules that get none although `target_modules` names them."""

    is_dummy: bool = False
    """The adapter at `path` is only a placeholder of the right shape; start from a fresh one."""


class TinkerConfig(ConfigModel):
    """The Tinker service as trainer and engine."""

    enable: bool = False
    """Train and sample on the Tinker service; `model_path` is then the local tokenizer."""

    rank: int = Field(32, ge=1)
    """Rank of the adapter that the service trains."""

    seed: int | None = None
    """Seed of the adapter's first values. Unset: the service picks one."""

    train_mlp: bool = True
    """Train the MLP layers."""

    train_attn: bool = True
    """Train the attention layers."""

    train_unembed: bool = True
    """Train the output layer."""

    base_model: str | None = None
    """What the service calls the model. Unset: `model_path`, for a hub name."""

    base_url: str | None = None
    """Address of the service. Unset: that of `TINKER_BASE_URL`, else the client's own default."""

    timeout: float = Field(600, gt=0)
    """Seconds that the service may leave a request unanswered, what the client tries again
    included, before the run stops."""

    @model_validator(mode="after")
    def _trains_something(self) -> Self:
        if not (self.train_mlp or self.train_attn or self.train_unembed):
            raise ValueError(
                "train_mlp, train_attn and train_unembed are all false. Set one of them to `true`."
            )
        return self


class ExternalModelConfig(ConfigModel):
    """A model behind an OpenAI-compatible service, for `mode: bench`."""

    enable: bool = False
    """Evaluate the service's model instead of a local one."""

    base_url_env: str = "OPENAI_BASE_URL"
    """Environment variable that holds the address of the service."""

    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the key of the service."""

    model_name: str | None = None
    """Name of the model at the service."""

    max_retries: int = Field(6, ge=0)
    """Tries after the first where the service is busy, down or out of reach; waits double."""

    max_requests_per_minute: float | None = Field(None, gt=0)
    """Requests that go out in a minute, evenly spread. Unset: as many as come."""

    max_concurrent_requests: int = Field(64, ge=1)
    """Requests under way at a time."""


class ModelConfig(ConfigModel):
    """The model that is trained, its lengths and its sampling defaults."""

    model_path: str = ""
    """Folder or hub name of the model that is trained."""

    trust_remote_code: bool = False
    """Allow Python code that comes with the model to run."""

    critic_model_path: str = ""
    """Folder or hub name the critic starts from. Empty: `model_path`."""

    custom_chat_template: str | None = None
    """Chat template as text. Unset: the tokenizer's own."""

    chat_template_path: str | None = None
    """File with a chat template; wins over `custom_chat_template`."""

    temperature: Annotated[float, LEAVES_DIGITS] = Field(1.0, ge=0)
    """Sampling temperature; 0 is greedy."""

    top_p: float = Field(1.0, gt=0, le=1)
    """Probability mass that is sampled from; 1 is all of it."""

    top_k: int = Field(-1, ge=-1)
    """Number of tokens that are sampled from; -1 is all of them."""

    logprobs: int = Field(0, ge=0)
    """Alternatives reported with each sampled token, of earlier releases. No engine reports any:
    above 0 it has no effect. The token's own logprob is always there."""

    max_model_len: int | None = Field(None, ge=1)
    """Longest sequence in tokens. Unset: `max_prompt_tokens + max_response_tokens`."""

    max_prompt_tokens: int | None = Field(None, ge=1)
    """Longest prompt in tokens. Unset: what `max_model_len` leaves."""

    max_response_tokens: int | None = Field(None, ge=1)
    """Longest response in tokens. Unset: what `max_model_len` leaves."""

    min_response_tokens: int = Field(0, ge=0)
    """Tokens generated before the end of the text may be sampled."""

    enable_prompt_truncation: bool = True
    """Cut prompts to `max_prompt_tokens`; a cut one is left out of the loss. With false prompts
    stay whole, and one that `max_model_len` has no room for is a failed run."""

    repetition_penalty: float = Field(1.0, gt=0)
    """Divides the logits of tokens seen before; 1 changes nothing."""

    enable_thinking: bool | None = None
    """Passed to the chat template of models that can think. Unset: the template decides."""

    lora_configs: list[LoRAConfig] | None = None
    """Train an adapter instead of the whole model; at most one."""

    fully_sharded_loras: bool = False
    """Let vLLM shard adapters over its tensor parallel GPUs."""

    max_cpu_loras: int | None = Field(None, ge=1)
    """Adapters that vLLM keeps in CPU memory. Unset: vLLM's default."""

    rope_scaling: dict[str, Any] | None = None
    """RoPE scaling as in a Hugging Face `config.json`. Unset: the model's own."""

    rope_theta: float | None = Field(None, gt=0)
    """RoPE base. Unset: the model's own."""

    tinker: TinkerConfig = TinkerConfig()
    """The Tinker service as trainer and engine."""

    external_model: ExternalModelConfig = ExternalModelConfig()
    """A model behind an OpenAI-compatible service, for `mode: bench`."""
