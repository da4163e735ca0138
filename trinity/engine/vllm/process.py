"""vLLM's process as it is now: whether it lives, may sample, and with which weights."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from trinity.utils.actor import ProcessDied, ProcessRestarted

_MAX_RESTARTS = 3  # of vLLM's process; one more death is final


class VLLMProcess:
    """What requests and updates of one engine share.

    Args:
        version: Of the weights that vLLM starts with.

    Attributes:
        version: Of the weights that sample now.
        may_start: Set while requests may begin.
        broken: Why the weights can't be sampled with, if they can't.
        lacks_weights: vLLM was started anew, with weights older than those it had.
    """

    def __init__(self, version: int) -> None:
        self.version = version
        self.may_start = asyncio.Event()
        self.broken: Exception | None = None
        self.lacks_weights = False
        self._first_version = version
        self._llm: AsyncLLM | None = None
        self._num_restarts = 0
        self._has_updates = False
        self._is_closed = False

    @property
    def is_started(self) -> bool:
        """Whether there is one, be it a dead one."""
        return self._llm is not None

    @property
    def was_restarted(self) -> bool:
        """Whether one died before."""
        return self._num_restarts > 0

    @property
    def llm(self) -> AsyncLLM:
        """vLLM's own face.

        Raises:
            RuntimeError: It was not started.
            ProcessDied: It died and is not started again yet.
        """
        if self._llm is None:
            if self._num_restarts and not self._is_closed:
                raise self.death()
            raise RuntimeError("The engine is not ready: await prepare() first.")
        return self._llm

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest prompt and what is sampled after it, together."""
        length: int = self.llm.vllm_config.model_config.max_model_len
        return length

    @property
    def vocabulary_size(self) -> int:
        """Token ids of the model are below it."""
        size: int = self.llm.vllm_config.model_config.get_vocab_size()
        return size

    def begin(self, llm: AsyncLLM) -> None:
        """It is ready; requests may begin, unless they wait for newer weights."""
        self._llm = llm
        if not self.lacks_weights:
            self.may_start.set()

    def loaded(self, version: int) -> None:
        """It has the weights of ``version``."""
        self.version, self.broken = version, None
        self._has_updates, self.lacks_weights = True, False

    async def bury(self) -> None:
        """Forget all that was in a process that died."""
        llm, self._llm = self.llm, None
        self._num_restarts += 1
        self.may_start.clear()
        self.broken = None
        self.version, self.lacks_weights = self._first_version, self._has_updates
        await asyncio.to_thread(llm.shutdown)

    async def close(self) -> None:
        """End it; those that wait are told."""
        self._is_closed = True
        if self._llm is not None:
            await asyncio.to_thread(self._llm.shutdown)
            self._llm = None
        self.may_start.set()

    def require_alive(self) -> None:
        """`ProcessDied` if it has ended."""
        if self.llm.errored:
            raise self.death()

    def require_sound(self) -> None:
        """`ProcessDied` if it has ended, `RuntimeError` if its weights can't be sampled with."""
        self.require_alive()
        if self.broken is not None:
            raise RuntimeError(f"The engine stopped: {self.broken}") from self.broken

    @contextlib.asynccontextmanager
    async def telling_of_death(self) -> AsyncIterator[None]:
        """Within, the end of the process is a `ProcessDied`; requests that wait get it too."""
        try:
            yield
        except EngineDeadError as error:
            self.may_start.set()
            raise self.death() from error

    def death(self) -> ProcessDied:
        """What is told of the end of the process: whether it comes back."""
        if self._num_restarts < _MAX_RESTARTS or self._llm is None:
            return ProcessRestarted("vLLM's process has ended; it is started again.")
        return ProcessDied(f"vLLM's process has ended, the {_MAX_RESTARTS + 1}th time.")
