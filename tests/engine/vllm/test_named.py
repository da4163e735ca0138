"""When adapters come and go in a vLLM engine that gives its memory away in between."""

import asyncio
import importlib.util
import json

import pytest
import torch
from safetensors.torch import save_file

from trinity.common.models.protocol import NamedAdapter

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"
)


class Sleeper:
    """vLLM, which ends if it is to load an adapter while it sleeps."""

    errored = False

    def __init__(self):
        self.is_asleep, self.loaded = False, []

    async def sleep(self, level):
        await asyncio.sleep(0)
        self.is_asleep = True

    async def wake_up(self):
        self.is_asleep = False

    async def add_lora(self, request):
        assert not self.is_asleep, "its memory is not there"
        self.loaded.append(request.lora_int_id)

    async def remove_lora(self, number):
        assert not self.is_asleep
        self.loaded.remove(number)

    def shutdown(self):
        pass


@pytest.fixture
def folder(tmp_path):
    settings = {"r": 2, "lora_alpha": 2, "target_modules": ["q_proj"], "peft_type": "LORA"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file({name: torch.zeros(2, 4)}, tmp_path / "adapter_model.safetensors")
    return str(tmp_path)


async def test_adapters_come_and_go_once_vllm_is_awake(folder):
    from trinity.engine.vllm.engine import VLLMEngine
    from trinity.engine.vllm.settings import VLLMEngineSettings

    engine, vllm = VLLMEngine(VLLMEngineSettings("model", loads_adapters=True)), Sleeper()
    engine._process.begin(vllm)
    await engine.sleep()
    jobs = [engine.load_adapter(NamedAdapter(name, folder)) for name in ("one", "two")]
    loading = asyncio.gather(*jobs)
    await asyncio.sleep(0.05)
    assert vllm.loaded == [] and not loading.done()
    await engine.wake()
    await asyncio.wait_for(loading, 60)
    assert len(vllm.loaded) == len(await engine.adapters()) == 2
    await engine.sleep()
    leaving = asyncio.create_task(engine.unload_adapter("one"))
    async with asyncio.timeout(60):
        while len(await engine.adapters()) == 2:
            await asyncio.sleep(0.01)
    assert [a.name for a in await engine.adapters()] == ["two"] and not leaving.done()
    await engine.wake()
    await asyncio.wait_for(leaving, 60)
    assert len(vllm.loaded) == 1
    await engine.close()
