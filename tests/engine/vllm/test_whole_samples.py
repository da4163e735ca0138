"""Samples that nobody follows: many tokens a message, all samples of a prompt in one request."""

import asyncio
import importlib.util

import pytest
import torch

from tests.engine.test_conformance import plain_logprobs, prompt
from tests.engine.vllm.test_faults import engine_of, folder  # noqa: F401  # a fixture
from trinity.common.models import SamplingParams
from trinity.common.models.loading import load_causal_lm

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"
)


async def test_every_token_comes_with_its_own_logprob(folder):  # noqa: F811
    model, _ = load_causal_lm(folder, "float32", 0)
    engine = engine_of(folder, keeps_seeds=False)
    await engine.prepare()
    prompts = [prompt(length) for length in (1, 20, 90)]
    lengths = [5, 32, 77]
    asked = [
        SamplingParams(n=4, temperature=0.8, max_tokens=length, ignore_eos=True)
        for length in lengths
    ]
    greedy = SamplingParams(n=2, temperature=0, max_tokens=40, ignore_eos=True)
    *groups, twice, scored = await asyncio.gather(
        *(engine.sample(ids, params) for ids, params in zip(prompts, asked, strict=True)),
        engine.sample(prompts[1], greedy),
        engine.logprobs(prompts[2]),
    )
    for ids, length, samples in zip(prompts, lengths, groups, strict=True):
        assert [len(sample.token_ids) for sample in samples] == [length] * 4
        assert len({tuple(sample.token_ids) for sample in samples}) == 4
        for sample in samples:
            expected = plain_logprobs(model, [*ids, *sample.token_ids], len(ids), 0.8)
            torch.testing.assert_close(torch.tensor(sample.logprobs), expected, atol=5e-3, rtol=0)
            assert sample.finish_reason == "length" and sample.versions == [0] * length
    assert twice[0].token_ids == twice[1].token_ids and len(twice[0].token_ids) == 40
    assert len(scored) == len(prompts[2]) - 1
    await engine.close()
