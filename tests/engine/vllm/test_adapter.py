"""An adapter in vLLM: sampled with, and swapped at every update (`make test-vllm`)."""

import asyncio
import importlib.util

import pytest
import torch

from tests.engine.test_conformance import model_in
from trinity.common.models import SamplingParams
from trinity.common.models.adapters import (
    AdapterFolder,
    AdapterSettings,
    adapter_parameters,
    add_adapter_inplace,
)
from trinity.common.models.loading import load_causal_lm
from trinity.synchronizer.channel import CheckpointChannel

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
ADAPTER = AdapterSettings(name="mine", rank=4, alpha=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_in(tmp_path_factory.mktemp("model"))


def with_adapter(folder, seed):
    """The model in transformers, with an adapter of random values."""
    model, _ = load_causal_lm(folder, "float32", 0)
    add_adapter_inplace(model, ADAPTER)
    generator = torch.Generator().manual_seed(seed)
    for parameter in adapter_parameters(model).values():
        parameter.data.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def engine_of(folder, adapter=ADAPTER, **settings):
    from trinity.engine.vllm.engine import VLLMEngine
    from trinity.engine.vllm.settings import VLLMEngineSettings

    return VLLMEngine(
        VLLMEngineSettings(
            folder, dtype="float32", enforce_eager=True, max_model_len=1024, adapter=adapter,
            kv_cache_bytes=2**28, gpu_memory_utilization=0.05, **settings,
        )
    )  # fmt: skip


async def gap(engine, model, adapter=None):
    """Largest difference of a sample's logprobs from those of a direct forward pass."""
    ids = list(range(20, 60))
    params = SamplingParams(max_tokens=20, ignore_eos=True, seed=1)
    [sample] = await engine.sample(ids, params, adapter)
    whole = torch.tensor([ids + sample.token_ids])
    with torch.no_grad():
        wanted = model(whole).logits[0, len(ids) - 1 : -1].log_softmax(-1)
    wanted = wanted.gather(1, whole[0, len(ids) :, None])[:, 0]
    return float((torch.tensor(sample.logprobs) - wanted).abs().max())


async def test_vllm_samples_with_the_adapter_and_swaps_it_while_requests_run(folder, tmp_path):
    engine = engine_of(folder, update_mode="keep")
    await engine.prepare()
    try:
        base, _ = load_causal_lm(folder, "float32", 0)
        assert await gap(engine, base) < 1e-3  # a fresh one changes nothing
        channel = CheckpointChannel(tmp_path)
        params = SamplingParams(max_tokens=500, ignore_eos=True, seed=1)
        for version in (1, 2):
            model = with_adapter(folder, seed=version)
            ticket = channel.send(version, adapter_parameters(model).items())
            task = asyncio.create_task(engine.sample([5, 6, 7], params))
            while (await engine.health())["running"] == 0:
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.3)
            assert await engine.load_weights(ticket) == ticket.digest
            [through] = await task
            assert set(through.versions) == {version - 1, version}
            assert await gap(engine, model, "mine") < 1e-3
            assert await gap(engine, base) > 0.05
            scored = await engine.logprobs(list(range(20, 50)))
            with torch.no_grad():
                rows = model(torch.arange(20, 50)[None]).logits[0, :-1].log_softmax(-1)
            wanted = rows.gather(1, torch.arange(21, 50)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(scored), wanted, atol=1e-3, rtol=0)
        with pytest.raises(ValueError, match="no adapter 'other'"):
            await engine.sample([5], SamplingParams(max_tokens=1), "other")
        with pytest.raises(ValueError, match="does not have"):
            await engine.load_weights(channel.send(3, base.named_parameters()))
    finally:
        await engine.close()


async def test_vllm_starts_from_the_files_of_an_adapter(folder, tmp_path):
    model = with_adapter(folder, seed=3)
    AdapterFolder.of(model, model.named_parameters()).write(tmp_path)
    engine = engine_of(folder, AdapterSettings(name="mine", path=str(tmp_path)))
    await engine.prepare()
    try:
        assert await gap(engine, model) < 1e-3
    finally:
        await engine.close()


async def test_vllm_refuses_a_rank_beyond_its_own_before_it_starts(folder):
    with pytest.raises(
        ValueError, match="lora_rank is 600, and vLLM serves adapters of at most 512"
    ):
        await engine_of(folder, AdapterSettings(rank=600)).prepare()
