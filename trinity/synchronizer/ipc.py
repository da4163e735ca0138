"""Weights between processes on the same GPUs: `IPCChannel` shares the memory they lie in.

Nothing is copied but from the trainer's weights into the engine's. The trainer must not change
them before all engines have loaded: in mode `colocate` it waits for what they sample next.
"""

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from trinity.common.models.protocol import WeightTicket
from trinity.synchronizer.channel import NamedTensors
from trinity.utils.digest import weights_digest

METHOD = "ipc"

#: By the id of a GPU: where the weights lie on it.
Handles = Mapping[str, bytes]

_DEVICE = 6  # which of what a tensor is rebuilt from is the number of its GPU


class IPCChannel:
    """The trainer's end: of each of its ranks, which all hold whole weights while they are sent."""

    method = METHOD

    def __init__(self) -> None:
        self._sent: list[tuple[str, Tensor]] = []

    def send(self, version: int, weights: NamedTensors) -> WeightTicket:
        """Tell where the weights are; what the trainer only reserves goes back to the GPU."""
        self._sent = list(weights)
        digest = weights_digest(self._sent)
        handles = pickle.dumps([(name, reduce_tensor(tensor)) for name, tensor in self._sent])
        torch.cuda.synchronize()
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
        return WeightTicket(version, METHOD, digest, {_own_gpu(): handles})

    def let_go(self) -> None:
        """Engines have loaded: weights that were put together to be sent are needed no more."""
        self._sent.clear()

    def before_change(self) -> None:
        """Engines have loaded: the trainer has their samples."""

    def close(self) -> None:
        """Forget the weights."""
        self._sent.clear()


def together(tickets: Sequence[WeightTicket]) -> WeightTicket:
    """One ticket for the weights that each rank holds on its own GPU; the first's otherwise."""
    first = tickets[0]
    if first.method != METHOD:
        return first
    payloads = [cast(Handles, ticket.payload) for ticket in tickets]
    return replace(first, payload={gpu: own for part in payloads for gpu, own in part.items()})


def open_handles(payload: Handles) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a ticket's payload that lie on this process's GPU, in the trainer's memory.

    They must not be written to. The payload comes from the trainer of the same run, over Ray.

    Raises:
        ValueError: No rank of the trainer is on this GPU.
    """
    gpu = _own_gpu()
    if gpu not in payload:
        raise ValueError(f"The trainer has no rank on GPU {gpu}: its weights are on {[*payload]}.")
    handles: list[tuple[str, Any]] = pickle.loads(payload[gpu])
    for name, (rebuild, arguments) in handles:
        own = [*arguments]
        own[_DEVICE] = torch.cuda.current_device()
        yield name, rebuild(*own)


def _own_gpu() -> str:
    """Id of the GPU that this process computes on, the same in every process."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
