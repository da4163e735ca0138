"""The trained weights of a model: float32 masters, whatever dtype the model computes in."""

from collections.abc import Callable, Iterator, Mapping, Set

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trinity.common.models.gradients import GradientSum, gather_gradients
from trinity.common.models.loading import cast_parameters
from trinity.trainer.backends.torch.masters import SplitMasters


class Weights:
    """Masters of a model in one process, and the gradients that gather there.

    Where the model computes in float32, a parameter is its own master. For any other dtype each
    backward pass adds its gradient to the master's in float32 at once and frees it: mixed
    precision as FSDP does it, with gradients reduced in float32. In bfloat16 on the CPU a master is
    kept as what its weight lacks (`SplitMasters`), and gradients have their memory for good: made
    in a pass they would lie between activations, and cut the memory into pieces.

    Attributes:
        masters: By name. Whose are split are to be read only; `load` changes them.
        split: They too, if they are split.

    Args:
        model: In float32; its parameters are cast to ``dtype``.
        dtype: What the model computes in.
        device: Where masters are kept; None: with the model. "cpu" takes the optimizer's state off
            a GPU.
    """

    masters: Mapping[str, Tensor]
    split: SplitMasters | None = None

    def __init__(
        self, model: PreTrainedModel, dtype: torch.dtype, device: str | None = None
    ) -> None:
        self.model = model
        self.dtype = dtype
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if dtype == torch.bfloat16 and all(p.is_cpu for p in trained.values()):
            self.masters = self.split = split = SplitMasters(trained)
            cast_parameters(model, dtype)
            self._shadows = []
            for name, parameter in trained.items():
                gather_gradients(parameter, GradientSum(split.gradients[name]))
            return
        is_same = dtype == torch.float32 and device in (None, str(model.device))
        masters = {
            name: p if is_same else nn.Parameter(p.detach().to(device or p.device))
            for name, p in trained.items()
        }
        self.masters = masters
        cast_parameters(model, dtype)
        self._shadows = [] if is_same else [(p, masters[n]) for n, p in trained.items()]
        for parameter, master in self._shadows:
            gather_gradients(parameter, master)

    def gradients(self) -> list[Tensor]:
        """Those that there are, of the masters."""
        if self.split is not None:
            return list(self.split.gradients.values())
        return [m.grad for m in self.masters.values() if m.grad is not None]

    def collect(self) -> None:
        """Have every master hold its gradient, 0 where there was none."""
        for master in self.masters.values() if self.split is None else ():
            if master.grad is None:
                master.grad = torch.zeros_like(master)

    def drop_gradients(self) -> None:
        """Forget all gradients."""
        if self.split is not None:
            torch._foreach_zero_(self.gradients())
            return
        for master in self.masters.values():
            master.grad = None

    def gradient_norm(self) -> Tensor:
        """L2 norm over all masters."""
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(self.gradients())))

    def infinite_gradients(self) -> list[str]:
        """Names of the masters whose gradient is not finite, in the part that is held here."""
        held = {name: master.grad for name, master in self.masters.items()}
        if self.split is not None:
            held = dict(self.split.gradients)
        return [name for name, g in held.items() if g is not None and not g.isfinite().all()]

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the model, where they are not split."""
        if self._shadows:
            parameters, masters = zip(*self._shadows, strict=True)
            torch._foreach_copy_(list(parameters), list(masters))

    @property
    def leaves(self) -> Mapping[str, Tensor]:
        """The masters, or the weights whose masters are split: what an optimizer knows them by."""
        return self.masters if self.split is None else self.split.weights

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

        Of a model that is trained in part, that part. Where masters are split these are copies.
        """
        if self.is_partial:
            return {name: master.detach() for name, master in self.masters.items()}
        masters = {id(p): self.masters.get(name) for name, p in self.model.named_parameters()}
        found = {}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            master = masters.get(id(tensor))
            is_own = master is None and self.split is not None
            found[name] = (
                tensor.clone() if is_own else tensor if master is None else master
            ).detach()
        return found

    def saved_names(self) -> Set[str]:
        """The names in `state_dict`."""
        return self.masters.keys() if self.is_partial else self.model.state_dict().keys()

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
            if self.split is not None and name in self.split:
                self.split.set(name, whole)
                continue
            parameter.copy_(whole)
            if name in self.masters:
                self.masters[name].copy_(whole)

    def localize(self, name: str, whole: Tensor) -> Tensor:
        """The part of a tensor shaped like master ``name`` that belongs to this process."""
        return whole.to(self.leaves[name].device, copy=True)

    def globalize(self, name: str, part: Tensor) -> Tensor:
        """The inverse of `localize`, as a checkpoint holds it."""
        return part
