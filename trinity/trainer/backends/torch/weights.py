"""The trained weights of a model: float32 masters, whatever dtype the model computes in."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trinity.common.models.loading import cast_parameters

_MASTER = "_trinity_master"


class Weights:
    """Masters of a model in one process, and the gradients that gather there.

    Where the model computes in float32, a parameter is its own master. For any other dtype each
    backward pass adds its gradient to the master's in float32 at once and frees it: mixed
    precision as FSDP does it, with gradients reduced in float32. On the CPU the masters' gradients
    are made first and stay where they are: made later they would lie between activations, and cut
    the memory into pieces.

    Attributes:
        keeps_gradients: Whether gradients have their memory for good.

    Args:
        model: In float32; its parameters are cast to ``dtype``.
        dtype: What the model computes in.
        device: Where masters are kept; None: with the model. "cpu" takes the optimizer's state off
            a GPU.
    """

    keeps_gradients = False

    def __init__(
        self, model: PreTrainedModel, dtype: torch.dtype, device: str | None = None
    ) -> None:
        self.model = model
        self.dtype = dtype
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        is_same = dtype == torch.float32 and device in (None, str(model.device))
        self.masters = {
            name: p if is_same else nn.Parameter(p.detach().to(device or p.device))
            for name, p in trained.items()
        }
        cast_parameters(model, dtype)
        self._shadows = [] if is_same else [(p, self.masters[n]) for n, p in trained.items()]
        for parameter, master in self._shadows:
            parameter.register_post_accumulate_grad_hook(_gather_into(master))
            setattr(parameter, _MASTER, master)
        self.keeps_gradients = bool(self._shadows) and not any(p.is_cuda for p, _ in self._shadows)
        if self.keeps_gradients:
            for master in self.masters.values():
                master.grad = torch.zeros_like(master)

    def collect(self) -> None:
        """Have every master hold its gradient, 0 where there was none."""
        for master in self.masters.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)

    def drop_gradients(self) -> None:
        """Forget all gradients."""
        for master in self.masters.values():
            if self.keeps_gradients and master.grad is not None:
                master.grad.zero_()
            else:
                master.grad = None

    def gradient_norm(self) -> Tensor:
        """L2 norm over all masters."""
        norms = torch._foreach_norm([m.grad for m in self.masters.values() if m.grad is not None])
        return torch.linalg.vector_norm(torch.stack(norms))

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the model."""
        if self._shadows:
            parameters, masters = zip(*self._shadows, strict=True)
            torch._foreach_copy_(list(parameters), list(masters))

    @property
    def is_partial(self) -> bool:
        """Whether only some weights are trained, and saved: those of an adapter."""
        return any(not p.requires_grad for p in self.model.parameters())

    def saved_parameters(self) -> dict[str, nn.Parameter]:
        """The model's parameters that checkpoints hold."""
        named = self.model.named_parameters()
        return {name: p for name, p in named if p.requires_grad or not self.is_partial}

    def state_dict(self) -> dict[str, Tensor]:
        """All weights and persistent buffers by the model's own names, in float32.

        Of a model that is trained in part, that part.
        """
        if self.is_partial:
            return {name: master.detach() for name, master in self.masters.items()}
        masters = {id(p): self.masters.get(name) for name, p in self.model.named_parameters()}
        found = {}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            master = masters.get(id(tensor))
            found[name] = (tensor if master is None else master).detach()
        return found

    def export(self, trained_only: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Parameters as the model computes with them, each once, by Hugging Face name."""
        for name, parameter in self.model.named_parameters():
            if name in self.masters or not trained_only:
                yield name, parameter.detach()

    @torch.no_grad()
    def load(self, read: Callable[[str], Tensor]) -> None:
        """Take up weights; ``read`` gives each by its name, whole."""
        for name, parameter in self.saved_parameters().items():
            whole = read(name)
            parameter.copy_(whole)
            if name in self.masters:
                self.masters[name].copy_(whole)

    def localize(self, name: str, whole: Tensor) -> Tensor:
        """The part of a tensor shaped like master ``name`` that belongs to this process."""
        return whole.to(self.masters[name].device, copy=True)

    def globalize(self, name: str, part: Tensor) -> Tensor:
        """The inverse of `localize`, as a checkpoint holds it."""
        return part


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


def _gather_into(master: nn.Parameter) -> Callable[[Tensor], None]:
    def add(parameter: Tensor) -> None:
        if parameter.grad is None:  # it went to the master by itself
            return
        if master.grad is None:
            master.grad = parameter.grad.to(master.device, torch.float32)
        else:
            master.grad.add_(parameter.grad.to(master.device))
        parameter.grad = None

    return add
