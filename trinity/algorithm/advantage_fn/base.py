"""The two families of advantage functions: group operators, and functions of the trainer's batch.

A `GroupAdvantage` is an operator of the experience pipeline: it needs rewards only and works on
experiences, before they are stored. An `AdvantageFn` needs what the trainer computes (values,
log-probabilities, a KL penalty) and works on the padded tensors of a whole optimizer batch.

In both, groups are found by id and never by position, and rows without a trained token count
nowhere: their advantage is 0 and their reward is not read.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from trinity.algorithm.advantage_fn.stats import finite_reward
from trinity.algorithm.base import Method
from trinity.common.experience import Experience, group_by
from trinity.utils.metrics import summarize

Metrics = dict[str, float]
GroupResult = tuple[list[Experience], Metrics]


def is_live(experience: Experience) -> bool:
    """Whether any token of the experience is trained on."""
    mask = experience.action_mask
    return mask is not None and bool(mask.any())


def update_advantage(experience: Experience, advantage: float) -> None:
    """Give every trained token of ``experience`` this advantage, and the same as its return."""
    assert experience.action_mask is not None
    experience.advantages = advantage * experience.action_mask.float()
    experience.returns = experience.advantages.clone()


class GroupAdvantage(Method, ABC):
    """Advantages from the rewards of a group, as an operator over experiences.

    A subclass says what a group's advantages are; `process` groups, leaves masked rows out,
    summarises the groups' metrics and counts what was dropped.
    """

    @classmethod
    def compute_in_trainer(cls) -> bool:
        return False

    def group_experiences(self, exps: Sequence[Experience]) -> dict[str, list[Experience]]:
        """The experiences of each task, by ``eid.tid``."""
        return group_by(exps, "task")

    @abstractmethod
    def calculate_group_advantage(self, group_id: str, exps: list[Experience]) -> GroupResult:
        """Fill in ``advantages`` and ``returns`` of the group; what is left out is dropped."""

    def process(self, exps: Sequence[Experience]) -> GroupResult:
        """Experiences with advantages, in the order they came, and metrics.

        Metrics of the groups come as ``group_advantages/<name>/{mean,max,min}``, and
        ``filtered_count`` counts the experiences of dropped groups.

        Raises:
            ValueError: A reward is missing, NaN or infinite; the message names its ``eid``.
        """
        return self._process_groups(exps, self.calculate_group_advantage)

    @staticmethod
    def summarize(per_group: Sequence[Metrics]) -> Metrics:
        """Mean, max and min over the groups of each of their metrics."""
        return summarize(per_group, "group_advantages")

    def _process_groups(
        self,
        exps: Sequence[Experience],
        calculate: Callable[[str, list[Experience]], GroupResult],
    ) -> GroupResult:
        kept: set[int] = set()
        per_group: list[Metrics] = []
        for group_id, group in self.group_experiences(exps).items():
            live = [experience for experience in group if is_live(experience)]
            masked = [experience for experience in group if not is_live(experience)]
            for experience in masked:
                update_advantage(experience, 0.0)
            result, metrics = calculate(group_id, live) if live else ([], {})
            per_group.append(metrics)
            kept |= {id(experience) for experience in result}
            if result or not live:
                kept |= {id(experience) for experience in masked}
        remaining = [experience for experience in exps if id(experience) in kept]
        metrics = self.summarize(per_group)
        metrics["filtered_count"] = float(len(exps) - len(remaining))
        return remaining, metrics


def group_rewards(exps: Sequence[Experience]) -> list[float]:
    """Rewards of the experiences; where one has only ``token_level_reward``, its sum.

    Raises:
        ValueError: One is missing, NaN or infinite; the message names its ``eid``.
    """
    return [reward_of(experience) for experience in exps]


def reward_of(experience: Experience) -> float:
    """The reward of one experience, as `group_rewards`."""
    reward, by_token = experience.reward, experience.token_level_reward
    if reward is None and by_token is not None:
        reward = float(by_token.double().sum())
    return finite_reward(reward, experience.eid.uid)


class AdvantageFn(Method, ABC):
    """Advantages from a whole optimizer batch of the trainer, as a pure function.

    The batch holds padded tensors by name: ``action_mask`` [B, T] bool, ``token_level_rewards``
    [B, T], ``group_id`` [B] int64 (equal for the rows of one task), and those that ``requires``
    names.
    """

    requires: ClassVar[tuple[str, ...]] = ()
    """Tensors needed beyond rewards, mask and group: ``values``, ``old_logprob``, ..."""

    @classmethod
    def compute_in_trainer(cls) -> bool:
        return True

    @abstractmethod
    def __call__(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Metrics]:
        """Advantages and returns, both [B, T] float32 and 0 where masked, and metrics."""

    def loss_mask(self, batch: Mapping[str, Tensor], advantages: Tensor) -> tuple[Tensor, Metrics]:
        """[B, T] tokens that the loss is taken over, and metrics: all of ``action_mask``.

        A method that leaves tokens out of the loss overrides this; the trainer calls it after
        `__call__`.
        """
        return batch["action_mask"].bool(), {}


def tiled(advantage_B: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """One number per row on each of its trained tokens, as advantages and as returns."""
    advantage_BT = torch.where(mask_BT, advantage_B[:, None], 0.0).float()
    return advantage_BT, advantage_BT.clone()
