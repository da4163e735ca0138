"""What generates tokens, seen from outside: `InferenceEngine` and the records it exchanges."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from trinity.common.constants import LEAST_TEMPERATURE

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length", "abort"]

_MOST = 1e6  # times which float32 still holds every logit
_MOST_TOKENS = 2**31 - 1  # which every engine can count

_BOUNDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "n": (lambda n: n >= 1, "at least 1"),
    "temperature": (
        lambda heat: heat == 0 or LEAST_TEMPERATURE <= heat <= _MOST,
        f"0 for the most likely token, or from {LEAST_TEMPERATURE} to {_MOST:g}",
    ),
    "top_p": (lambda p: 0 < p <= 1, "above 0 and at most 1"),
    "top_k": (
        lambda k: -1 <= k <= _MOST_TOKENS,
        f"from 1 to {_MOST_TOKENS}, or -1 or 0 for all tokens",
    ),
    "min_p": (lambda p: 0 <= p <= 1, "from 0 to 1"),
    "max_tokens": (lambda most: most is None or most >= 1, "at least 1"),
    "min_tokens": (lambda least: 0 <= least <= _MOST_TOKENS, f"from 0 to {_MOST_TOKENS}"),
    "repetition_penalty": (
        lambda penalty: 1 / _MOST <= penalty <= _MOST,
        f"from {1 / _MOST:g} to {_MOST:g}",
    ),
}
"""Field of `SamplingParams` -> whether a value is one, and what it must be. NaN is none."""


def require_in_bounds(name: str, value: object) -> None:
    """`ValueError` if no request can have this value, which would reach what else is sampled."""
    is_kept, words = _BOUNDS[name]
    if not is_kept(value):
        raise ValueError(f"A request with {name} = {value} is not possible: it must be {words}.")


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled. The engine's whole knowledge of a request but its tokens.

    Args:
        n: Samples of the same prompt; the prompt is computed once for all of them.
        temperature: Divides the logits; 0 takes the most likely token.
        top_p: Keep the smallest set of tokens with at least this probability; 1 keeps all.
        top_k: Keep the k most likely tokens; -1 and 0 keep all.
        min_p: Keep tokens at least this fraction as likely as the most likely one; 0 keeps all.
        max_tokens: New tokens at most; None: up to the engine's ``max_model_len``.
        min_tokens: No end of sequence and no stop before this many new tokens. Like top-p this
            is a cut that logprobs do not know of.
        stop: Texts that end a sample; the stop text stays out of the response text, its tokens
            stay in (what was sampled is what is trained on).
        stop_token_ids: Token ids that end a sample, besides the model's own.
        seed: Sample i draws from a stream of (seed, i) alone, whatever else is in the batch.
            None: the engine picks one from its own seed.
        repetition_penalty: 1 is off; otherwise logprobs are those after the penalty.
        ignore_eos: Go on past the end-of-sequence token.
        request_id: A name by which `InferenceEngine.partial` finds the request while it runs.

    Raises:
        ValueError: A value that no request can have, which would reach what else is sampled.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    request_id: str | None = None

    def __post_init__(self) -> None:
        for name in _BOUNDS:
            require_in_bounds(name, getattr(self, name))


@dataclass
class Completion:
    """One sample: the new tokens only.

    ``logprobs`` are those of the distribution that was sampled from, temperature applied and
    before any top-p or top-k cut. ``versions`` tells the weight version behind each token.
    ``routes`` [prompt + new tokens, layers, k] are the experts that they went to, of an engine that
    tells them (`trinity.common.models.routes`).
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    versions: list[int] = field(default_factory=list)
    routes: "Tensor | None" = field(default=None, compare=False)


@dataclass(frozen=True)
class TextReply:
    """One reply of a service that gives texts and no tokens.

    ``message`` is the reply in the OpenAI form; ``text`` its content.
    """

    text: str
    message: Mapping[str, Any]
    finish_reason: FinishReason


@dataclass(frozen=True)
class WeightTicket:
    """A set of weights that is out: enough for an engine to fetch it and to prove it did.

    Args:
        version: Trainer step of the weights.
        method: What carries them: "memory", "checkpoint", "nccl", "ipc", or "tinker", where they
            stay at a service.
        digest: `trinity.utils.digest.weights_digest` of what was sent; "" if the receiver
            can't compute it in its own layout.
        payload: The channel's own: a path, references into the object store, a rendezvous.
        adapter: Name of the adapter these weights are for; None for the whole model.
    """

    version: int
    method: str
    digest: str
    payload: object
    adapter: str | None = None


@dataclass(frozen=True)
class NamedAdapter:
    """A low-rank adapter that requests may name. It is not trained.

    Args:
        name: What requests call it.
        path: Folder with PEFT's two files.
        base_model_name: Model that it was made for, as the API shows it; "": the one below it.
    """

    name: str
    path: str
    base_model_name: str = ""


class InferenceEngine(Protocol):
    """Samples tokens from a model. Takes token ids, gives token ids; knows no text templates.

    Lifecycle: ``prepare`` -> any number of concurrent calls -> ``close``.
    """

    async def prepare(self) -> None:
        """Load the model and be ready to sample."""
        ...

    async def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, adapter: str | None = None
    ) -> list[Completion]:
        """``params.n`` samples of one prompt, in order of their index.

        Args:
            adapter: Name of one that the engine has; None: the weights that updates bring.
        """
        ...

    async def partial(self, request_id: str) -> list[list[int]]:
        """New tokens so far of each sample of a running request; [] if none are known."""
        ...

    async def logprobs(
        self, token_ids: Sequence[int], temperature: float = 1.0, adapter: str | None = None
    ) -> list[float]:
        """Log-probability of each token given those before it: ``len(token_ids) - 1`` values.

        Args:
            temperature: One that sampling may have; at 0 values are those at 1.
        """
        ...

    async def load_weights(self, ticket: WeightTicket) -> str:
        """Replace the weights by those of ``ticket``; the digest of what the engine now runs."""
        ...

    async def pause(self) -> None:
        """Finish no further step until `resume`; requests wait."""
        ...

    async def resume(self) -> None: ...

    async def version(self) -> int:
        """Version of the weights that sample now."""
        ...

    async def health(self) -> dict[str, float]:
        """Figures for the log: running and waiting requests, tokens so far, peak memory in MB."""
        ...

    async def close(self) -> None: ...


class SleepingEngine(InferenceEngine, Protocol):
    """An engine that can give the memory of its GPUs to others in between."""

    async def sleep(self) -> None:
        """Free the memory; nothing may be running. New weights, or `wake`, end it."""
        ...

    async def wake(self) -> None:
        """Sample again, with the weights that were there before."""
        ...


class AdapterEngine(InferenceEngine, Protocol):
    """An engine that has adapters beside the weights that updates bring."""

    async def adapters(self) -> list[NamedAdapter]:
        """Those that requests may name now, in the order in which they came."""
        ...

    async def load_adapter(self, adapter: NamedAdapter) -> None:
        """Have one more.

        Raises:
            ValueError: The name is taken, or the files are missing or don't fit the model.
        """
        ...

    async def unload_adapter(self, name: str) -> None:
        """Have it no longer: what runs on it ends first, or fails.

        Raises:
            LookupError: There is none of that name.
        """
        ...


class VisionEngine(Protocol):
    """An engine whose prompts may have images; it has the face of `InferenceEngine` besides."""

    async def sample_with_images(
        self, prompt_ids: Sequence[int], images: "Tensor", params: SamplingParams
    ) -> list[Completion]:
        """``params.n`` samples of a prompt.

        Args:
            images: [images, channels, height, width], in the order of their tokens in the prompt.
        """
        ...


class TextEngine(Protocol):
    """An engine that gives texts and no tokens; it has the face of `InferenceEngine` besides."""

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        params: SamplingParams,
    ) -> list[TextReply]:
        """``params.n`` replies to a conversation."""
        ...
