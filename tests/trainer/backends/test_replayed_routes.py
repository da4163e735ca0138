"""Mixture-of-experts models take the routes of the rollout in training."""

import pytest
import torch

from tests.common.models import moe
from tests.trainer.backends.process_ranks import rank_group
from tests.trainer.backends.test_torch_engine import GRPO, gradients, plain_outputs, settings
from tests.trainer.toy import groups, multi_turn
from trinity.common.constants import ROUTES
from trinity.common.experience import EID
from trinity.common.models.protocol import SamplingParams
from trinity.common.models.routes import Routers, filled
from trinity.engine.torch import TorchEngine
from trinity.engine.torch import TorchEngineSettings as InferenceSettings
from trinity.trainer.backends.torch.engine import TorchTrainEngine
from trinity.trainer.backends.torch.microbatch import MicroBatchRule
from trinity.trainer.batch import TrainBatch

LAYERS = 3


def rows(seed: int = 0):
    """Groups whose prompts, and their routes, are shared; rows of several turns."""
    experiences = groups(3, 3, seed)
    for number, experience in enumerate(multi_turn(2)):
        experience.eid = EID(0, 9, number)
        experiences.append(experience)
    for number, experience in enumerate(experiences):
        length, task = len(experience.tokens), int(experience.eid.task)
        prompt = moe.other_routes(experience.prompt_length, LAYERS, seed=task)
        reply = moe.other_routes(length - 1 - len(prompt), LAYERS, seed=100 + number)
        experience.routed_experts = filled(torch.cat([prompt, reply]), length)
    return experiences


def plain(batch: TrainBatch):
    """Loss and gradient by transformers, row by row, every row with its routes."""
    model = moe.made(moe.qwen())
    routers = Routers(model)
    outputs = []
    for row in range(len(batch)):
        routers.follow(batch[ROUTES][row, : int(batch.lengths[row])])
        outputs.append(plain_outputs(model, batch.select([row])))
    width = batch["action_mask"].shape[1]
    whole = {
        name: torch.cat(
            [
                torch.nn.functional.pad(found[name], (0, width - found[name].shape[1]))
                for found in outputs
            ]
        )
        for name in ("logprob", "entropy")
    }
    loss, _ = GRPO(whole, batch)
    loss.backward()
    return whole["logprob"].detach(), {n: p.grad for n, p in model.named_parameters()}


async def trainer(folder: str, **changes: object) -> TorchTrainEngine:
    engine = TorchTrainEngine(settings(folder, replays_routes=True, **changes))
    await engine.prepare()
    return engine


@pytest.mark.parametrize("shares_prefixes", [True, False])
@pytest.mark.parametrize("checkpointing", [True, False])
async def test_logprobs_and_gradients_are_those_of_the_given_routes(
    tmp_path, shares_prefixes, checkpointing
):
    engine = await trainer(
        moe.model_folder(tmp_path),
        shares_prefixes=shares_prefixes,
        gradient_checkpointing=checkpointing,
        micro_batches=MicroBatchRule(max_tokens=120),
    )
    batch = TrainBatch.from_experiences(rows())
    wanted, wanted_gradients = plain(batch)
    found = (await engine.forward(batch))["logprob"]
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-5)
    await engine.forward_backward(batch, GRPO)
    for name, grad in gradients(engine).items():
        torch.testing.assert_close(grad, wanted_gradients[name], atol=2e-5, rtol=1e-3)
    free = (await engine.forward(batch.without(ROUTES)))["logprob"]
    assert float((free - found).abs().max()) > 0.1
    await engine.close()


async def test_rows_without_routes_are_routed_freely(tmp_path):
    engine = await trainer(moe.model_folder(tmp_path))
    experiences = rows()
    for experience in experiences[:3]:
        experience.routed_experts = None
    batch = TrainBatch.from_experiences(experiences)
    found = (await engine.forward(batch))["logprob"]
    free = (await engine.forward(batch.without(ROUTES)))["logprob"]
    torch.testing.assert_close(found[:3], free[:3], atol=2e-5, rtol=1e-5)
    assert float((free - found)[3:].abs().max()) > 0.1
    reference = (await engine.forward(batch, "ref"))["logprob"]
    torch.testing.assert_close(reference, free, atol=2e-5, rtol=1e-5)
    await engine.close()


@pytest.mark.parametrize("sequence_parallel", [1, 2])
async def test_ranks_compute_what_one_process_does(tmp_path, sequence_parallel):
    folder = moe.model_folder(tmp_path)
    batch = TrainBatch.from_experiences(rows())
    single = await trainer(folder)
    given = settings(folder, replays_routes=True, sequence_parallel=sequence_parallel)
    with rank_group(given, 2) as group:
        await group.prepare()
        found = (await group.forward(batch))["logprob"]
        wanted = (await single.forward(batch))["logprob"]
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-5)
        metrics = await group.forward_backward(batch, GRPO) | await group.optim_step()
        own = await single.forward_backward(batch, GRPO) | await single.optim_step()
        for name in ("actor/final_loss", "actor/grad_norm"):
            assert metrics[name] == pytest.approx(own[name], rel=1e-3), name
        await group.close()
    await single.close()


async def test_with_them_training_scores_what_was_sampled_as_it_was(tmp_path):
    """The rollout computes in bfloat16, training in float32: close decisions fall otherwise."""
    folder = moe.model_folder(tmp_path)
    sampler = TorchEngine(InferenceSettings(folder, returns_routes=True))
    await sampler.prepare()
    experiences = groups(8, 1, prompt=100)
    for experience in experiences:
        prompt = experience.tokens[: experience.prompt_length].tolist()
        params = SamplingParams(max_tokens=60, ignore_eos=True, seed=int(experience.eid.task))
        [sample] = await sampler.sample(prompt, params)
        experience.__init__(
            eid=experience.eid,
            tokens=[*prompt, *sample.token_ids],
            prompt_length=len(prompt),
            logprobs=sample.logprobs,
            reward=0.0,
            routed_experts=sample.routes,
        )
    await sampler.close()
    batch = TrainBatch.from_experiences(experiences)
    engine = await trainer(folder)
    replayed = (await engine.forward(batch))["logprob"]
    free = (await engine.forward(batch.without(ROUTES)))["logprob"]
    gap = [float((logprob - batch["old_logprob"]).abs().max()) for logprob in (replayed, free)]
    print("largest gap of a token's logprob, with routes and without:", gap)
    assert gap[0] < 0.3 * gap[1]
    await engine.close()
