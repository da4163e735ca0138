"""When explorer and trainer exchange weights: the sync styles as plain arithmetic on steps."""

import math
from dataclasses import dataclass, replace
from fractions import Fraction

from trinity.common.constants import SyncStyle


@dataclass(frozen=True)
class TrainerRhythm:
    """What a trainer tells of itself to the explorer of another command.

    Args:
        rows: An explorer's experiences that a step of it takes; 0: none.
        interval: Steps between two publications.
    """

    rows: int
    interval: int = 1


@dataclass(frozen=True)
class SyncSchedule:
    """The rhythm of weight synchronisation.

    Args:
        style: ``fixed``: both sides every ``interval`` steps, the explorer waits for the version it
            is due. ``explorer_driven``: the explorer asks every ``interval`` of its steps and
            waits; the trainer answers after its current step. ``trainer_driven``: the trainer
            publishes every ``trainer_interval`` of its steps, the explorer takes the newest at its
            own rhythm without waiting. ``fully_async``: as that, and the explorer looks before
            every step.
        interval: Explorer steps between two syncs.
        trainer_interval: Trainer steps between two publications.
        offset: Explorer steps that may run ahead of the trainer.
        trainer_steps: Trainer steps that the experiences of one explorer step make.
        rows: Experiences that an explorer step makes; 0: not told.
        published_every: With ``fixed``, versions are multiples of this, whatever the rest says.
    """

    style: SyncStyle = SyncStyle.FIXED
    interval: int = 1
    trainer_interval: int = 1
    offset: int = 0
    trainer_steps: Fraction = Fraction(1)
    rows: int = 0
    published_every: int = 1

    def beside(self, trainer: TrainerRhythm | None) -> "SyncSchedule":
        """An explorer's schedule beside ``trainer``; None: the schedule knows it already."""
        if trainer is None or not (trainer.rows and self.rows):
            return self
        steps = Fraction(self.rows, trainer.rows)
        return replace(self, trainer_steps=steps, published_every=trainer.interval)

    def is_explorer_due(self, step: int) -> bool:
        """Whether the explorer takes new weights after its step ``step`` (counted from 1)."""
        if self.style is SyncStyle.FULLY_ASYNC:
            return True
        return step > self.offset and (step - self.offset) % self.interval == 0

    def version_due(self, step: int) -> int | None:
        """The version the explorer must have to go on after ``step``; None: it doesn't wait."""
        if self.style is SyncStyle.FIXED:
            syncs = max(0, (step - self.offset) // self.interval)
            made = math.floor(syncs * self._trainer_steps_per_sync)
            return made - made % self.published_every
        return None

    def is_trainer_due(self, step: int, is_requested: bool) -> bool:
        """Whether the trainer publishes after its step ``step``."""
        if self.style is SyncStyle.EXPLORER_DRIVEN:
            return is_requested
        if self.style is not SyncStyle.FIXED:
            return step % self.publication_interval == 0
        span = self._trainer_steps_per_sync
        return math.floor(math.ceil(step / span) * span) == step

    @property
    def publication_interval(self) -> int:
        """Steps of a trainer that knows nothing of its explorer's, between two publications."""
        return self.interval if self.style is SyncStyle.FIXED else self.trainer_interval

    @property
    def _trainer_steps_per_sync(self) -> Fraction:
        return self.interval * self.trainer_steps

    @property
    def max_off_policy(self) -> int | None:
        """Most versions an experience can be behind the weights it trains; None: unbounded."""
        if self.style is not SyncStyle.FIXED:
            return None
        ahead = (self.interval + self.offset) * self.trainer_steps
        parts = self._trainer_steps_per_sync.denominator
        rounding = Fraction(parts - 1, parts)  # a sync may fall inside a trainer step
        return max(0, math.ceil(ahead + rounding) - 1)
