"""vLLM's processes killed or failing, in an environment that has vLLM (`make test-vllm`)."""

import asyncio
import importlib.util
import os
import signal
import time

import psutil
import pytest

from tests.common.models.toy import config, model_folder
from trinity.common.models import SamplingParams

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"
)


async def test_vllm_killed_in_mid_batch_is_found_within_ten_seconds(tmp_path):
    from trinity.engine.vllm.engine import VLLMEngine
    from trinity.engine.vllm.settings import VLLMEngineSettings

    made = config(hidden_size=128, intermediate_size=128, head_dim=32)
    settings = VLLMEngineSettings(
        model_folder(tmp_path, model=made),
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        kv_cache_bytes=2**28,
        gpu_memory_utilization=0.05,
    )
    engine = VLLMEngine(settings)
    await engine.prepare()
    params = SamplingParams(n=4, max_tokens=900, ignore_eos=True)
    task = asyncio.create_task(engine.sample([5, 6], params))
    await asyncio.sleep(0.3)
    for child in psutil.Process().children(recursive=True):
        os.kill(child.pid, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(ConnectionError, match="ended"):
        await asyncio.wait_for(task, 10)
    with pytest.raises(ConnectionError, match="ended"):
        await engine.health()
    assert time.monotonic() - start < 10
    await engine.close()
