"""Which weights are out, and who waits for the next ones. No Ray, no tensors."""

import asyncio
import time
from typing import Protocol

from trinity.common.models.protocol import WeightTicket
from trinity.synchronizer.schedule import TrainerRhythm


class Board(Protocol):
    """What explorer and trainer call of a board: one in a process, or `FileBoard` between two."""

    async def reopen(self, version: int) -> bool: ...

    async def join(self) -> None: ...

    async def trainer_rhythm(self, timeout_s: float) -> TrainerRhythm | None: ...

    async def publish(self, ticket: WeightTicket) -> None: ...

    async def close(self, reason: str) -> None: ...

    async def wait_newer(self, than: int, timeout_s: float) -> WeightTicket | None: ...

    async def ask(self, than: int, timeout_s: float) -> WeightTicket | None: ...

    async def wait_asked(self) -> None: ...

    async def decline(self) -> None: ...

    async def is_asked(self) -> bool: ...

    async def is_open(self) -> bool: ...

    async def is_over(self) -> bool: ...

    async def newest(self) -> tuple[int, WeightTicket | None]: ...


class VersionBoard:
    """The newest published weights, as a ticket.

    One trainer publishes; any number of explorers wait. Versions only grow.
    """

    def __init__(self, version: int = 0) -> None:
        self._version = version
        self._ticket: WeightTicket | None = None
        self._closed: str | None = None
        self._is_asked = False
        self._answers = 0
        self._changed = asyncio.Condition()
        self._published_at = time.monotonic()

    async def publish(self, ticket: WeightTicket) -> None:
        """Make ``ticket`` the newest weights. A version not above the newest is a `ValueError`."""
        async with self._changed:
            if ticket.version <= self._version:
                raise ValueError(
                    f"Version {ticket.version} is not above {self._version}, which is out."
                )
            self._version, self._ticket = ticket.version, ticket
            self._published_at = time.monotonic()
            self._answer()

    async def reopen(self, version: int) -> bool:
        """A trainer starts (again) at ``version``: more weights will come.

        Newer ones, of a trainer that was killed after its last checkpoint, are taken back: True if
        there were some.
        """
        self._closed = None
        is_ahead = self._version > version
        if is_ahead:
            self._version, self._ticket = 0, None
        return is_ahead

    async def join(self) -> None:
        """An explorer starts."""

    async def trainer_rhythm(self, timeout_s: float) -> TrainerRhythm | None:
        """What the explorer's own schedule does not know of the trainer: nothing."""
        return None

    async def close(self, reason: str) -> None:
        """No more weights will come; who waits gets None."""
        async with self._changed:
            self._closed = self._closed or reason
            self._changed.notify_all()

    async def wait_newer(self, than: int, timeout_s: float) -> WeightTicket | None:
        """The newest ticket once its version is above ``than``; None if the trainer has ended.

        Raises:
            TimeoutError: Nothing newer within ``timeout_s``; says what is out and since when.
        """
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self._version > than or self._closed)
        except TimeoutError:
            age = time.monotonic() - self._published_at
            since = "published" if self._ticket is not None else "with which the run began"
            raise TimeoutError(
                f"Waited {timeout_s:.0f} s for weights newer than version {than} from the trainer;"
                f" the newest is version {self._version}, {since} {age:.0f} s ago."
            ) from None
        return self._ticket if self._version > than else None

    async def ask(self, than: int, timeout_s: float) -> WeightTicket | None:
        """Ask the trainer for weights newer than ``than``, and wait for its answer.

        The answer is None if the trainer has nothing newer, or has ended.

        Raises:
            TimeoutError: No answer within ``timeout_s``.
        """
        async with self._changed:
            answers = self._answers
            self._is_asked = True
            self._changed.notify_all()
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self._answers > answers or self._closed)
        except TimeoutError:
            raise TimeoutError(
                f"Asked the trainer for weights newer than version {than} and had no answer for "
                f"{timeout_s:.0f} s."
            ) from None
        return self._ticket if self._version > than else None

    async def wait_asked(self) -> None:
        """Return once an explorer waits for an answer to `ask`."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._is_asked)

    async def decline(self) -> None:
        """Answer `ask` with: nothing newer; go on with what you have."""
        async with self._changed:
            self._answer()

    def _answer(self) -> None:
        self._is_asked = False
        self._answers += 1
        self._changed.notify_all()

    async def is_asked(self) -> bool:
        """Whether an explorer waits for an answer to `ask`."""
        return self._is_asked

    async def is_open(self) -> bool:
        """Whether more weights may come."""
        return self._closed is None

    async def is_over(self) -> bool:
        """Whether the trainer has ended."""
        return self._closed is not None

    async def newest(self) -> tuple[int, WeightTicket | None]:
        """Newest version and its ticket (None: the weights every part started from)."""
        return self._version, self._ticket
