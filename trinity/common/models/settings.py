"""What a `ModelWrapper` is told of its model: plain values that travel to runner processes."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class ModelSettings:
    """Names, limits and sampling defaults of one model.

    Args:
        model_path: Folder or hub name; the tokenizer is loaded from it.
        name: What an OpenAI client calls the model; "" stands for ``model_path``.
        temperature, top_p, top_k, repetition_penalty, ignore_eos: Sampling defaults, see
            `SamplingParams`.
        max_model_len: Tokens of prompt and response together; None: the engine's own limit.
        max_prompt_tokens: Longest prompt; None: what ``max_model_len`` leaves.
        max_response_tokens: New tokens of one reply; None: what ``max_model_len`` leaves.
        min_response_tokens: A reply does not end before that many tokens.
        enable_prompt_truncation: A prompt that is too long gives masked experiences. Without, it
            is sampled whole where ``max_model_len`` has room, and is a `ValueError` where not.
        chat_template: Jinja text in place of the tokenizer's own template.
        enable_thinking: Handed to the template, if not None.
        enable_history: Keep every reply for `ModelWrapper.extract_experience_from_history`.
        enable_openai_api: Whether workflows may ask for an OpenAI client.
        enable_auto_tool_choice: Whether replies to requests with tools are parsed for calls.
        tool_call_parser: Which form of tool call is parsed ("hermes" ...).
        reasoning_parser: Which form of reasoning is split off the content ("qwen3" ...).
        gives_tokens: False for a model behind an outside service: its experiences hold texts,
            and one masked token each.
        adapter: Name of the low-rank adapter that every request goes through; None: there is none.
        has_named_adapters: Whether requests of the API may name an adapter of the engines.
        loads_adapters: Whether the API lets clients load and unload adapters.
        enable_multimodal: Messages may have images (`trinity.common.models.vision`).
        trust_remote_code: Run tokenizer code that comes with the model folder.
    """

    model_path: str
    name: str = ""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    max_model_len: int | None = None
    max_prompt_tokens: int | None = None
    max_response_tokens: int | None = None
    min_response_tokens: int = 0
    enable_prompt_truncation: bool = True
    chat_template: str | None = None
    enable_thinking: bool | None = None
    enable_history: bool = False
    enable_openai_api: bool = True
    enable_auto_tool_choice: bool = False
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    gives_tokens: bool = True
    enable_multimodal: bool = False
    adapter: str | None = None
    has_named_adapters: bool = False
    loads_adapters: bool = False
    trust_remote_code: bool = False

    @property
    def longest_prompt(self) -> int | None:
        """Tokens of the longest prompt that leaves room for a reply; None: not known here."""
        limits = [self.max_prompt_tokens] if self.enable_prompt_truncation else []
        if self.max_model_len is not None:
            limits.append(self.max_model_len - 1)
        return min((limit for limit in limits if limit is not None), default=None)

    def for_api(self) -> "ModelSettings":
        """The limits for what comes through an API: ``max_model_len`` alone."""
        return replace(
            self,
            max_prompt_tokens=None,
            max_response_tokens=None,
            min_response_tokens=0,
            enable_prompt_truncation=False,
        )
