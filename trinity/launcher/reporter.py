"""Where the reports of a part go: to its monitor and to all that listen."""

import threading
from collections.abc import Callable, Sequence
from logging import Logger
from queue import SimpleQueue

from trinity.utils.metrics import Metrics
from trinity.utils.monitor import Monitor

Report = Callable[[str, int, Metrics], None]
Call = Callable[[Monitor], None]

_END_S = 30.0
_MAX_WAITING = 1000  # a service that hangs must not fill the memory


class Reporter:
    """Hands the reports of a part to its monitor and to all that listen.

    The monitor works in a thread of its own: the wait for a service that is slow would hold up all
    parts. One that fails, or does not keep up, is told of once and left out: metrics never end a
    run.

    Args:
        end_s: Seconds the monitor may take at the end for what it has not recorded yet.
    """

    def __init__(
        self,
        monitor: Monitor,
        listeners: Sequence[Report],
        logger: Logger,
        end_s: float = _END_S,
    ) -> None:
        self._monitor: Monitor | None = monitor
        self._listeners = listeners
        self._logger = logger
        self._end_s = end_s
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def report(self, role: str, step: int, metrics: Metrics) -> None:
        """One report, to everybody."""
        for listener in self._listeners:
            listener(role, step, metrics)
        recorded = dict(metrics)  # the part goes on with its own
        self._record(lambda monitor: monitor.log(recorded, step))

    def rows(self, name: str, rows: list[dict[str, object]], step: int) -> None:
        """A table, to the monitor."""
        import pandas  # slow to import, and few runs have tables

        table = pandas.DataFrame(rows, dtype=object)  # numbers stay what they are beside gaps
        self._record(lambda monitor: monitor.log_table(name, table, step))

    def close(self) -> None:
        """End the monitor, once it has recorded all."""
        self._record(lambda monitor: monitor.close())
        if self._thread is None:
            return
        self._calls.put(None)
        self._thread.join(self._end_s)
        if self._thread.is_alive():
            self._leave_out(f"it does not end within {self._end_s:g} s")

    def _record(self, call: Call) -> None:
        if self._monitor is None:
            return
        if self._calls.qsize() >= _MAX_WAITING:
            self._leave_out(f"it is {_MAX_WAITING} reports behind")
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="monitor", daemon=True)
            self._thread.start()
        self._calls.put(call)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            monitor = self._monitor
            if monitor is None:
                continue
            try:
                call(monitor)
            except Exception as error:  # of whatever service it is
                self._leave_out(str(error))

    def _leave_out(self, why: str) -> None:
        if self._monitor is not None:
            self._logger.warning("The monitor failed and is left out from here on: %s", why)
        self._monitor = None
