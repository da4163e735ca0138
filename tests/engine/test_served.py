import asyncio
import functools

import openai

from tests.common.models.toy import model_folder
from trinity.common.models import ModelSettings, SamplingParams
from trinity.common.models.api import one_model
from trinity.common.models.fake import FakeEngine
from trinity.engine.served import ServedEngine
from trinity.engine.torch import TorchEngine, TorchEngineSettings


async def test_an_engine_samples_and_answers_the_api(tmp_path):
    folder = model_folder(tmp_path)
    settings = TorchEngineSettings(folder, dtype="float32", num_threads=1)
    engine = ServedEngine(
        functools.partial(TorchEngine, settings), ModelSettings(folder, name="toy"), api_key="k"
    )
    await engine.prepare()
    address, key = await engine.api()
    await engine.prepare()  # once more, as after a death inside
    assert await engine.api() == (address, key)
    client = openai.AsyncOpenAI(base_url=f"{address}/v1", api_key=key)
    answer = await client.chat.completions.create(
        model="toy", messages=[{"role": "user", "content": "hi"}], max_tokens=4, seed=1
    )
    assert answer.usage.completion_tokens <= 4
    assert len(await engine.sample([5], SamplingParams(n=2, max_tokens=1))) == 2
    assert len(await engine.logprobs([5, 6])) == 1
    assert await engine.version() == 0 and (await engine.health())["tokens"] >= 3
    await engine.close()


async def test_what_the_api_replied_is_forgotten_in_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(one_model, "_MAX_REQUESTS", 3)
    settings = ModelSettings(model_folder(tmp_path), name="toy", enable_history=True)
    engine = ServedEngine(lambda: FakeEngine([[5, 6]]), settings)
    models = [engine._model[""] for _ in range(7)]
    assert models[0] is models[2] and models[3] is models[5]
    assert len({id(model) for model in models}) == 3 and "other" not in engine._model
    assert len({model.run_seed for model in models}) == 3
    assert not any(model.model_config.enable_history for model in models)


class OfOneLoop(FakeEngine):
    """Works in the event loop that it was made ready in only, as vLLM does."""

    async def prepare(self):
        self.loop = asyncio.get_running_loop()

    async def sample(self, prompt_ids, params, adapter=None):
        assert asyncio.get_running_loop() is self.loop
        return await super().sample(prompt_ids, params, adapter)


async def test_requests_of_the_api_run_in_the_loop_of_the_engine(tmp_path):
    settings = ModelSettings(model_folder(tmp_path), name="toy")
    engine = ServedEngine(lambda: OfOneLoop([[5, 6]]), settings, api_key="k")
    await engine.prepare()
    address, _ = await engine.api()
    client = openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="k", max_retries=0)
    found = await client.completions.create(model="toy", prompt=[5, 6])
    assert found.usage.completion_tokens == 2
    await engine.close()
