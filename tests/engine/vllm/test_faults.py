"""vLLM's processes killed or failing, in an environment that has vLLM (`make test-vllm`)."""

import asyncio
import importlib.util
import logging
import os
import signal
import time
from logging.config import dictConfig

import psutil
import pytest
import torch

from tests.common.models.toy import config, model_folder
from trinity.common.models import ModelSettings, ModelWrapper, SamplingParams
from trinity.common.models.loading import load_causal_lm
from trinity.explorer.engine_keeper import EngineKeeper
from trinity.synchronizer.channel import CheckpointChannel
from trinity.utils.actor import ProcessRestarted

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"
)


@pytest.fixture
def folder(tmp_path):
    made = config(
        hidden_size=128, intermediate_size=128, head_dim=32, initializer_range=0.05,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    return model_folder(tmp_path / "model", model=made)


def engine_of(folder, **settings):
    from trinity.engine.vllm.engine import VLLMEngine
    from trinity.engine.vllm.settings import VLLMEngineSettings

    return VLLMEngine(
        VLLMEngineSettings(
            folder, dtype="float32", enforce_eager=True, max_model_len=1024,
            gpu_memory_utilization=0.05, **{"kv_cache_bytes": 2**28, **settings},
        )
    )  # fmt: skip


def kill_vllm():
    for child in psutil.Process().children(recursive=True):
        os.kill(child.pid, signal.SIGKILL)


async def test_a_killed_inner_process_is_told_of_within_ten_seconds_without_a_keeper(folder):
    engine = engine_of(folder)
    await engine.prepare()
    dictConfig({"version": 1, "disable_existing_loggers": False})  # as a web server's start does
    params = SamplingParams(n=4, max_tokens=900, ignore_eos=True)
    task = asyncio.create_task(engine.sample([5, 6], params))
    await asyncio.sleep(0.3)
    kill_vllm()
    start = time.monotonic()
    with pytest.raises(ProcessRestarted, match="ended"):
        await asyncio.wait_for(task, 10)
    with pytest.raises(ProcessRestarted, match="ended"):
        await engine.health()
    assert time.monotonic() - start < 10
    await engine.close()


class Times(logging.Handler):
    """When each message came."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def emit(self, record):
        self.seen[record.getMessage()[:15]] = time.monotonic()


async def test_an_inner_process_killed_in_mid_batch_comes_back_with_the_newest_weights(
    folder, tmp_path
):
    engine = engine_of(folder)
    await engine.prepare()
    trained, _ = load_causal_lm(folder, "float32", 1)
    ticket = CheckpointChannel(tmp_path).send(7, trained.named_parameters())
    times, logger = Times(), logging.getLogger("test_faults")
    logger.addHandler(times)
    keeper = EngineKeeper([engine], [], logger)
    settings = ModelSettings(folder, max_response_tokens=200, ignore_eos=True)
    killed = []

    async def batch():
        model = ModelWrapper(engine, settings)
        texts = [f"question {number}" for number in range(8)]
        asked = [
            model.chat_async([{"role": "user", "content": text}], n=2, seed=number)
            for number, text in enumerate(texts)
        ]
        return [sample for found in await asyncio.gather(*asked) for sample in found]

    async def work():
        assert await keeper.load(ticket) == [ticket.digest]
        before = await batch()
        task = asyncio.create_task(batch())
        await asyncio.sleep(0.5)
        assert not task.done()
        kill_vllm()
        killed.append(time.monotonic())
        after = await task
        assert len(after) == len(before) == 16
        for one, other in zip(before, after, strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
            assert other.info["model_version"] == 7
        health = await engine.health()
        assert health["running"] == 0 and health["tokens"] == 2 * 16 * 200
        assert await engine.version() == 7
        ids = after[0].tokens.tolist()
        with torch.no_grad():
            rows = trained(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        wanted = rows.gather(1, torch.tensor(ids[1:])[:, None])[-200:, 0]
        torch.testing.assert_close(after[0].logprobs, wanted, atol=1e-3, rtol=0)

    try:
        await asyncio.wait_for(keeper.watching(work()), 200)
    finally:
        await engine.close()
    assert times.seen["Engine 0 died a"] - killed[0] < 10
    assert "Engine 0 is rea" in times.seen
