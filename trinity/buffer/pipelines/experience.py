"""What happens to the experiences of a step between the explorer and the buffer."""

import inspect
import logging
import threading
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from trinity.buffer.operators.base import ExperienceOperator, Processor
from trinity.buffer.reader.base import BufferReader
from trinity.buffer.writer.base import BufferWriter
from trinity.common.constants import SELECTOR_METRIC
from trinity.common.deadlines import within
from trinity.common.errors import DeadlineError
from trinity.common.experience import Experience
from trinity.utils.timer import timed

_PREFIX = "experience_pipeline"


class ExperiencePipeline:
    """Keeps the raw experiences, shapes them by operators, writes them.

    ``prepare`` -> ``process`` once a step -> ``close``. The pipeline is one writer of the buffer.

    Args:
        operators: In order; a group advantage of the algorithm comes last.
        writer: Where the result goes.
        input_log: Where experiences are kept as the explorer made them; None: nowhere.
        inputs: Further sources by name. All that is in them when a step comes is added to it.
        logger: Told what became of each step.
        record: Where the result is kept to be looked at; None: nowhere.
        deadline_s: Seconds that an operator may take for a step. One that waits ends the run then;
            one that blocks can't be ended, and is told of in the log.
    """

    def __init__(
        self,
        operators: Sequence[Processor],
        writer: BufferWriter,
        input_log: BufferWriter | None = None,
        inputs: Mapping[str, BufferReader] | None = None,
        logger: logging.Logger | None = None,
        record: BufferWriter | None = None,
        deadline_s: float = 3600.0,
    ) -> None:
        self.operators = list(operators)
        self.writer = writer
        self.input_log = input_log
        self.record = record
        self._deadline_s = deadline_s
        self._open_inputs = dict(inputs or {})
        self._logger = logger or logging.getLogger(__name__)
        self._ends = AsyncExitStack()

    def set_auxiliary_models(self, models: Mapping[str | int, Sequence[Any]]) -> None:
        """Give the operators their clients of the auxiliary models."""
        for operator in self.operators:
            if isinstance(operator, ExperienceOperator):
                operator.set_auxiliary_models(models)

    async def prepare(self) -> None:
        """Prepare the operators and take part as a writer.

        Whatever fails, `close` lets go of what was taken by then.
        """
        for operator in self.operators:
            self._ends.push_async_callback(_call, operator, "close")
            await _call(operator, "prepare")
        for writer in reversed(self._writers()):
            await writer.acquire()
            self._ends.push_async_callback(writer.release)

    async def process(self, experiences: list[Experience]) -> dict[str, Any]:
        """Shape and write the experiences of one step; metrics as ``experience_pipeline/...``.

        What `pass_rate_calculator` found stands under its own name, without a prefix.
        """
        times: dict[str, float] = {}
        further = await self._further()
        experiences = [*experiences, *(e for exps in further.values() for e in exps)]
        found: dict[str, Any] = {
            f"input/{name}": float(len(exps)) for name, exps in further.items()
        }
        with timed(times, "time/total"):
            if self.input_log is not None:
                with timed(times, "time/save_input"):
                    await self.input_log.write(experiences)
            kept, num_filtered = experiences, 0.0
            for operator in self.operators:
                before = len(kept)
                with timed(times, f"time/{_name(operator)}"):
                    kept, metrics = await self._processed(operator, kept)
                found |= metrics
                num_filtered += max(before - len(kept), metrics.get("filtered_count", 0.0))
            with timed(times, "time/write"):
                if self.record is not None:
                    await self.record.write(kept)
                waiting = await self.writer.write(kept)
        found |= {"experience_count": float(len(kept)), "filtered_count": float(num_filtered)}
        found |= {f"buffer/{name}": value for name, value in waiting.items()}
        feedback = found.pop(SELECTOR_METRIC, None)
        self._logger.info("%d experiences in, %d out.", len(experiences), len(kept))
        named = {f"{_PREFIX}/{name}": value for name, value in (found | times).items()}
        return named if feedback is None else {**named, SELECTOR_METRIC: feedback}

    async def _processed(
        self, operator: Processor, experiences: list[Experience]
    ) -> tuple[list[Experience], dict[str, Any]]:
        """What an operator makes of experiences.

        Raises:
            DeadlineError: It waits for longer than it may.
        """
        who, seconds = f"the operator {_name(operator)}", self._deadline_s
        late = "%s has been at one step for more than %g s, and all waits for it."
        watch = threading.Timer(seconds, self._logger.error, (late, who, seconds))
        watch.daemon = True
        watch.start()
        try:
            found = operator.process(experiences)
        finally:
            watch.cancel()
        return await within(seconds, _resolved(found), who, "a step of the experience pipeline")

    async def flush(self, until: int | None = None) -> None:
        """No more comes before the weights of training step ``until`` are out."""
        await self.writer.flush(until)

    async def close(self) -> None:
        """Have done: readers get what is left, then the end. A second call does nothing.

        One that fails to end does not keep the others from it.
        """
        await self._ends.pop_all().aclose()

    async def _further(self) -> dict[str, list[Experience]]:
        """What each further source has now; one that has ended is not asked again."""
        found: dict[str, list[Experience]] = {}
        for name, reader in list(self._open_inputs.items()):
            found[name] = []
            try:
                while True:
                    found[name] += await reader.read(1)
            except DeadlineError:
                continue
            except StopAsyncIteration:
                del self._open_inputs[name]
        return found

    def _writers(self) -> list[BufferWriter]:
        writers = (self.writer, self.input_log, self.record)
        return [writer for writer in writers if writer is not None]


def _name(operator: Processor) -> str:
    return type(operator).__name__


async def _call(operator: Processor, method: str) -> None:
    function = getattr(operator, method, None)
    if function is not None:
        await _resolved(function())


async def _resolved(value: Any | Awaitable[Any]) -> Any:
    return await value if inspect.isawaitable(value) else value
