"""Where gradients of a weight add up in float32, if that is not its own ``grad``."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trinity.common.models import kernels

_MASTER = "_trinity_master"


@dataclass
class GradientSum:
    """A master that is no tensor: only the place for its gradient."""

    grad: Tensor

    @property
    def device(self) -> torch.device:
        """Where gradients add up."""
        return self.grad.device


def gather_gradients(parameter: nn.Parameter, master: nn.Parameter | GradientSum) -> None:
    """Have a parameter's gradients go to its master."""

    def add(parameter: Tensor) -> None:
        if parameter.grad is None:  # it went to the master by itself
            return
        if master.grad is None:
            master.grad = parameter.grad.to(master.device, torch.float32)
        else:
            master.grad.add_(parameter.grad.to(master.device))
        parameter.grad = None

    parameter.register_post_accumulate_grad_hook(add)
    setattr(parameter, _MASTER, master)


def gradient_of_master(weight: Tensor) -> Tensor | None:
    """Where gradients of a parameter add up in float32, for who computes one part by part.

    None if it has no master of its own: then its gradient goes the usual way.
    """
    master = getattr(weight, _MASTER, None)
    if master is None or master.device != weight.device:
        return None
    if master.grad is None:
        master.grad = torch.zeros_like(master)
    found: Tensor = master.grad
    return found


def product_gradient(weight_KN: Tensor, left_MK: Tensor, right_MN: Tensor) -> Tensor | None:
    """``left.T @ right``, the gradient at a weight; None if it was added to the master's."""
    total = gradient_of_master(weight_KN)
    if total is None:
        return left_MK.t() @ right_MN
    kernels.add_transposed_product(total, left_MK, right_MN)
    return None
