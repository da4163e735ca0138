"""`Desk`: replies that went out, the feedback they got, and what is committed to be trained on.

Called from the API's thread and from the explorer's loop; a lock keeps the two apart.
"""

import asyncio
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from trinity.common.experience import Experience

_MAX_PENDING = 20_000  # replies that may wait for feedback; older ones are forgotten


class UnknownReplyError(KeyError):
    """There is no such reply, or it is too old, or it has been committed."""


@dataclass
class Desk:
    """``record`` -> ``feedback`` -> ``commit`` -> ``next_batch``.

    Args:
        max_pending: Replies without feedback that are kept.
        keeps_all: Every reply is also kept until `take_unwritten`.
    """

    max_pending: int = _MAX_PENDING
    keeps_all: bool = False
    num_requests: int = 0
    num_forgotten: int = 0
    num_committed: int = 0
    _pending: OrderedDict[str, list[Experience]] = field(default_factory=OrderedDict)
    _ready: dict[str, list[Experience]] = field(default_factory=dict)
    _num_runs: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    _committed: list[Experience] = field(default_factory=list)
    _unwritten: list[Experience] = field(default_factory=list)
    _waiting: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def record(self, msg_id: str, replies: Sequence[Experience]) -> None:
        """Remember the choices of the reply ``msg_id`` until feedback comes."""
        with self._lock:
            self.num_requests += 1
            kept = [e for e in replies if e.truncate_status != "prompt_truncated"]
            for place, reply in enumerate(kept):
                reply.eid.suffix = f"{msg_id}/{place}" if len(kept) > 1 else msg_id
            self._pending[msg_id] = kept
            self._unwritten += kept if self.keeps_all else []
            while len(self._pending) > self.max_pending:
                self._pending.popitem(last=False)
                self.num_forgotten += 1

    def feedback(
        self, reward: float, msg_ids: Sequence[str], task_id: str, run_id: int | None = None
    ) -> int:
        """Reward some replies as the steps of one run of a task; how many experiences they are.

        Feedback that is given again before the commit takes the place of the earlier.

        Args:
            task_id: Runs of the same task are compared with each other.
            run_id: None: the next one of the task.

        Raises:
            UnknownReplyError: One of the replies is not known; nothing is changed.
        """
        with self._lock:
            for msg_id in msg_ids:
                if msg_id not in self._pending and msg_id not in self._ready:
                    raise UnknownReplyError(msg_id)
            run = self._num_runs[task_id] if run_id is None else run_id
            self._num_runs[task_id] = max(self._num_runs[task_id], run + 1)
            count = 0
            for step, msg_id in enumerate(dict.fromkeys(msg_ids)):
                waits = self._pending if msg_id in self._pending else self._ready
                replies = waits.pop(msg_id)
                for reply in replies:
                    reply.reward, reply.eid.task = float(reward), task_id
                    reply.eid.run, reply.eid.step = run, step
                    reply.metrics["reward"] = float(reward)
                self._ready[msg_id] = replies
                count += len(replies)
            return count

    def commit(self) -> int:
        """Hand over all that has feedback, to be trained on; how many experiences that is."""
        with self._lock:
            found = [reply for replies in self._ready.values() for reply in replies]
            self._ready.clear()
            self._num_runs.clear()
            self._committed += found
            self.num_committed += len(found)
            if found and self._waiting is not None:
                loop, event = self._waiting
                loop.call_soon_threadsafe(event.set)
            return len(found)

    async def next_batch(self) -> list[Experience]:
        """All that has been committed; waits until there is something."""
        event = asyncio.Event()
        with self._lock:
            self._waiting = (asyncio.get_running_loop(), event)
            if self._committed:
                event.set()
        await event.wait()
        with self._lock:
            self._waiting = None
            batch, self._committed = self._committed, []
        return batch

    def take_unwritten(self) -> list[Experience]:
        """The replies that came since the last call, with or without feedback."""
        with self._lock:
            found, self._unwritten = self._unwritten, []
        return found

    def counts(self) -> dict[str, float]:
        """Numbers for the log and for `/metrics`."""
        with self._lock:
            return {
                "total_request_count": float(self.num_requests),
                "total_experience_count": float(self.num_committed),
                "ready_experience_count": float(sum(map(len, self._ready.values()))),
                "pending_reply_count": float(len(self._pending)),
                "forgotten_reply_count": float(self.num_forgotten),
            }
