"""Prompts that are scored while new weights come: all their logprobs are of the same weights."""

import asyncio
import importlib.util
from dataclasses import replace

import pytest
import torch

from tests.engine.test_conformance import plain_logprobs, prompt
from tests.engine.vllm.test_faults import engine_of, folder  # noqa: F401  # a fixture
from trinity.common.models.loading import load_causal_lm
from trinity.synchronizer.channel import CheckpointChannel

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"
)
IDS = prompt(900)
IN_PIECES = {"max_num_seqs": 8, "max_num_batched_tokens": 16}  # of 16 tokens a step
WAYS = [(mode, is_at_once) for mode in ("pause", "abort", "keep") for is_at_once in (False, True)]


async def test_a_scored_prompt_is_of_one_version(folder, tmp_path, monkeypatch):  # noqa: F811
    from trinity.engine.vllm import engine as engine_module

    models = [load_causal_lm(folder, "float32", seed)[0] for seed in (0, 1)]
    wanted = [plain_logprobs(model, IDS, 1, 1.0) for model in models]
    hot = [plain_logprobs(model, IDS[:40], 1, 2.0) for model in models]
    engine = engine_of(folder, keeps_seeds=False, extra_engine_args=IN_PIECES)
    await engine.prepare()
    try:
        for version, (mode, is_at_once) in enumerate(WAYS, 1):
            engine._settings = replace(engine._settings, update_mode=mode)
            ways = ("checkpoint",) if is_at_once else ()  # what NCCL and IPC are on GPUs
            monkeypatch.setattr(engine_module, "_AT_ONCE", ways)
            model = models[version % 2]
            ticket = CheckpointChannel(tmp_path / str(version)).send(
                version, model.named_parameters()
            )
            whole = asyncio.create_task(engine.logprobs(IDS))
            single = asyncio.create_task(engine.logprobs(IDS[:40], 2.0))
            await asyncio.sleep(0.1)
            assert not whole.done()
            async with asyncio.timeout(20):
                await engine.load_weights(ticket)
            for task, known in ((whole, wanted), (single, hot)):
                found = torch.tensor(await asyncio.wait_for(task, 20))
                gaps = [float((found - logprobs).abs().max()) for logprobs in known]
                assert min(gaps) < 5e-3, (mode, is_at_once, gaps)
            assert await engine.version() == version
            assert (await engine.health())["running"] == 0
    finally:
        await engine.close()
