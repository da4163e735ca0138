"""`TinkerEngine`: samples of a model at the Tinker service, with the trainer's weights there."""

import asyncio
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trinity.common.models.loading import end_of_sequence_ids
from trinity.common.models.protocol import (
    Completion,
    FinishReason,
    SamplingParams,
    WeightTicket,
)
from trinity.engine.tinker.saved import METHOD
from trinity.engine.tinker.service import TinkerService, TinkerServiceError, TinkerServiceLost, sdk
from trinity.engine.tinker.settings import TinkerEngineSettings

if TYPE_CHECKING:
    from tinker import SampledSequence, SampleResponse, SamplingClient
    from tinker import SamplingParams as ServiceParams


class TinkerEngine:
    """An `InferenceEngine` whose model is at the service.

    A sampler there has fixed weights, so each version has a sampler of its own: samples under way
    end on the weights they began with. The service gives samples whole, so `partial` knows none.
    """

    def __init__(self, settings: TinkerEngineSettings) -> None:
        self._settings = settings
        self._service = TinkerService(settings.service)
        self._sampler: SamplingClient | None = None
        self._version = 0
        self._max_model_len: int | None = None
        self._eos_ids: tuple[int, ...] = ()
        self._seeds = random.Random(settings.seed)
        self._may_start = asyncio.Event()
        self._broken: TinkerServiceError | None = None
        self._lost: TinkerServiceLost | None = None
        self._is_closed = False
        self._running = 0
        self._num_tokens = 0

    async def prepare(self) -> None:
        await self._service.connect()
        self._eos_ids = await asyncio.to_thread(end_of_sequence_ids, self._settings.tokenizer_path)
        asked, most = self._settings.max_model_len, self._service.max_model_len
        if asked is not None and most is not None and asked > most:
            raise TinkerServiceError(
                f"model.max_model_len is {asked}, but {self._service.base_model} takes {most} "
                "tokens at the Tinker service. Lower it, or the longest prompt or response."
            )
        self._max_model_len = asked or most
        self._sampler = await self._service.sampler()
        self._may_start.set()

    async def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, adapter: str | None = None
    ) -> list[Completion]:
        self._refuse(params, adapter)
        room = self._room(len(prompt_ids))
        await self._may_start.wait()
        sampler, version = self._ready(), self._version
        request = sampler.sample(
            sdk().ModelInput.from_ints(list(prompt_ids)), params.n, self._params(params, room)
        )
        self._running += 1
        try:
            found: SampleResponse = await self._service.answer(request, "a sampling request")
        except TinkerServiceLost as error:
            self._lost = error
            raise
        finally:
            self._running -= 1
        return [self._completion(sample, params, version) for sample in found.sequences]

    async def partial(self, request_id: str) -> list[list[int]]:
        """Nothing: the service gives samples whole."""
        return []

    async def logprobs(
        self, token_ids: Sequence[int], temperature: float = 1.0, adapter: str | None = None
    ) -> list[float]:
        """Log-probability of each token given those before it, at temperature 1 alone.

        Raises:
            ValueError: Another temperature, which the service does not know of.
        """
        self._refuse(SamplingParams(), adapter)
        if temperature not in (0, 1):
            raise ValueError(
                f"The Tinker service scores texts at temperature 1, not at {temperature}."
            )
        if len(token_ids) < 2:
            return []
        return await self._service.score(self._ready(), token_ids, len(token_ids) - 1)

    async def load_weights(self, ticket: WeightTicket) -> str:
        """Sample from the weights of ``ticket`` from now on; their path at the service.

        Raises:
            ValueError: They are not at the service.
            TinkerServiceError: The service does not give them. Nothing is sampled until it does.
        """
        if ticket.method != METHOD:
            raise ValueError(
                f"Weights sent by {ticket.method!r} don't reach the Tinker service; it samples "
                "from what `trainer_type: tinker` trained there."
            )
        path = str(ticket.payload)
        try:
            self._sampler = await self._service.sampler(path)
        except TinkerServiceError as error:
            self._broken = error
            raise
        self._version, self._broken = ticket.version, None
        return path

    async def pause(self) -> None:
        """Let no request begin until `resume`; those at the service end there."""
        self._may_start.clear()

    async def resume(self) -> None:
        self._may_start.set()

    async def version(self) -> int:
        return self._version

    async def health(self) -> dict[str, float]:
        """Figures for the log; `TinkerServiceLost` once a request found the service gone."""
        if self._lost is not None:
            raise self._lost
        return {
            "running": self._running,
            "waiting": 0,
            "tokens": self._num_tokens,
            "version": self._version,
        }

    async def close(self) -> None:
        self._is_closed, self._sampler = True, None
        self._may_start.set()  # those that wait are told
        await self._service.close()

    def _ready(self) -> "SamplingClient":
        if self._sampler is None:
            state = "closed" if self._is_closed else "not ready: await prepare() first"
            raise RuntimeError(f"The Tinker engine is {state}.")
        if self._broken is not None:
            raise RuntimeError("The engine stopped: its last update failed.") from self._broken
        return self._sampler

    def _room(self, prompt_length: int) -> int | None:
        """New tokens that fit behind a prompt; None: the service decides."""
        longest = self._max_model_len
        if not prompt_length or (longest is not None and prompt_length >= longest):
            most = "" if longest is None else f" and at most max_model_len - 1 = {longest - 1}"
            raise ValueError(
                f"The prompt has {prompt_length} tokens; it must have at least 1{most}."
            )
        return None if longest is None else longest - prompt_length

    def _refuse(self, params: SamplingParams, adapter: str | None) -> None:
        """`ValueError` for what the service can't do."""
        if adapter is not None:
            raise ValueError(f"There is no adapter {adapter!r}: the service samples from its own.")
        if self._settings.keeps_temperature and params.temperature not in (0, 1):
            raise ValueError(
                f"temperature is {params.temperature}, but what is sampled here is trained on, and "
                "the Tinker service trains at temperature 1."
            )
        absent = {
            "min_p": params.min_p != 0,
            "min_tokens": params.min_tokens > 0,
            "repetition_penalty": params.repetition_penalty != 1,
        }
        for name, is_asked in absent.items():
            if is_asked:
                raise ValueError(
                    f"{name} is {getattr(params, name)}, but the Tinker service has no such "
                    "parameter. Leave it out."
                )

    def _params(self, params: SamplingParams, room: int | None) -> "ServiceParams":
        """The same for the service.

        Its ends are texts or ids, not both, and one that is given replaces the model's own: so all
        ids are named; beside texts `_completion` sees to them.
        """
        ends = sorted(self._end_ids(params)) or (None if not params.ignore_eos else [])
        most = min(filter(None, (params.max_tokens, room)), default=None)
        seed = self._seeds.getrandbits(48) if params.seed is None else params.seed
        return sdk().SamplingParams(
            max_tokens=most,
            seed=seed,
            stop=list(params.stop) or ends,
            temperature=params.temperature,
            top_k=params.top_k or -1,
            top_p=params.top_p,
        )

    def _end_ids(self, params: SamplingParams) -> set[int]:
        return {*params.stop_token_ids, *(() if params.ignore_eos else self._eos_ids)}

    def _completion(
        self, sample: "SampledSequence", params: SamplingParams, version: int
    ) -> Completion:
        """A sample up to the first token that ends it."""
        tokens, ends = list(sample.tokens), self._end_ids(params)
        if sample.logprobs is None or len(sample.logprobs) != len(tokens):
            raise TinkerServiceError("The Tinker service gave a sample without logprobs.")
        length = next((k for k, token in enumerate(tokens, 1) if token in ends), len(tokens))
        is_ended = bool(length) and tokens[length - 1] in ends
        reason: FinishReason = "stop" if is_ended or sample.stop_reason == "stop" else "length"
        self._num_tokens += length
        return Completion(
            tokens[:length], list(sample.logprobs[:length]), reason, [version] * length
        )
