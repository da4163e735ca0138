"""AdamW on the float32 masters of a model's weights."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from trinity.trainer.backends.torch.masters import SplitMasters, untouched_zeros
from trinity.trainer.backends.torch.schedule import Schedule

if TYPE_CHECKING:
    from trinity.trainer.backends.torch.weights import Weights  # brings transformers


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

    def __init__(self, weights: "Weights", settings: OptimizerSettings) -> None:
        self.weights = weights
        self.settings = settings
        self.num_steps = 0
        self.infinite: list[str] = []
        """Weights whose gradient kept the last step from being made, of those held here."""
        self._adam = torch.optim.AdamW(
            list(weights.leaves.items()),
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        if weights.split is not None:  # else Adam makes them at its first step
            shapes = [weight.shape for weight in weights.split.weights.values()]
            moments = (untouched_zeros(shapes, torch.float32) for _ in range(2))
            for weight, first, second in zip(weights.split.weights.values(), *moments, strict=True):
                state = {"step": torch.zeros(()), "exp_avg": first, "exp_avg_sq": second}
                self._adam.state[weight] = state

    @torch.no_grad()
    def step(self) -> dict[str, float]:
        """Clip, update, drop the gradients. A gradient that is not finite changes nothing."""
        self.weights.collect()
        norm = self.weights.gradient_norm()
        lr = self.settings.lr * self.settings.schedule.factor(self.num_steps)
        metrics = {"grad_norm": float(norm), "lr": lr}
        is_finite = math.isfinite(metrics["grad_norm"])
        self.infinite = [] if is_finite else self.weights.infinite_gradients()
        if not is_finite:
            metrics["skipped_updates"] = 1.0
        else:
            self._clip(norm)
            self._adam.param_groups[0]["lr"] = lr
            if self.weights.split is None:
                self._adam.step()
                self.weights.publish()
            else:
                self._step_split(self.weights.split)
        self.weights.drop_gradients()
        self.num_steps += 1
        return metrics

    @property
    def coming_bytes(self) -> int:
        """GPU memory that a step takes beyond what is there: gradients, and moments at first."""
        copies = 1 if self.num_steps else 3
        return sum(copies * leaf.nbytes for leaf in self.weights.leaves.values() if leaf.is_cuda)

    def _step_split(self, masters: SplitMasters) -> None:
        for name, weight in masters.weights.items():
            state = self._adam.state[weight]
            parts = (masters.gradients[name], state["exp_avg"], state["exp_avg_sq"])
            flat = [part.view(-1) for part in parts]
            masters.change(name, partial(self._step_block, flat, state["step"]))
            state["step"] += 1

    def _step_block(self, flat: list[Tensor], step: Tensor, block: slice, values: Tensor) -> None:
        group = self._adam.param_groups[0]
        beta1, beta2 = group["betas"]
        gradient, first, second = ([part[block]] for part in flat)
        adamw(
            *([values], gradient, first, second, [], [step.clone()]),
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _clip(self, norm: Tensor) -> None:
        if self.settings.clip_grad and norm.is_cuda:  # the step itself divides by it
            self._adam.grad_scale = ((norm + 1e-6) / self.settings.clip_grad).clamp(min=1.0)  # type: ignore[attr-defined]  # read by fused AdamW
        elif self.settings.clip_grad:
            scale = (self.settings.clip_grad / (norm + 1e-6)).clamp(max=1.0)
            if scale < 1:
                torch._foreach_mul_(self.weights.gradients(), scale)

    def state_dict(self) -> dict[str, object]:
        """As any PyTorch optimizer's, with the names of its parameters; moments as checkpointed."""
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
        leaves = self.weights.leaves
        missing = sorted(set(leaves) - set(moments)) if moments else []
        if missing:
            raise ValueError(
                f"The optimizer state has no entry for {missing[0]} ({len(missing)} are missing)."
            )
        for name, leaf in leaves.items() if moments else ():
            found = {
                entry: self.weights.localize(name, value) if value.ndim else value.clone()
                for entry, value in moments[name].items()
            }
            if self.weights.split is None:
                self._adam.state[leaf] = found
            else:
                for entry, value in found.items():
                    self._adam.state[leaf][entry].copy_(value)
        self.num_steps = num_steps
