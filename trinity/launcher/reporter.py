"""Where the reports of a part go: to its monitor and to all that listen."""

from collections.abc import Callable, Sequence
from logging import Logger

from trinity.utils.metrics import Metrics
from trinity.utils.monitor import Monitor

Report = Callable[[str, int, Metrics], None]


class Reporter:
    """Hands the reports of a part to its monitor and to all that listen.

    A monitor that fails is told of once and left out: metrics never end a run.
    """

    def __init__(self, monitor: Monitor, listeners: Sequence[Report], logger: Logger) -> None:
        self._monitor: Monitor | None = monitor
        self._listeners = listeners
        self._logger = logger

    def report(self, role: str, step: int, metrics: Metrics) -> None:
        """One report, to everybody."""
        for listener in self._listeners:
            listener(role, step, metrics)
        self._guarded(lambda monitor: monitor.log(metrics, step))

    def rows(self, name: str, rows: list[dict[str, object]], step: int) -> None:
        """A table, to the monitor."""
        self._guarded(lambda monitor: monitor.log_table(name, rows, step))

    def close(self) -> None:
        """End the monitor."""
        self._guarded(lambda monitor: monitor.close())

    def _guarded(self, call: Callable[[Monitor], None]) -> None:
        if self._monitor is None:
            return
        try:
            call(self._monitor)
        except Exception as error:
            self._logger.warning("The monitor failed and is left out from here on: %s", error)
            self._monitor = None
