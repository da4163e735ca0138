"""What a batch is completed with before its gradient."""

import pytest
import torch

from tests.trainer.toy import groups
from trinity.trainer.batch import TrainBatch
from trinity.trainer.preparation import Preparation


class Engine:
    """Gives every trained token the same log-probability."""

    async def forward(self, batch, which="actor", entropy=False):
        return {"logprob": torch.full(batch["action_mask"].shape, -1.0)}


async def test_the_gap_to_the_engine_is_that_of_sampled_rows():
    batch = TrainBatch.from_experiences(groups(1, 2))
    rollout = torch.full(batch["action_mask"].shape, -1.0)
    rollout[1] = 0.0  # expert data: nobody sampled it
    batch = batch.with_columns(
        old_logprob=rollout, advantages=rollout, expert_mask=torch.tensor([False, True])
    )
    metrics: dict[str, float] = {}
    done = await Preparation(Engine(), recomputes_old_logprobs=True).complete(batch, metrics)
    assert metrics["training/rollout_probs_diff_max"] == pytest.approx(0)
    assert done["old_logprob"].eq(-1).all() and done["rollout_log_probs"].equal(rollout)
