"""AdamW on the float32 masters of a model's weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trinity.trainer.backends.torch.schedule import Schedule
from trinity.trainer.backends.torch.weights import Weights


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
    """Steps the masters of ``weights`` by their gradients."""

    def __init__(self, weights: Weights, settings: OptimizerSettings) -> None:
        self.weights = weights
        self.settings = settings
        self.num_steps = 0
        self._adam = torch.optim.AdamW(
            list(weights.masters.items()),
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self._has_moments = not weights.keeps_gradients  # else Adam makes them at its first step
        if weights.keeps_gradients:
            for master in weights.masters.values():  # their place, for the same reason as there
                moments = {name: torch.empty_like(master) for name in ("exp_avg", "exp_avg_sq")}
                self._adam.state[master] = {"step": torch.zeros(()), **moments}

    @torch.no_grad()
    def step(self) -> dict[str, float]:
        """Clip, update, drop the gradients. A gradient that is not finite changes nothing."""
        self.weights.collect()
        norm = self.weights.gradient_norm()
        lr = self.settings.lr * self.settings.schedule.factor(self.num_steps)
        metrics = {"grad_norm": float(norm), "lr": lr}
        if not torch.isfinite(norm):
            metrics["skipped_updates"] = 1.0
        else:
            self._clip(norm)
            self._adam.param_groups[0]["lr"] = lr
            self._fill_moments()
            self._adam.step()
            self.weights.publish()
        self.weights.drop_gradients()
        self.num_steps += 1
        return metrics

    @property
    def coming_bytes(self) -> int:
        """GPU memory that a step takes beyond what is there: gradients, and moments at first."""
        copies = 1 if self.num_steps else 3
        return sum(copies * m.nbytes for m in self.weights.masters.values() if m.is_cuda)

    def _fill_moments(self) -> None:
        if not self._has_moments:
            for state in self._adam.state.values():
                for name in ("exp_avg", "exp_avg_sq"):
                    state[name].zero_()
        self._has_moments = True

    def _clip(self, norm: Tensor) -> None:
        if self.settings.clip_grad and norm.is_cuda:  # the step itself divides by it
            self._adam.grad_scale = ((norm + 1e-6) / self.settings.clip_grad).clamp(min=1.0)  # type: ignore[attr-defined]  # read by fused AdamW
        elif self.settings.clip_grad:
            scale = (self.settings.clip_grad / (norm + 1e-6)).clamp(max=1.0)
            if scale < 1:
                gradients = [m.grad for m in self.weights.masters.values() if m.grad is not None]
                torch._foreach_mul_(gradients, scale)

    def state_dict(self) -> dict[str, object]:
        """As any PyTorch optimizer's, with the names of its parameters; moments as checkpointed."""
        self._fill_moments()
        state = self._adam.state_dict()
        names = state["param_groups"][0]["param_names"]
        state["state"] = {
            index: {
                key: self.weights.globalize(names[index], value) if value.ndim else value
                for key, value in entry.items()
            }
            for index, entry in state["state"].items()
        }
        return state

    def load_state_dict(self, moments: Mapping[str, Mapping[str, Tensor]], num_steps: int) -> None:
        """Take up whole moments by parameter name; rates and decay stay those of the settings.

        Raises:
            ValueError: A parameter has none.
        """
        missing = sorted(set(self.weights.masters) - set(moments)) if moments else []
        if missing:
            raise ValueError(
                f"The optimizer state has no entry for {missing[0]} ({len(missing)} are missing)."
            )
        self._has_moments |= bool(moments)
        for name, master in self.weights.masters.items() if moments else ():
            self._adam.state[master] = {
                key: self.weights.localize(name, value) if value.ndim else value.clone()
                for key, value in moments[name].items()
            }
        self.num_steps = num_steps
