"""New weights to vLLM's workers, by whichever channel they come, and the proof that they came."""

import asyncio
import contextlib
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from typing import cast

import torch
from safetensors.torch import load
from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
from vllm.v1.engine.async_llm import AsyncLLM

from trinity.common.models.protocol import WeightTicket
from trinity.engine.vllm.adapter import ServedAdapter
from trinity.engine.vllm.shipping import Shapes, ticket_files
from trinity.synchronizer import ipc, nccl
from trinity.synchronizer.channel import open_weights


class WeightReceiver:
    """Puts the weights of tickets in place, in one vLLM process group; a new one needs a new one.

    Args:
        shapes, dtype: Of the model's weights.
        num_workers: Processes that take weights by NCCL.
        adapter: All weights are for it; None: for the whole model.
        engine: Name of the engine, the same in all its process groups; None: it has but one.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        shapes: Shapes,
        dtype: torch.dtype,
        num_workers: int,
        adapter: ServedAdapter | None,
        engine: str | None = None,
    ) -> None:
        self._llm, self._shapes, self._dtype = llm, shapes, dtype
        self._num_workers, self._adapter = num_workers, adapter
        self._engine = engine
        self._group = f"engine_{uuid.uuid4().hex[:12]}"  # among all that take weights by NCCL
        self._base: int | None = None

    async def receive(self, ticket: WeightTicket) -> tuple[str, int]:
        """Digest and version of what then is in place.

        Raises:
            RuntimeError: The digest is not the ticket's.
            ValueError: Names, shapes or dtypes don't fit.
        """
        base, self._base = self._base, None
        if self._adapter is not None:
            return await self._adapter_weights(self._adapter, ticket), ticket.version
        if ticket.method == nccl.METHOD:
            return await self._by_nccl(cast(nccl.Meeting, ticket.payload), base)
        if ticket.method == ipc.METHOD:
            found = await self._llm.collective_rpc("receive_by_ipc", args=(ticket.payload,))
            return _the_one(found, ticket), ticket.version
        return await self._files(ticket), ticket.version

    async def _by_nccl(self, meeting: nccl.Meeting, base: int | None) -> tuple[str, int]:
        count = self._num_workers
        request = await asyncio.to_thread(nccl.ask, meeting, self._group, count, base, self._engine)
        arguments = (asdict(meeting), request, self._group, count, base is not None)
        found = await self._llm.collective_rpc("receive_by_nccl", args=arguments)
        digest, version, _ = found[0]
        if meeting.sends_delta and all(can_change for _, _, can_change in found):
            self._base = int(version)
        return str(digest), int(version)

    async def _adapter_weights(self, adapter: ServedAdapter, ticket: WeightTicket) -> str:
        if ticket.method == ipc.METHOD:
            found = await self._llm.collective_rpc("fetch_by_ipc", args=(ticket.payload,))
            weights = iter(load(found[0]).items())
        else:
            weights = open_weights(ticket)
        await asyncio.to_thread(adapter.write, weights, self._dtype)
        arguments = (str(adapter.folder), adapter.name)
        digests = await self._llm.collective_rpc("adapter_digest", args=arguments)
        await self._llm.add_lora(adapter.update)
        return _the_one(digests, ticket)

    async def _files(self, ticket: WeightTicket) -> str:
        llm = self._llm
        files = ticket_files(ticket, self._shapes, self._dtype)
        with contextlib.closing(files):
            found = await asyncio.to_thread(next, files, None)
            await llm.start_weight_update()
            try:
                while found is not None:
                    path, is_first = found
                    update = {"path": path, "is_first": is_first}
                    await llm.update_weights(WeightTransferUpdateRequest(update_info=update))
                    found = await asyncio.to_thread(next, files, None)
            except Exception:
                with contextlib.suppress(Exception):  # what went wrong first is what counts
                    await llm.finish_weight_update()
                raise
            await llm.finish_weight_update()
        return _the_one(await llm.collective_rpc("received_digest"), ticket)


def _the_one(digests: Sequence[str], ticket: WeightTicket) -> str:
    """The digest that all workers report, which must be the ticket's."""
    if ticket.digest and set(digests) != {ticket.digest}:
        raise RuntimeError(
            f"After loading version {ticket.version} vLLM's workers report the digests "
            f"{sorted(set(digests))}, but the trainer sent {ticket.digest}."
        )
    return str(digests[0])
