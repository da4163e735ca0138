import asyncio
import random

import pytest
import torch

from tests.common.models.toy import config, model_folder
from trinity.common.models.loading import load_causal_lm
from trinity.common.models.protocol import SamplingParams
from trinity.engine.torch import TorchEngine, TorchEngineSettings

# A prompt in each region where kernels change: one token, around a tile, around a block of keys.
LENGTHS = (1, 2, 5, 30, 63, 64, 65, 128, 130, 191, 192, 256, 300)

# Heads of 8 attend by PyTorch's operations, those of 16 by compiled kernels.
HEAD_SIZES = pytest.mark.parametrize("head_dim", [8, 16])


async def ready(folder, **settings):
    engine = TorchEngine(
        TorchEngineSettings(folder, **{"dtype": "float32", "num_threads": 1, **settings})
    )
    await engine.prepare()
    return engine


def prompt(length, seed=0):
    rng = random.Random(f"{seed}/{length}")
    return [rng.randrange(7, 260) for _ in range(length)]


def requests(count, max_tokens=12):
    rng = random.Random(count)
    for number in range(count):
        params = SamplingParams(
            n=rng.choice([1, 2, 4]),
            temperature=rng.choice([1.0, 0.6, 1.5, 0]),
            top_p=rng.choice([1.0, 0.8]),
            top_k=rng.choice([-1, 10]),
            min_p=rng.choice([0.0, 0.05]),
            max_tokens=rng.randrange(1, max_tokens),
            seed=number,
        )
        yield prompt(LENGTHS[number % len(LENGTHS)], number), params


@pytest.mark.parametrize(("name", "least"), [("max_batch_tokens", 64), ("max_running", 1)])
async def test_limits_that_let_no_step_do_anything_are_refused(tmp_path, name, least):
    folder = model_folder(tmp_path)
    with pytest.raises(ValueError, match=f"{name} is {least - 1}; it must be at least {least}"):
        await ready(folder, **{name: least - 1})
    engine = await ready(folder, **{name: least})
    [sample] = await engine.sample(prompt(70), SamplingParams(max_tokens=2, ignore_eos=True))
    assert len(sample.token_ids) == 2
    await engine.close()


@HEAD_SIZES
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_same_bits_whatever_else_is_in_the_batch(tmp_path, dtype, head_dim):
    folder = model_folder(tmp_path, model=config(head_dim=head_dim))
    engine = await ready(folder, dtype=dtype, max_batch_tokens=256)
    asked = list(requests(40))
    together = await asyncio.gather(*[engine.sample(*request) for request in asked])
    for request, expected in zip(asked, together, strict=True):
        assert await engine.sample(*request) == expected
    await engine.close()


@HEAD_SIZES
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_logprobs_of_samples_are_those_of_scoring_to_the_bit(tmp_path, dtype, head_dim):
    folder = model_folder(tmp_path, model=config(head_dim=head_dim))
    engine = await ready(folder, dtype=dtype, max_batch_tokens=128)
    for length in LENGTHS:
        ids = prompt(length)
        params = SamplingParams(n=2, temperature=0.6, max_tokens=30, seed=length, ignore_eos=True)
        for sample in await engine.sample(ids, params):
            scored = await engine.logprobs([*ids, *sample.token_ids], 0.6)
            assert scored[length - 1 :] == sample.logprobs
    await engine.close()


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
async def test_logprobs_equal_a_plain_forward_pass(tmp_path, temperature):
    folder = model_folder(tmp_path, model=config(initializer_range=0.05))
    engine = await ready(folder)
    model, _ = load_causal_lm(folder, "float32", 0)
    for length in (1, 40, 64, 300):
        ids = prompt(length)
        params = SamplingParams(n=2, temperature=temperature, max_tokens=20, top_p=0.9, seed=1)
        for sample in await engine.sample(ids, params):
            whole = torch.tensor([[*ids, *sample.token_ids]])
            with torch.no_grad():
                logits = model(whole).logits[0, length - 1 : -1] / temperature
            expected = logits.log_softmax(-1).gather(1, whole[0, length:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(sample.logprobs), expected, atol=1e-5, rtol=0)
    await engine.close()


async def test_greedy_is_the_most_likely_token_and_tokens_do_not_depend_on_n(tmp_path):
    folder = model_folder(tmp_path)
    engine = await ready(folder)
    model, _ = load_causal_lm(folder, "float32", 0)
    [greedy] = await engine.sample(prompt(20), SamplingParams(temperature=0, max_tokens=5))
    ids = prompt(20)
    for token in greedy.token_ids:
        with torch.no_grad():
            assert int(model(torch.tensor([ids])).logits[0, -1].argmax()) == token
        ids.append(token)
    three = await engine.sample(prompt(9), SamplingParams(n=3, max_tokens=6, seed=5))
    eight = await engine.sample(prompt(9), SamplingParams(n=8, max_tokens=6, seed=5))
    assert eight[:3] == three
    assert len({tuple(sample.token_ids) for sample in eight}) > 4
    await engine.close()


async def test_more_samples_than_places_give_the_same_as_all_at_once(tmp_path):
    folder = model_folder(tmp_path)
    wide, narrow = await ready(folder), await ready(folder, max_running=3)
    params = SamplingParams(n=10, max_tokens=9, seed=2)
    expected = await wide.sample(prompt(70), params)
    found = await asyncio.gather(*[narrow.sample(prompt(70), params) for _ in range(3)])
    assert found == [expected] * 3
    await wide.close()
    await narrow.close()


async def test_little_memory_makes_requests_wait_and_changes_nothing(tmp_path):
    folder = model_folder(tmp_path)
    roomy, tight = await ready(folder), await ready(folder, kv_cache_bytes=200_000)
    asked = list(requests(12))
    expected = [await roomy.sample(*request) for request in asked]
    assert await asyncio.gather(*[tight.sample(*request) for request in asked]) == expected
    await roomy.close()
    await tight.close()


async def test_prompts_that_start_alike_are_computed_once(tmp_path):
    engine = await ready(model_folder(tmp_path), max_batch_tokens=64)
    params = SamplingParams(max_tokens=1, seed=0)
    await engine.sample(prompt(256), params)
    before = (await engine.health())["steps"]
    await engine.sample([*prompt(256), 9, 9, 9], params)
    assert (await engine.health())["steps"] - before == 1
    await engine.close()


async def test_a_shared_prefix_changes_no_bit(tmp_path):
    folder = model_folder(tmp_path)
    plain, caching = await ready(folder, enable_prefix_caching=False), await ready(folder)
    common = prompt(150)
    asked = [([*common, *prompt(k)], SamplingParams(n=2, max_tokens=8, seed=k)) for k in range(9)]
    expected = [await plain.sample(*request) for request in asked]
    for _ in range(2):
        assert await asyncio.gather(*[caching.sample(*request) for request in asked]) == expected
    await plain.close()
    await caching.close()


async def test_two_hundred_requests_of_mixed_lengths(tmp_path):
    engine = await ready(model_folder(tmp_path), max_batch_tokens=1024)
    asked = list(requests(200, max_tokens=40))
    found = await asyncio.gather(*[engine.sample(*request) for request in asked])
    for (_, params), samples in zip(asked, found, strict=True):
        assert len(samples) == params.n
        for sample in samples:
            assert len(sample.token_ids) == len(sample.logprobs) == len(sample.versions)
            at_most = len(sample.token_ids) == params.max_tokens
            assert at_most or sample.finish_reason == "stop"
    health = await engine.health()
    assert (health["running"], health["waiting"]) == (0, 0)
    await engine.close()


@HEAD_SIZES
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "gemma2", "mistral-window", "phi3", "gpt_neox"])
async def test_other_architectures(tmp_path, kind, head_dim):
    from transformers import AutoConfig

    common = {
        name: getattr(config(), name)
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    } | {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "pad_token_id": 0,
    }
    changes = {
        "gemma2": {
            "sliding_window": 16,
            "attn_logit_softcapping": 20.0,
            "query_pre_attn_scalar": 8,
        },
        "mistral-window": {"sliding_window": 20},
        "phi3": {"bos_token_id": None, "eos_token_id": 2},
    }.get(kind, {})
    name = kind.removesuffix("-window")
    made = AutoConfig.for_model(name, **{**common, **changes})
    folder = model_folder(tmp_path, model=made)
    engine = await ready(folder)
    model, _ = load_causal_lm(folder, "float32", 0)
    for length in (5, 100):
        ids = prompt(length)
        [sample] = await engine.sample(ids, SamplingParams(max_tokens=6, seed=1, ignore_eos=True))
        whole = torch.tensor([[*ids, *sample.token_ids]])
        with torch.no_grad():
            logits = model(whole).logits[0, length - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, whole[0, length:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(sample.logprobs), expected, atol=2e-5, rtol=0)
    await engine.close()


async def test_a_model_that_takes_no_attention_function_is_refused(tmp_path):
    from transformers import MambaConfig

    made = MambaConfig(vocab_size=300, hidden_size=32, num_hidden_layers=2, state_size=4)
    with pytest.raises(ValueError, match="engine"):
        await ready(model_folder(tmp_path, model=made))
