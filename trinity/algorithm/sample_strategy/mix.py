"""The strategy that mixes rollouts with expert data."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trinity.algorithm.sample_strategy.base import ExperienceSource, Metrics, SampleStrategy
from trinity.common.config.arithmetic import EXPERT_DATA_RATIO, expert_rows
from trinity.common.experience import CustomField, Experience

_FIELDS = (
    CustomField("is_expert", "expert_mask", torch.bool),
    CustomField("step", "step", torch.int32),
)


class MixSampleStrategy(SampleStrategy):
    """Reads ``ceil(expert_data_ratio * batch_size)`` expert rows, and rollouts for the rest.

    Rows are marked for the loss by the fields ``expert_mask`` and ``step``. Expert rows get reward
    0, logprobs 0 and advantages 0.

    Args:
        expert_data_ratio: Share of expert rows in a batch, in [0, 1].
        sft_dataset_name: Name of the auxiliary buffer that has the expert data.
    """

    def __init__(
        self,
        reader: ExperienceSource,
        batch_size: int,
        auxiliary: Mapping[str, ExperienceSource] | None = None,
        *,
        expert_data_ratio: float = EXPERT_DATA_RATIO,
        sft_dataset_name: str = "sft_dataset",
    ) -> None:
        super().__init__(reader, batch_size, auxiliary)
        if not 0 <= expert_data_ratio <= 1:
            raise ValueError(f"expert_data_ratio is {expert_data_ratio}; it must be in [0, 1].")
        if sft_dataset_name not in self.auxiliary:
            raise ValueError(
                f"sample_strategy 'mix' reads expert data from {sft_dataset_name!r}, but "
                f"buffer.trainer_input.auxiliary_buffers has {sorted(self.auxiliary) or 'nothing'}."
                " Add it there, or name another in sample_strategy_args.sft_dataset_name."
            )
        self.expert_reader = self.auxiliary[sft_dataset_name]
        self.num_expert = expert_rows(batch_size, expert_data_ratio)

    async def read(self, step: int) -> tuple[list[Experience], Metrics]:
        # Rollouts first: a wait that is cancelled must not have used up expert rows.
        usual = await _read(self.reader, self.batch_size - self.num_expert, step)
        expert = await _read(self.expert_reader, self.num_expert, step)
        for experience in expert:
            update_expert(experience)
        for is_expert, exps in ((False, usual), (True, expert)):
            mark(exps, is_expert, step)
        metrics = {"sample/expert_count": float(len(expert))}
        return usual + expert, metrics

    def state_dict(self) -> dict[str, Any]:
        return {
            "usual_buffer": self.reader.state_dict(),
            "expert_buffer": self.expert_reader.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.reader.load_state_dict(state["usual_buffer"])
        self.expert_reader.load_state_dict(state["expert_buffer"])


def mark(exps: Sequence[Experience], is_expert: bool, step: int) -> None:
    """Say in each experience whether it is expert data, and which step trains on it."""
    for experience in exps:
        experience.info |= {"is_expert": is_expert, "step": step}
        own = [field for field in experience.custom_fields if field not in _FIELDS]
        experience.custom_fields = [*own, *_FIELDS]


def update_expert(experience: Experience) -> None:
    """Fill in what a rollout has and expert data lacks."""
    zeros = torch.zeros(experience.response_length)
    experience.reward = 0.0
    experience.logprobs, experience.advantages = zeros, zeros.clone()


async def _read(reader: ExperienceSource, count: int, step: int) -> list[Experience]:
    return await reader.read(count, step=step) if count else []
