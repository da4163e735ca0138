"""When the weights of a sharded model are whole, and when its gradients are added up over ranks."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


class Gathering:
    """The passes of a call through a sharded model.

        pass, before_backward, backward, pass, ... -> rest

    A layer is whole while a pass is in it, and each backward pass adds its gradients up over the
    ranks. With ``gathers_once`` weights are put together in the first pass and stay whole until
    `rest`, and gradients are added up in the last backward pass alone; until then they are whole
    too, in float32. That spares what a pass of a small model else spends most of its time on.

    Args:
        backbone: The model, sharded.
        outside: Modules and names of trained parameters that are in no layer.
        whole_bytes: What that takes: of all weights, and of the gradients of those trained.
        gathers_once: Do so once a call.
    """

    def __init__(
        self,
        backbone: nn.Module,
        outside: Sequence[tuple[nn.Module, str]],
        whole_bytes: int,
        gathers_once: bool,
    ) -> None:
        self._sharded = [m for m in backbone.modules() if isinstance(m, FSDPModule)]
        self._outside = outside
        self._gathers_once = gathers_once
        self.coming_bytes = whole_bytes if gathers_once else 0
        """What a call takes for whole weights and gradients, layers that come and go left out."""
        self.is_due = False
        """Whether gradients of passes wait to be added up."""

    def before_backward(self, is_last: bool) -> None:
        """Give what lies outside the layers a gradient on every rank, as summing up demands.

        Args:
            is_last: No backward pass of this call is sure to follow.
        """
        for module, name in self._outside:
            parameter = getattr(module, name)
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if not self._gathers_once:
            return
        for part in self._sharded:
            part.set_requires_gradient_sync(is_last, recurse=False)
            part.set_reshard_after_backward(is_last, recurse=False)
        self.is_due = not is_last

    def rest(self) -> None:
        """Free what has been put together."""
        for part in self._sharded:
            part.reshard()
        self.is_due = False
