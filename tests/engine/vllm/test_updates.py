"""New weights while requests run, in modes "pause" and "abort"; "keep" is in the conformance."""

import asyncio
import importlib.util

import pytest
import torch

from tests.common.models.toy import config, model_folder
from trinity.common.models import SamplingParams
from trinity.common.models.loading import load_causal_lm
from trinity.synchronizer.channel import CheckpointChannel

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"
)
LONG = SamplingParams(n=2, max_tokens=500, ignore_eos=True, seed=1)
IDS = list(range(20, 60))


def mean_gap(model, sample):
    whole = torch.tensor([IDS + sample.token_ids])
    with torch.no_grad():
        rows = model(whole).logits[0, len(IDS) - 1 : -1].float().log_softmax(-1)
    wanted = rows.gather(1, whole[0, len(IDS) :, None])[:, 0]
    return float((torch.tensor(sample.logprobs) - wanted).abs().mean())


@pytest.mark.parametrize(
    ("mode", "dtype", "most"), [("pause", "bfloat16", 0.02), ("abort", "float32", 1e-4)]
)
async def test_vllm_update_in_mid_request(tmp_path, mode, dtype, most):
    from trinity.engine.vllm.engine import VLLMEngine
    from trinity.engine.vllm.settings import VLLMEngineSettings

    made = config(
        hidden_size=128, intermediate_size=128, head_dim=32, initializer_range=0.05,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    folder = model_folder(tmp_path / "model", model=made)
    old_model, _ = load_causal_lm(folder, dtype, 0)
    new_model, _ = load_causal_lm(folder, dtype, 1)
    ticket = CheckpointChannel(tmp_path).send(3, new_model.named_parameters())
    settings = VLLMEngineSettings(
        folder, dtype=dtype, enforce_eager=True, max_model_len=1024, update_mode=mode,
        kv_cache_bytes=2**28, gpu_memory_utilization=0.05,
    )  # fmt: skip
    engine = VLLMEngine(settings)
    await engine.prepare()
    try:
        [first, _] = await engine.sample(IDS, LONG)
        task = asyncio.create_task(engine.sample(IDS, LONG))
        while (await engine.health())["running"] == 0:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.3)
        assert await engine.load_weights(ticket) == ticket.digest
        [through, _] = await task
        [new, _] = await engine.sample(IDS, LONG)
        assert set(first.versions) == {0} and set(new.versions) == {3}
        assert through.token_ids == (first if mode == "pause" else new).token_ids
        assert set(through.versions) == {0 if mode == "pause" else 3}
        assert mean_gap(old_model, first) <= most and mean_gap(new_model, new) <= most
    finally:
        await engine.close()
