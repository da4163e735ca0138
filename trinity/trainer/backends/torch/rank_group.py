"""`RankGroup`: several ranks as one `TrainEngine`. It cuts batches and puts results together."""

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from trinity.algorithm.aggregate import LossScope
from trinity.common.models.protocol import WeightTicket
from trinity.synchronizer import ipc
from trinity.trainer.backends.torch import updates
from trinity.trainer.backends.torch.microbatch import MicroBatch, plan_micro_batches
from trinity.trainer.backends.torch.rank import TorchTrainRank
from trinity.trainer.backends.torch.settings import SaveStrategy, TorchEngineSettings
from trinity.trainer.backends.torch.state import Files
from trinity.trainer.batch import TrainBatch
from trinity.trainer.engine import ModelRole, TrainedRole
from trinity.trainer.figures import figures_of_ranks
from trinity.trainer.loss import BatchObjective
from trinity.trainer.split import split_rows
from trinity.utils import actor

T = TypeVar("T")

_SIGN_OF_LIFE_S = 120.0
"""Within which a living rank answers, on however busy a machine."""


class RankGroup:
    """A `TrainEngine` over ranks, which are `TorchTrainRank` or stand-ins for them.

    Rows go to ranks by whole groups, so that prompts stay shared, balanced by tokens; a group
    larger than a rank's share is cut. Ranks may work on the same rows together. All counts
    of a loss are those of the whole batch, so the result is that of one process.
    """

    def __init__(self, ranks: Sequence[TorchTrainRank], settings: TorchEngineSettings) -> None:
        self.ranks = list(ranks)
        self._settings = settings
        self._saving: asyncio.Task[None] | None = None
        self._hosts: list[str] = []
        self._is_broken = False

    async def prepare(self) -> None:
        addresses = await asyncio.gather(*(rank.address() for rank in self.ranks))
        self._hosts = [address.rpartition(":")[0] for address in addresses]
        await self._all("join", addresses[0])

    async def forward(
        self, batch: TrainBatch, which: ModelRole = "actor", entropy: bool = False
    ) -> dict[str, Tensor]:
        parts = self._parts(batch, which, None)
        found = await self._each(
            [
                rank.forward_planned(part.batch, which, entropy, part.plan)
                for rank, part in self._placed(parts)
            ]
        )
        whole: dict[str, Tensor] = {}
        width = batch["action_mask"].shape[1]
        for part, outputs in zip(parts, self._first_of_each(found), strict=True):
            for name, values in outputs.items():
                target = whole.setdefault(name, values.new_zeros(len(batch), width))
                target[part.rows, : values.shape[1]] = values[: len(part.rows)]
        return whole

    async def forward_backward(
        self,
        batch: TrainBatch,
        objective: BatchObjective,
        which: TrainedRole = "actor",
        scope: LossScope | None = None,
    ) -> dict[str, float]:
        scope = scope or updates.scope_of(batch)
        if not objective.adds_up(batch):
            return await self._in_two_passes(batch, objective, which, scope)
        parts = self._parts(batch, which, objective)
        shares = await self._each(
            [
                rank.backward_planned(part.batch, objective, which, part.plan, scope)
                for rank, part in self._placed(parts)
            ]
        )
        return updates.Share.total(self._first_of_each(shares), objective.loss_name)

    async def optim_step(self, which: TrainedRole = "actor") -> dict[str, float]:
        found: list[dict[str, float]] = await self._all("optim_step", which)
        return found[0]

    async def send_weights(self, version: int) -> WeightTicket:
        found: list[WeightTicket] = await self._all("send_weights", version)
        return ipc.together(found)

    async def save(
        self,
        path: str | Path,
        hf: bool = False,
        files: Files | None = None,
        is_last: bool = False,
    ) -> None:
        await self.wait_saved()
        await self._all("hold_states", path, hf)
        self._saving = asyncio.create_task(self._write(path, files or {}))

    async def wait_saved(self) -> None:
        saving, self._saving = self._saving, None
        if saving is not None:
            await saving

    async def load(self, path: str | Path, weights_only: bool = False) -> None:
        await self._all("load", path, weights_only)

    async def health(self) -> dict[str, float]:
        found: list[dict[str, float]] = await self._all("health")
        return figures_of_ranks(found)

    async def close(self) -> None:
        """End all ranks; those that wait for a rank that failed are killed."""
        try:
            await self.wait_saved()
        finally:
            if self._is_broken:
                for rank in self.ranks:
                    actor.kill(rank)
            else:
                await self._all("close")

    async def _write(self, path: str | Path, files: Files) -> None:
        """Have all ranks write what they hold, as many at once as the settings allow."""
        first = self.ranks[0]
        await first.begin_checkpoint(path)
        try:
            for turn in writing_turns(self._settings.save_strategy, self._hosts):
                writes = [self.ranks[number].write_part(path) for number in turn]
                for outcome in await asyncio.gather(*writes, return_exceptions=True):
                    if isinstance(outcome, BaseException):
                        raise outcome
            await first.finish_checkpoint(path, files)
        except BaseException:
            await first.abandon_checkpoint(path)
            raise

    async def _all(self, method: str, *args: object) -> list[Any]:
        """One call on every rank."""
        return await self._each([getattr(rank, method)(*args) for rank in self.ranks])

    async def _each(self, calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """One call for each rank, all at once.

        An error leaves the others waiting for that rank, so one is enough. Which one is raised:
        `_cause`.
        """
        tasks = [asyncio.ensure_future(call) for call in calls]
        errors: list[BaseException] = []
        for number, task in enumerate(tasks):
            task.add_done_callback(partial(self._take_error, errors, number))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if errors:
                self._is_broken = True
                raise await self._cause(errors)
        except asyncio.CancelledError:
            self._is_broken = True
            raise
        finally:
            for task in tasks:
                task.cancel()
        return [task.result() for task in tasks]

    def _take_error(
        self, errors: list[BaseException], number: int, call: "asyncio.Future[Any]"
    ) -> None:
        """Put what a rank's call failed of, if it did, at the end of ``errors``."""
        error = None if call.cancelled() else call.exception()
        if error is not None:
            error.add_note(f"This was rank {number} of {len(self.ranks)}.")
            errors.append(error)

    async def _cause(self, errors: Sequence[BaseException]) -> BaseException:
        """Of errors in the order they came, the one that the others are of.

        When the process of a rank ends, collectives fail at all the others, and often sooner than
        Ray tells of the death. So every rank is asked for a sign of life before one of them is
        blamed; a rank that died is to blame, else the one that failed first.
        """
        told = next((error for error in errors if isinstance(error, actor.ProcessDied)), None)
        return told or await actor.first_death(self.ranks, _SIGN_OF_LIFE_S) or errors[0]

    def _placed(self, parts: Sequence["_Part"]) -> Iterator[tuple[TorchTrainRank, "_Part"]]:
        """Every rank with the rows that it works on."""
        for number, rank in enumerate(self.ranks):
            yield rank, parts[self._settings.part_of(number, len(self.ranks))]

    def _first_of_each(self, found: Sequence[T]) -> Sequence[T]:
        """Results of ranks that work on the same rows, once."""
        tells, world_size = self._settings.tells, len(self.ranks)
        return [result for number, result in enumerate(found) if tells(number, world_size)]

    async def _in_two_passes(
        self, batch: TrainBatch, objective: BatchObjective, which: TrainedRole, scope: LossScope
    ) -> dict[str, float]:
        outputs = await self.forward(batch, which, objective.needs_entropy)
        gradient, share = updates.gradient_at_outputs(outputs, batch, objective, scope)
        parts = self._parts(batch, which, objective)
        await self._each(
            [
                rank.backward_from(
                    part.batch,
                    {name: values[part.rows] for name, values in gradient.items()},
                    which,
                    part.plan,
                )
                for rank, part in self._placed(parts)
            ]
        )
        return updates.Share.total([share], objective.loss_name)

    def _parts(
        self, batch: TrainBatch, which: ModelRole, objective: BatchObjective | None
    ) -> list["_Part"]:
        """Each rank's rows, and its micro-batches: as many for all, idle ones at the same place."""
        settings = self._settings
        rule = settings.rule(which, with_gradient=objective is not None)
        if rule.max_tokens is not None:
            rule = replace(rule, max_tokens=rule.max_tokens * settings.ranks_per_row)
        idle = torch.zeros(len(batch), dtype=torch.bool)
        if objective is not None:
            idle = objective.idle_rows(batch)
        num_parts = len(self.ranks) // settings.ranks_per_row
        shares = split_rows(batch, num_parts, settings.balances_ranks)
        plans = []
        for rows in shares:
            own = batch.select(rows)
            plans.append(
                plan_micro_batches(own, rule, idle[rows], settings.shares_prefixes) if rows else []
            )
        return [
            _Part.of(batch, rows, plan) for rows, plan in zip(shares, _align(plans), strict=True)
        ]


class _Part:
    """What one rank works on; without rows it holds one of another rank's, which counts nothing."""

    def __init__(self, batch: TrainBatch, rows: list[int], plan: list[MicroBatch]) -> None:
        self.batch, self.rows, self.plan = batch, rows, plan

    @classmethod
    def of(cls, batch: TrainBatch, rows: list[int], plan: list[MicroBatch]) -> "_Part":
        some = int(batch["action_mask"].any(dim=1).int().argmax())  # any, if none is trained
        return cls(batch.select(rows or [some]), rows, plan)


def writing_turns(strategy: SaveStrategy, hosts: Sequence[str]) -> list[list[int]]:
    """Which ranks write at the same time, turn by turn."""
    if strategy == "unrestricted":
        return [list(range(len(hosts)))]
    if strategy == "single_node":
        return [[n for n, own in enumerate(hosts) if own == host] for host in dict.fromkeys(hosts)]
    return [[number] for number in range(len(hosts))]


def _align(plans: Sequence[list[MicroBatch]]) -> list[list[MicroBatch]]:
    """Plans filled up with empty micro-batches: busy ones first, then idle ones, on all ranks."""
    busy = [[micro for micro in plan if not micro.is_idle] for plan in plans]
    idle = [[micro for micro in plan if micro.is_idle] for plan in plans]
    most_busy, most_idle = max(map(len, busy)), max(map(len, idle))
    return [
        b
        + [MicroBatch([])] * (most_busy - len(b))
        + i
        + [MicroBatch([], is_idle=True)] * (most_idle - len(i))
        for b, i in zip(busy, idle, strict=True)
    ]
