"""`RunnerPool`: the runner processes, their slots, and what happens when one dies or freezes."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from logging import Logger

from trinity.common.errors import TrinityError
from trinity.explorer.runner import WorkflowRunner
from trinity.explorer.units import Unit, UnitResult
from trinity.utils import actor
from trinity.utils.log import get_logger

_POLL_S = 5.0  # a healthy runner answers at least this often
_GRACE_S = 5.0  # what a runner may take to report that a deadline is over
_START_TIMEOUT_S = 300.0
_NONE_LEFT = "the run is ending, and its last runner is gone"


class RunnerLost(Exception):
    """The runner died or was replaced while it worked on a unit, by no fault of the unit's own."""


class UnitOverdue(TimeoutError):
    """A unit is past its deadline, and the second runner with it aboard does not answer."""


class NoRunners(TrinityError):
    """Runners can't be started."""


@dataclass(eq=False)
class _Host:
    """One runner process and what is on it."""

    index: int
    generation: int
    runner: WorkflowRunner
    aboard: dict[int, "_Ticket"] = field(default_factory=dict)
    outbox: list[Unit] = field(default_factory=list)
    num_suspects: int = 0
    is_retiring: bool = False
    is_gone: bool = False
    pump: asyncio.Task[None] | None = None


@dataclass(eq=False)
class _Ticket:
    """A unit, on its way through the pool."""

    unit: Unit
    is_suspect: bool
    limit_s: float
    result: asyncio.Future[UnitResult]
    host: _Host | None = None
    deadline: float = 0.0


class RunnerPool:
    """Runs units on runners and keeps the runners alive.

    A runner that dies is started again, until `let_die`. One that holds a call it can't end is
    replaced: it gets no new units, and is ended once its others are done. One that does not answer
    and is past a unit's deadline is killed. Which of the units aboard was the cause can't be seen,
    so all go elsewhere (`RunnerLost`), as suspects: no two on one runner. A suspect that is late
    again is the cause (`UnitOverdue`).

    Args:
        make_runner: Makes runner ``index`` for the ``generation``-th time: a stand-in of a new
            process, or a plain `WorkflowRunner`. Both numbers make its name unique.
        slots_per_runner: Units at work at once on each.
        kill: Ends the process behind a stand-in.
        start_timeout_s: Seconds that one attempt to start a runner may take.
        grace_s: Seconds past its deadline that a unit gets to be reported by its runner.
        start_concurrency: Runners that start at the same time.
        start_retries: Further attempts to start a runner.
        report_interval_s: Seconds between two lines on what each runner does; 0: none.
        say: Shows these lines to the person at the screen; they are in the log besides.
        logger: Of the explorer.
    """

    def __init__(
        self,
        make_runner: Callable[[int, int], WorkflowRunner],
        num_runners: int,
        slots_per_runner: int,
        *,
        kill: Callable[[object], None] = actor.kill,
        start_timeout_s: float = _START_TIMEOUT_S,
        grace_s: float = _GRACE_S,
        start_concurrency: int = 8,
        start_retries: int = 2,
        report_interval_s: float = 0.0,
        say: Callable[[str], None] = lambda text: None,
        logger: Logger | None = None,
    ) -> None:
        self.logger = logger or get_logger("explorer")
        self._make_runner = make_runner
        self._num_runners = num_runners
        self._slots = slots_per_runner
        self._kill = kill
        self._start_timeout_s = start_timeout_s
        self._grace_s = grace_s
        self._starting = asyncio.Semaphore(start_concurrency)
        self._start_attempts = start_retries + 1
        self._report_interval_s = report_interval_s
        self._say = say
        self._hosts: dict[int, _Host] = {}
        self._waiting: dict[int, _Ticket] = {}  # in order of arrival
        self._background: set[asyncio.Task[None]] = set()
        self._broken: NoRunners | None = None
        self._is_ending = False
        self._all: set[_Host] = set()
        self._num_lost = 0

    @property
    def num_slots(self) -> int:
        return self._num_runners * self._slots

    async def prepare(self) -> None:
        """Start all runners.

        Raises:
            NoRunners: One did not start, in several attempts.
        """
        await asyncio.gather(*(self._start(index, 0) for index in range(self._num_runners)))
        if self._broken:
            raise self._broken
        if self._report_interval_s:
            self._spawn(self._report())

    async def run(self, unit: Unit, limit_s: float, is_suspect: bool = False) -> UnitResult:
        """What became of ``unit``, once a slot was free.

        Args:
            limit_s: Seconds after which a runner that does not answer is held to be frozen.
            is_suspect: It was aboard a runner that died; only one such unit is on a runner.

        Raises:
            RunnerLost, UnitOverdue, NoRunners: See there.
        """
        if self._broken:
            raise self._broken
        if self._is_ending and not self._hosts:
            raise RunnerLost(_NONE_LEFT)
        result = asyncio.get_running_loop().create_future()
        ticket = _Ticket(unit, is_suspect, limit_s + self._grace_s, result)
        self._waiting[unit.unit_id] = ticket
        self._place_waiting()
        try:
            return await result
        except asyncio.CancelledError:
            self._withdraw(ticket)
            raise

    def stop(self, unit_id: int) -> None:
        """Ask for what is done of a unit: it comes as its result, soon."""
        if ticket := self._waiting.pop(unit_id, None):
            ticket.result.cancel()
            return
        for host in self._all:
            if unit_id in host.aboard:
                self._stop_aboard(host, unit_id)

    def _stop_aboard(self, host: _Host, unit_id: int) -> None:
        kept = [unit for unit in host.outbox if unit.unit_id != unit_id]
        if len(kept) == len(host.outbox):
            self._spawn(self._tell_to_stop(host, unit_id))
            return
        host.outbox = kept  # its runner has not heard of it
        if ticket := self._take_off(host, unit_id):
            ticket.result.cancel()
        self._place_waiting()

    def take_num_lost(self) -> int:
        """Runners lost since the last call."""
        num_lost, self._num_lost = self._num_lost, 0
        return num_lost

    def let_die(self) -> None:
        """The run is ending: runners that die are not replaced, and nobody need know."""
        self._is_ending = True

    async def close(self) -> None:
        """End all runners."""
        hosts = list(self._all)
        self._hosts.clear()
        self._all.clear()
        for task in [*self._background, *(h.pump for h in hosts if h.pump)]:
            task.cancel()
        await asyncio.gather(*map(self._end, hosts))

    async def _end(self, host: _Host) -> None:
        host.is_gone = True
        with contextlib.suppress(Exception):  # it may be dead; it is killed in any case
            async with asyncio.timeout(self._grace_s):
                await host.runner.close()
        self._kill(host.runner)

    # -- slots ---------------------------------------------------------------------------------

    def _place_waiting(self) -> None:
        placed = []
        for unit_id, ticket in self._waiting.items():
            if host := self._host_for(ticket):
                self._put_aboard(ticket, host)
                placed.append(unit_id)
            elif not ticket.is_suspect:  # no slot for any other either
                break
        for unit_id in placed:
            del self._waiting[unit_id]

    def _host_for(self, ticket: _Ticket) -> _Host | None:
        free = [
            host
            for host in self._hosts.values()
            if not (host.is_retiring or host.is_gone)
            and len(host.aboard) < self._slots
            and not (ticket.is_suspect and host.num_suspects)
        ]
        return min(free, key=lambda host: len(host.aboard), default=None)

    def _put_aboard(self, ticket: _Ticket, host: _Host) -> None:
        ticket.host = host
        ticket.deadline = time.monotonic() + ticket.limit_s
        host.aboard[ticket.unit.unit_id] = ticket
        host.num_suspects += ticket.is_suspect
        if not host.outbox:  # all that is placed in this turn of the loop goes in one call
            asyncio.get_running_loop().call_soon(self._flush, host)
        host.outbox.append(ticket.unit)

    def _flush(self, host: _Host) -> None:
        units, host.outbox = host.outbox, []
        if units and not host.is_gone:
            self._spawn(self._send(host, units))

    async def _send(self, host: _Host, units: list[Unit]) -> None:
        try:
            await host.runner.submit(units)
        except Exception as error:  # a dead process, or a task that can't be sent
            if isinstance(error, actor.ProcessDied):
                self._lose(host, str(error))
                return
            for unit in units:
                if ticket := self._take_off(host, unit.unit_id):
                    _fail(ticket, error)

    async def _tell_to_stop(self, host: _Host, unit_id: int) -> None:
        with contextlib.suppress(actor.ProcessDied):  # its pump sees to that
            await host.runner.stop([unit_id])

    def _take_off(self, host: _Host, unit_id: int) -> _Ticket | None:
        ticket = host.aboard.pop(unit_id, None)
        if ticket:
            host.num_suspects -= ticket.is_suspect
        return ticket

    def _withdraw(self, ticket: _Ticket) -> None:
        unit_id = ticket.unit.unit_id
        if self._waiting.pop(unit_id, None) is not None:
            return
        if ticket.host and self._take_off(ticket.host, unit_id):
            self._spawn(self._tell_to_stop(ticket.host, unit_id))
            self._place_waiting()

    # -- life of a runner ----------------------------------------------------------------------

    async def _start(self, index: int, generation: int) -> None:
        for attempt in range(self._start_attempts):
            runner = None
            try:
                async with self._starting:
                    runner = self._make_runner(index, generation + attempt)
                    async with asyncio.timeout(self._start_timeout_s):
                        await runner.prepare()
            except Exception as error:  # user code is imported there
                self._kill(runner)
                cause = error
                continue
            except BaseException:  # cancelled: nobody else knows of its process
                self._kill(runner)
                raise
            host = _Host(index, generation + attempt, runner)
            host.pump = asyncio.create_task(self._pump(host))
            self._hosts[index] = host
            self._all.add(host)
            self._place_waiting()
            return
        self._broken = NoRunners(
            f"Runner {index} did not start, {self._start_attempts} times: {cause}"
        )
        self._broken.__cause__ = cause
        for ticket in self._waiting.values():
            _fail(ticket, self._broken)
        self._waiting.clear()

    async def _pump(self, host: _Host) -> None:
        """Bring in results until the runner is gone."""
        while not host.is_gone:
            poll = asyncio.ensure_future(host.runner.collect(_POLL_S))
            poll.add_done_callback(_ignore)
            while not (await asyncio.wait({poll}, timeout=1.0))[0]:
                if late := self._overdue(host):
                    self._freeze(host, late)
                    return
            try:
                results = poll.result()
            except Exception as error:  # ProcessDied, or a broken runner
                self._lose(host, str(error))
                return
            for result in results:
                self._bring_in(host, result)
            if late := self._overdue(host):
                self._freeze(host, late)
                return
            self._place_waiting()
            if host.is_retiring and not host.aboard:
                host.is_gone = True
                self._all.discard(host)
                self._kill(host.runner)

    def _bring_in(self, host: _Host, result: UnitResult) -> None:
        ticket = self._take_off(host, result.unit_id)
        if ticket and not ticket.result.done():
            ticket.result.set_result(result)
        if result.num_stuck and not host.is_retiring:
            self.logger.warning(
                "Runner %d holds a call that does not end; it is replaced.", host.index
            )
            host.is_retiring = True
            self._replace(host)

    def _overdue(self, host: _Host) -> list[_Ticket]:
        now = time.monotonic()
        return [ticket for ticket in host.aboard.values() if ticket.deadline < now]

    def _freeze(self, host: _Host, late: list[_Ticket]) -> None:
        for ticket in late:
            if ticket.is_suspect:
                self._take_off(host, ticket.unit.unit_id)
                why = f"not done after {ticket.limit_s:g} s, its runner does not answer"
                _fail(ticket, UnitOverdue(why))
        self._lose(host, "it does not answer")

    def _lose(self, host: _Host, why: str) -> None:
        """Kill what is left of a runner, hand back its units, start another."""
        if host.is_gone:
            return
        host.is_gone = True
        self._all.discard(host)
        self._num_lost += 1
        self.logger.log(
            logging.INFO if self._is_ending else logging.WARNING,
            "Runner %d is lost (%s) with %d units aboard.",
            host.index,
            why,
            len(host.aboard),
        )
        self._kill(host.runner)
        for ticket in list(host.aboard.values()):
            self._take_off(host, ticket.unit.unit_id)
            _fail(ticket, RunnerLost(f"runner {host.index}: {why}"))
        if not host.is_retiring:
            self._replace(host)

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(self._report_interval_s)
            now = time.monotonic()
            for host in sorted(self._all, key=lambda host: host.index):
                began = [ticket.deadline - ticket.limit_s for ticket in host.aboard.values()]
                longest = now - min(began, default=now)
                text = (
                    f"Runner {host.index}: {len(began)} of {self._slots} slots busy, the longest "
                    f"for {longest:.1f} s; {len(self._waiting)} units wait."
                )
                self.logger.info(text)
                self._say(text)

    def _replace(self, host: _Host) -> None:
        if self._hosts.get(host.index) is not host:
            return
        del self._hosts[host.index]
        if not self._is_ending:
            self._spawn(self._start(host.index, host.generation + 1))
        elif not self._hosts:
            for ticket in self._waiting.values():
                _fail(ticket, RunnerLost(_NONE_LEFT))
            self._waiting.clear()

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _fail(ticket: _Ticket, error: Exception) -> None:
    if not ticket.result.done():
        ticket.result.set_exception(error)


def _ignore(poll: "asyncio.Future[list[UnitResult]]") -> None:
    if not poll.cancelled():
        poll.exception()
