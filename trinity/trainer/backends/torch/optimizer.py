"""AdamW on float32 weights, whatever dtype the model computes in."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from trinity.trainer.backends.torch.schedule import Schedule


@dataclass(frozen=True)
class OptimizerSettings:
    """As the ``algorithm.optimizer`` section; ``clip_grad`` is the largest gradient norm."""

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    eps: float = 1e-8
    clip_grad: float | None = 1.0
    schedule: Schedule = field(default_factory=Schedule)


class MasterOptimizer:
    """Keeps a float32 master of every trained parameter, gathers its gradient there and steps.

    A parameter that is float32 is its own master. For any other dtype each backward pass adds its
    gradient to the master's in float32 at once and frees it, and a step rounds the new master into
    the parameter: mixed precision as FSDP does it, with gradients reduced in float32.
    """

    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], settings: OptimizerSettings
    ) -> None:
        self.settings = settings
        self.num_steps = 0
        self._model: dict[str, nn.Parameter] = {n: p for n, p in parameters if p.requires_grad}
        self.masters = {name: _master_of(p) for name, p in self._model.items()}
        for name, parameter in self._model.items():
            if self.masters[name] is not parameter:
                parameter.register_post_accumulate_grad_hook(self._gather(self.masters[name]))
        self._adam = torch.optim.AdamW(
            self.masters.values(),
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    @staticmethod
    def _gather(master: nn.Parameter) -> Callable[[Tensor], None]:
        def add(parameter: Tensor) -> None:
            assert parameter.grad is not None
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad.add_(parameter.grad)
            parameter.grad = None

        return add

    @torch.no_grad()
    def step(self) -> dict[str, float]:
        """Clip, update, drop the gradients. A gradient that is not finite changes nothing."""
        for master in self.masters.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        bound = self.settings.clip_grad or float("inf")
        norm = nn.utils.clip_grad_norm_(self.masters.values(), bound)
        lr = self.settings.lr * self.settings.schedule.factor(self.num_steps)
        metrics = {"grad_norm": float(norm), "lr": lr}
        if not torch.isfinite(norm):
            metrics["skipped_updates"] = 1.0
        else:
            self._adam.param_groups[0]["lr"] = lr
            self._adam.step()
            self.write_to_model()
        self._adam.zero_grad(set_to_none=True)
        self.num_steps += 1
        return metrics

    @torch.no_grad()
    def write_to_model(self) -> None:
        """Round the masters into the model's parameters."""
        pairs = [(p, m) for n, p in self._model.items() if (m := self.masters[n]) is not p]
        if pairs:
            torch._foreach_copy_([p for p, _ in pairs], [m for _, m in pairs])

    def state_dict(self) -> dict[str, object]:
        """State by parameter name, and the group's settings (`load_state_dict` takes it back)."""
        names = list(self.masters)
        whole = self._adam.state_dict()
        state = {names[index]: entry for index, entry in whole["state"].items()}
        group = {k: v for k, v in whole["param_groups"][0].items() if k != "params"}
        return {"state": state, "param_groups": [{**group, "params": names}]}

    def load_state_dict(self, state: Mapping[str, object], num_steps: int) -> None:
        """Take up the moments of `state_dict`; rates and decay stay those of the settings."""
        entries: Mapping[str, Mapping[str, Tensor]] = state["state"]  # type: ignore[assignment]  # by state_dict
        missing = sorted(set(self.masters) - set(entries)) if entries else []
        if missing:
            raise ValueError(f"The optimizer state has no entry for {missing[0]} ({len(missing)}).")
        for name, master in self.masters.items():
            if entries:
                self._adam.state[master] = {k: v.clone() for k, v in entries[name].items()}
        self.num_steps = num_steps


def _master_of(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.dtype == torch.float32:
        return parameter
    return nn.Parameter(parameter.detach().float())
