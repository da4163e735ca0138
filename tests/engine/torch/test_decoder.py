"""All layers in one compiled kernel: the bits are those of the model's modules."""

import asyncio

import pytest
import torch
from transformers import AutoConfig

from tests.common.models.toy import config, model_folder
from tests.engine.torch.test_batching import prompt, ready
from trinity.common.models.kernels import products
from trinity.common.models.protocol import SamplingParams

needs_products = pytest.mark.skipif(
    not products.are_fit(torch.zeros(2, 2, dtype=torch.bfloat16)),
    reason="this processor's products are PyTorch's",
)


def made(kind, **changes):
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    common = {name: getattr(config(), name) for name in names}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
    return AutoConfig.for_model(kind, **{**common, **heads, **changes})


async def samples(engine):
    asked = [
        engine.sample(prompt(length), SamplingParams(n=3, max_tokens=9, seed=length))
        for length in (1, 5, 64, 150)
    ]
    return await asyncio.gather(*asked, engine.logprobs(prompt(70)))


@needs_products
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("mistral", {"sliding_window": 20}),
        ("qwen2", {}),
        ("qwen3", {"num_key_value_heads": 4}),
    ],
)
async def test_compiled_layers_give_the_bits_of_the_modules(tmp_path, kind, changes):
    folder = model_folder(tmp_path, model=made(kind, **changes))
    engine = await ready(folder, dtype="bfloat16", max_batch_tokens=128)
    assert engine._worker.ready_batcher.forward.compiled is not None
    found = await samples(engine)
    engine._worker.ready_batcher.forward.compiled = None
    assert await samples(engine) == found
    await engine.close()


@needs_products
@pytest.mark.parametrize(("kind", "changes"), [("gemma2", {}), ("llama", {"head_dim": 20})])
async def test_other_models_run_by_their_modules(tmp_path, kind, changes):
    folder = model_folder(tmp_path, model=made(kind, **changes))
    engine = await ready(folder, dtype="bfloat16")
    assert engine._worker.ready_batcher.forward.compiled is None
    await engine.sample(prompt(5), SamplingParams(max_tokens=2))
    await engine.close()
