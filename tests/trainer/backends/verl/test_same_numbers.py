"""veRL's engines with our loss against the torch trainer, step by step."""

from dataclasses import replace

import pytest
import torch

from tests.trainer.backends.steps import GRPO, assert_same, grpo, ppo, rows
from tests.trainer.backends.verl.engines import settings, torch_engine, verl_engine
from tests.trainer.test_losses_in_engine import BestTokens, batch_for_all
from tests.trainer.toy import model_folder, plain_model
from trinity.algorithm import POLICY_LOSS_FN
from trinity.trainer.backends.torch.microbatch import MicroBatchRule
from trinity.trainer.loss import Objective

pytest.importorskip("verl")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize(("world_size", "tied"), [(1, True), (1, False), (2, True), (2, False)])
async def test_grpo_of_five_steps(tmp_path, world_size, tied):
    given = settings(model_folder(tmp_path / "model", tie_word_embeddings=tied))
    async with torch_engine(given) as plain:
        wanted = await grpo(plain, range(5))
    async with verl_engine(given, world_size) as engine:
        assert_same(await grpo(engine, range(5)), wanted, tolerance=2e-5)


async def test_grpo_with_fused_kernels_in_processes_of_their_own(tmp_path):
    """veRL changes the model's class for them, for good."""
    given = settings(model_folder(tmp_path / "model"))
    model = "actor_rollout_ref.model"
    fused = {
        f"{model}.use_fused_kernels": True,
        f"{model}.fused_kernel_options.impl_backend": "torch",
    }
    async with torch_engine(given) as plain:
        wanted = await grpo(plain, range(2))
    async with verl_engine(given, 2, verl=fused) as engine:
        assert_same(await grpo(engine, range(2)), wanted)


@pytest.mark.parametrize("world_size", [1, 2])
async def test_ppo_of_five_steps(tmp_path, world_size):
    given = settings(model_folder(tmp_path / "model"), has_critic=True)
    async with torch_engine(given) as plain:
        wanted = await ppo(plain, range(5))
    async with verl_engine(given, world_size) as engine:
        assert_same(await ppo(engine, range(5)), wanted)


async def test_a_critic_made_of_a_language_model_has_the_same_value_head(tmp_path):
    folder = model_folder(tmp_path / "model")
    plain_model(folder).save_pretrained(folder)
    given = settings(folder, has_critic=True)
    async with torch_engine(given) as plain, verl_engine(given) as engine:
        for which in ("actor", "critic", "ref"):
            found = await engine.forward(rows(0), which)
            wanted = await plain.forward(rows(0), which)
            for name, values in wanted.items():
                torch.testing.assert_close(found[name], values, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("max_rows", [None, 1, 4])
async def test_micro_batches_by_rows_with_temperatures_of_their_own(tmp_path, max_rows):
    rule = MicroBatchRule(max_rows=max_rows)
    given = settings(model_folder(tmp_path / "model"), micro_batches=rule, temperature=0.7)
    batch = rows(0)
    own = batch.with_columns(temperature=torch.linspace(0, 1.4, len(batch)))
    async with torch_engine(given) as plain, verl_engine(given) as engine:
        for given_batch in (batch, own):
            wanted = await plain.forward_backward(given_batch, GRPO) | await plain.optim_step()
            found = await engine.forward_backward(given_batch, GRPO) | await engine.optim_step()
            assert_same([found], [wanted])


async def test_tokens_that_the_model_does_not_have_are_told(tmp_path):
    given, batch = settings(model_folder(tmp_path / "model")), rows(0)
    batch.tokens[-1] = 10**6
    async with verl_engine(given, 2) as engine:  # in processes of their own: this ends them
        with pytest.raises(Exception, match="no token 1000000: the ids of the model are 0 to 96"):
            await engine.forward_backward(batch, GRPO)


@pytest.mark.parametrize("loss", ["dpo", "gspo", "mix", "best_tokens"])
async def test_losses_over_pairs_sequences_parts_and_the_whole_batch(tmp_path, loss):
    objective = Objective(BestTokens() if loss == "best_tokens" else POLICY_LOSS_FN.get(loss)())
    batch = batch_for_all()
    given = settings(model_folder(tmp_path / "model"))
    async with torch_engine(given) as plain, verl_engine(given) as engine:
        wanted = await plain.forward_backward(batch, objective)
        found = await engine.forward_backward(batch, objective)
        assert_same([found], [wanted])
        assert_same([await engine.optim_step()], [await plain.optim_step()])


async def test_gradient_checkpointing_and_bfloat16(tmp_path):
    given = settings(model_folder(tmp_path / "model"), gradient_checkpointing=True)
    async with torch_engine(given) as plain, verl_engine(given) as engine:
        assert_same(await grpo(engine, range(2)), await grpo(plain, range(2)))
    given = replace(given, dtype="bfloat16")
    async with torch_engine(given) as plain, verl_engine(given) as engine:
        wanted, found = await grpo(plain, range(2)), await grpo(engine, range(2))
        for step, other in zip(found, wanted, strict=True):
            assert step["actor/grad_norm"] == pytest.approx(other["actor/grad_norm"], rel=0.05)
