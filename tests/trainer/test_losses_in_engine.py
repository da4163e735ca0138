"""Every loss through the torch engine: packed, in micro-batches, with shared prompts.

The gradient of all parameters, and every metric, is compared with that of the whole padded batch.
"""

import pytest
import torch

from tests.trainer.backends.test_torch_engine import (
    assert_close,
    gradients,
    plain_gradient,
    plain_outputs,
    settings,
)
from tests.trainer.toy import groups, model_folder, plain_model
from trinity.algorithm import POLICY_LOSS_FN, PolicyLossFn
from trinity.trainer.backends.torch.engine import TorchTrainEngine
from trinity.trainer.backends.torch.microbatch import MicroBatchRule
from trinity.trainer.batch import TrainBatch
from trinity.trainer.loss import Objective


def batch_for_all() -> TrainBatch:
    """Groups of rows with every column that a loss may name; old and reference policy are near."""
    batch = TrainBatch.from_experiences(groups(3, 4, seed=3))
    generator = torch.Generator().manual_seed(0)
    place = torch.arange(len(batch))
    noise = 0.3 * torch.randn(batch["old_logprob"].shape, generator=generator)
    return batch.with_columns(
        ref_logprob=batch["old_logprob"] + noise,
        expert_mask=place % 3 == 0,
        step=torch.zeros(len(batch), dtype=torch.int32),
        pair_id=place // 2,
        is_chosen=place % 2 == 0,
    )


async def engine_gradient(folder, batch, objective):
    rule = MicroBatchRule(max_tokens=90)
    engine = TorchTrainEngine(settings(folder, micro_batches=rule))
    await engine.prepare()
    metrics = await engine.forward_backward(batch, objective)
    return metrics, gradients(engine)


@pytest.mark.parametrize("name", POLICY_LOSS_FN.names())
async def test_packed_shares_give_the_gradient_of_the_whole(tmp_path, name):
    folder = model_folder(tmp_path / "model")
    batch = batch_for_all()
    objective = Objective(POLICY_LOSS_FN.get(name)())
    loss, wanted = plain_gradient(folder, batch, objective)
    metrics, found = await engine_gradient(folder, batch, objective)
    assert metrics.pop("actor/final_loss") == pytest.approx(loss, rel=1e-5, abs=1e-6)
    assert_close(found, wanted, tolerance=3e-6)
    with torch.no_grad():
        _, whole = objective(plain_outputs(plain_model(folder), batch), batch)
    assert metrics == pytest.approx({n: float(v) for n, v in whole.items()}, rel=1e-4, abs=1e-5)


class BestTokens(PolicyLossFn):
    """No sum over rows: only tokens above the batch's own median are trained."""

    def __call__(self, logprob, action_mask):
        kept = action_mask & (logprob.detach() > logprob.detach()[action_mask].median())
        return -(logprob * kept).sum() / kept.sum(), {"kept": kept.sum().float()}


async def test_a_plugin_loss_that_does_not_add_up_is_computed_in_two_passes(tmp_path):
    folder = model_folder(tmp_path / "model")
    batch = TrainBatch.from_experiences(groups(3, 4, seed=3))
    objective = Objective(BestTokens())
    assert not objective.adds_up(batch)
    loss, wanted = plain_gradient(folder, batch, objective)
    metrics, found = await engine_gradient(folder, batch, objective)
    assert metrics["actor/final_loss"] == pytest.approx(loss, rel=1e-5)
    assert_close(found, wanted, tolerance=3e-6)
