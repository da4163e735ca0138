"""vLLM tells the experts that tokens went to, and the trainer on a GPU takes them."""

from importlib.util import find_spec

import pytest
import torch

from tests.common.models import moe
from trinity.common.models.protocol import SamplingParams
from trinity.common.models.routes import UNKNOWN, Routers

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")


async def test_vllm_tells_the_routes_of_prompt_and_reply(tmp_path):
    """In float32, by transformers alone on the CPU; close decisions may fall otherwise."""
    from trinity.engine.vllm.engine import VLLMEngine
    from trinity.engine.vllm.settings import VLLMEngineSettings

    config = moe.qwen(hidden_size=128, head_dim=64, moe_intermediate_size=64)
    folder = moe.model_folder(tmp_path, config)
    settings = VLLMEngineSettings(
        folder, dtype="float32", max_model_len=256, returns_routes=True, enforce_eager=True
    )
    engine = VLLMEngine(settings)
    await engine.prepare()
    model = moe.made(config)
    prompt = [3 + number % 80 for number in range(100)]
    for ids in (prompt, [*prompt, 5]):  # the second goes on from known blocks
        for sample in await engine.sample(ids, SamplingParams(n=2, max_tokens=20, ignore_eos=True)):
            tokens = [*ids, *sample.token_ids]
            assert sample.routes.shape == (len(tokens), 3, moe.PER_TOKEN)
            assert (sample.routes[-1] == UNKNOWN).all()
            with torch.no_grad(), Routers(model).noting() as noted:
                model(torch.tensor([tokens]))
                wanted = noted()[:-1].sort(-1).values
            same = (sample.routes[:-1].sort(-1).values == wanted).float().mean()
            assert same > 0.98
    await engine.close()
