"""Weights between two processes on one GPU: `IPCChannel` shares the memory they lie in.

Nothing is copied but from the trainer's weights into the engine's. The trainer must not change
them before all engines have loaded: in mode `colocate` it waits for what they sample next.
"""

import pickle
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from trinity.common.models.protocol import WeightTicket
from trinity.synchronizer.channel import NamedTensors
from trinity.utils.digest import weights_digest

METHOD = "ipc"


class IPCChannel:
    """The trainer's end."""

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
        return WeightTicket(version, METHOD, digest, handles)

    def before_change(self) -> None:
        """Engines have loaded: the trainer has their samples."""

    def close(self) -> None:
        """Forget the weights."""
        self._sent.clear()


def open_handles(payload: bytes) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a ticket's payload, in the trainer's own memory. They must not be written to.

    The payload comes from the trainer of the same run, over Ray.
    """
    handles: list[tuple[str, Any]] = pickle.loads(payload)
    for name, (rebuild, arguments) in handles:
        yield name, rebuild(*arguments)
