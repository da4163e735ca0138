"""New weights in the midst of prompts: what was computed with the old ones goes no further."""

import random

import pytest
import torch

from tests.common.models.toy import config, model_folder
from trinity.common.models.loading import load_causal_lm
from trinity.common.models.protocol import SamplingParams
from trinity.engine.torch.attention import IMPLEMENTATION
from trinity.engine.torch.batcher import Batcher
from trinity.engine.torch.jobs import SampleJob, ScoreJob
from trinity.engine.torch.limits import Limits

LIMITS = Limits(max_batch_tokens=64, max_running=8, max_kv_bytes=2**26, max_kept_bytes=2**24)
TOKENS = [random.Random(1).randrange(7, 260) for _ in range(200)]


@pytest.fixture
def model(tmp_path):
    folder = model_folder(tmp_path, model=config(head_dim=16))
    found, _ = load_causal_lm(folder, "float32", attn_implementation=IMPLEMENTATION)
    return found


def greedy():
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    return SampleJob(
        TOKENS,
        params,
        lambda job: None,
        stream_keys=[1],
        max_tokens=3,
        stop_ids=[],
        is_usual=False,
    )


def scores():
    return ScoreJob(TOKENS, 1.0, lambda job: None)


def train_inplace(model):
    """Other weights, so that keys and values of the old ones are wrong."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.sin(torch.arange(parameter.numel()).view_as(parameter) * 1.0) / 8)


def done(batcher, job):
    batcher.submit(job)
    while batcher.has_work:
        batcher.step()
    return job


def begun(batcher, job):
    """``job`` with a first piece of its tokens computed."""
    batcher.submit(job)
    batcher.step()
    assert 0 < job.num_computed < len(TOKENS)
    return job


@pytest.mark.parametrize("update_at", [64, 128])
def test_prompts_computed_across_an_update_are_not_used_again(model, update_at):
    batcher = Batcher(model, LIMITS, eos_ids=())
    running = begun(batcher, greedy())
    while running.num_computed < update_at:
        batcher.step()
    train_inplace(model)
    batcher.renew(1)
    while batcher.has_work:
        batcher.step()
    [later] = done(batcher, greedy()).completions
    [alone] = done(Batcher(model, LIMITS, eos_ids=()), greedy()).completions
    assert (later.token_ids, later.logprobs) == (alone.token_ids, alone.logprobs)
    assert running.completions[0].versions == [1, 1, 1]


def test_scores_are_all_of_the_same_weights(model):
    batcher = Batcher(model, LIMITS, eos_ids=())
    running = begun(batcher, scores())
    train_inplace(model)
    batcher.renew(1)
    while batcher.has_work:
        batcher.step()
    alone = done(Batcher(model, LIMITS, eos_ids=()), scores())
    assert running.logprobs == alone.logprobs
