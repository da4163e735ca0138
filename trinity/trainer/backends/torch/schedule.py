"""The learning rate over a run, as a factor of its peak."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Warm-up, then the full rate or a cosine decay. Plain arithmetic: no state but the step.

    Args:
        kind: "constant" or "cosine".
        warmup_steps: Steps until the full rate; -1: ``warmup_ratio`` of all steps.
        warmup_ratio: See ``warmup_steps``.
        total_steps: Steps of the run; needed by a decay and by a ratio.
        min_ratio: Where a decay ends, as a share of the peak.
    """

    kind: str = "constant"
    warmup_steps: int = -1
    warmup_ratio: float = 0.0
    total_steps: int | None = None
    min_ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in ("constant", "cosine"):
            raise ValueError(f"lr_scheduler_type is {self.kind!r}; choose 'constant' or 'cosine'.")
        has_ratio = self.warmup_steps < 0 and self.warmup_ratio > 0
        if self.total_steps is None and (self.kind != "constant" or has_ratio):
            raise ValueError(
                f"lr_scheduler_type {self.kind!r} with lr_warmup_steps_ratio {self.warmup_ratio} "
                "needs to know the number of steps: set trainer.total_steps or buffer.total_steps, "
                "or use 'constant' with lr_warmup_steps."
            )

    @property
    def num_warmup_steps(self) -> int:
        if self.warmup_steps >= 0:
            return self.warmup_steps
        return int(self.warmup_ratio * (self.total_steps or 0))

    def factor(self, step: int) -> float:
        """The factor for optimizer step ``step``, counted from 0.

        The last warm-up step, number ``num_warmup_steps - 1``, is the first at the full rate; the
        last step of the run is one before the decay would reach ``min_ratio``.
        """
        warmup = self.num_warmup_steps
        if step < warmup:
            return (step + 1) / warmup
        if self.kind == "constant":
            return 1.0
        assert self.total_steps is not None
        done = min((step - warmup) / max(self.total_steps - warmup, 1), 1.0)
        return self.min_ratio + (1 - self.min_ratio) * 0.5 * (1 + math.cos(math.pi * done))
