"""The version board of two commands that share a job's folder: one explores, one trains.

It has the face of `trinity.synchronizer.board.VersionBoard`; everything lies in small files, so
that neither side has to run when the other does, and a restart of either finds what is out.
"""

import asyncio
import json
import time
from dataclasses import asdict
from pathlib import Path
from secrets import token_hex

from trinity.checkpoint.atomic import write_text
from trinity.common.models.protocol import WeightTicket
from trinity.synchronizer.schedule import TrainerRhythm

_POLL_S = 0.2
_SAME_JOB = "Does the trainer run on the same job (project, group, name and checkpoint_root_dir)?"


class FileBoard:
    """The newest published weights of a job, in ``folder``.

    A trainer that starts calls `reopen`, which takes back the end of an earlier run; an explorer
    that starts calls `join`, and takes the end of an earlier run for none.

    Args:
        folder: Shared by both commands; made when first written to.
        rhythm: Of the trainer whose board this is; it tells it when it starts.
    """

    def __init__(self, folder: Path, rhythm: TrainerRhythm | None = None) -> None:
        self._rhythm = rhythm
        self._trainer = folder / "trainer.json"
        self._earlier_end: str | None = None
        self._newest = folder / "newest.json"
        self._ended = folder / "ended.json"
        self._asked = folder / "asked.json"
        self._answer = folder / "answer.json"

    async def reopen(self, version: int) -> bool:
        """A trainer starts (again) at ``version``: more weights will come.

        Newer ones, of a trainer that was killed after its last checkpoint, are taken back: True if
        there were some.
        """
        newest, _ = await self.newest()
        is_ahead = newest > version
        for path in (self._ended, *[self._newest] * is_ahead):
            path.unlink(missing_ok=True)
        if self._rhythm is not None:
            write_text(self._trainer, json.dumps(asdict(self._rhythm)))
        return is_ahead  # questions and answers stay: an explorer may be waiting

    async def publish(self, ticket: WeightTicket) -> None:
        """Make ``ticket`` the newest weights. A version not above the newest is a `ValueError`."""
        newest, _ = await self.newest()
        if ticket.version <= newest:
            raise ValueError(f"Version {ticket.version} is not above {newest}, which is out.")
        write_text(self._newest, json.dumps(asdict(ticket)))
        self._take_answer_down()

    async def join(self) -> None:
        """An explorer starts: a trainer that has ended by now is to come again."""
        self._earlier_end = self._end()

    async def trainer_rhythm(self, timeout_s: float) -> TrainerRhythm | None:
        """What the trainer tells of itself, once it has started; None if it has ended.

        Raises:
            TimeoutError: It did not start within ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        while await self.is_open():
            if text := _read(self._trainer):
                return TrainerRhythm(**json.loads(text))
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"Waited {timeout_s:.0f} s for a trainer to start with "
                    f"{self._newest.parent}. {_SAME_JOB}"
                )
            await asyncio.sleep(_POLL_S)
        return None

    async def close(self, reason: str) -> None:
        """No more weights will come."""
        self._trainer.unlink(missing_ok=True)
        write_text(self._ended, json.dumps({"reason": reason, "id": token_hex(8)}))

    async def wait_newer(self, than: int, timeout_s: float) -> WeightTicket | None:
        """The newest ticket once its version is above ``than``; None if the trainer has ended.

        Raises:
            TimeoutError: Nothing newer within ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            is_open = await self.is_open()
            version, ticket = await self.newest()
            if version > than or not is_open:
                return ticket if version > than else None
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"Waited {timeout_s:.0f} s for weights newer than version {than} in "
                    f"{self._newest.parent}; the newest is version {version}. {_SAME_JOB}"
                )
            await asyncio.sleep(_POLL_S)

    async def ask(self, than: int, timeout_s: float) -> WeightTicket | None:
        """Ask the trainer for weights newer than ``than``; None if it has none, or has ended.

        Raises:
            TimeoutError: No answer within ``timeout_s``.
        """
        self._answer.unlink(missing_ok=True)
        write_text(self._asked, json.dumps({"than": than}))
        deadline = time.monotonic() + timeout_s
        while not self._answer.exists() and await self.is_open():
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"Asked the trainer for weights newer than version {than} and had no answer "
                    f"for {timeout_s:.0f} s."
                )
            await asyncio.sleep(_POLL_S)
        version, ticket = await self.newest()
        return ticket if version > than else None

    async def wait_asked(self) -> None:
        """Return once an explorer waits for an answer to `ask`."""
        while not self._asked.exists():
            await asyncio.sleep(_POLL_S)

    async def decline(self) -> None:
        """Answer `ask` with: nothing newer; go on with what you have."""
        self._take_answer_down()

    async def is_asked(self) -> bool:
        """Whether an explorer waits for an answer to `ask`."""
        return self._asked.exists()

    async def is_open(self) -> bool:
        """Whether more weights may come, from this trainer or the next."""
        return self._end() in (None, self._earlier_end)

    async def is_over(self) -> bool:
        """Whether the last trainer has ended, be it before this explorer started."""
        return self._end() is not None

    def _end(self) -> str | None:
        return _read(self._ended)

    async def newest(self) -> tuple[int, WeightTicket | None]:
        """Newest version and its ticket (None: the weights every part started from)."""
        text = _read(self._newest)
        if text is None:
            return 0, None
        ticket = WeightTicket(**json.loads(text))
        return ticket.version, ticket

    def _take_answer_down(self) -> None:
        if self._asked.exists():
            self._asked.unlink(missing_ok=True)
            write_text(self._answer, "{}")


def _read(path: Path) -> str | None:
    """The text of a file that may come and go."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return None
