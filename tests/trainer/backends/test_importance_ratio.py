"""The engine's logprobs are the trainer's, to the bit of the hidden states."""

import asyncio

import pytest
import torch

from tests.trainer.backends.test_torch_engine import settings
from tests.trainer.toy import VOCAB, model_folder
from trinity.common.experience import EID, Experience
from trinity.common.models.protocol import SamplingParams
from trinity.engine.torch import TorchEngine
from trinity.engine.torch.settings import TorchEngineSettings
from trinity.trainer.backends.torch.engine import TorchTrainEngine
from trinity.trainer.batch import TrainBatch
from trinity.trainer.loss import Objective


async def sampled(folder: str, dtype: str, temperature: float) -> list[Experience]:
    engine = TorchEngine(
        TorchEngineSettings(
            folder, dtype=dtype, init_seed=42, kv_cache_bytes=1 << 24, max_model_len=256
        )
    )
    await engine.prepare()
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in (5, 30, 70)]
    params = [
        SamplingParams(n=4, max_tokens=40, seed=i, temperature=temperature, ignore_eos=True)
        for i in range(3)
    ]
    found = await asyncio.gather(*map(engine.sample, prompts, params))
    await engine.close()
    return [
        Experience(
            eid=EID(0, task, run),
            tokens=prompts[task] + c.token_ids,
            prompt_length=len(prompts[task]),
            logprobs=c.logprobs,
            advantages=[1.0 - run] * len(c.token_ids),
        )
        for task, samples in enumerate(found)
        for run, c in enumerate(samples)
    ]


@pytest.mark.parametrize("head_dim", [8, 16])  # 16: attention is compiled
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
async def test_the_ratio_of_a_synchronous_step_is_one_on_every_token(
    tmp_path, dtype, temperature, head_dim
):
    folder = model_folder(tmp_path / "model", head_dim=head_dim)
    batch = TrainBatch.from_experiences(await sampled(folder, dtype, temperature))
    engine = TorchTrainEngine(settings(folder, dtype=dtype, temperature=temperature))
    await engine.prepare()
    metrics = await engine.forward_backward(batch, Objective.from_names("ppo"))
    assert metrics["actor/ratio_max_deviation"] < 1e-5
    assert metrics["actor/ratio_mean"] == pytest.approx(1, abs=1e-6)
    await engine.optim_step()
    metrics = await engine.forward_backward(batch, Objective.from_names("ppo"))
    assert metrics["actor/ratio_max_deviation"] > 1e-5
