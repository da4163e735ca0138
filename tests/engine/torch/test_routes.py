import asyncio

import torch

from tests.common.models import moe
from tests.common.models.toy import tokenizer
from trinity.common.models import ModelSettings, ModelWrapper
from trinity.common.models.protocol import SamplingParams
from trinity.common.models.routes import UNKNOWN, Routers
from trinity.engine.torch import TorchEngine, TorchEngineSettings


def plain_routes(tokens: list[int], **sizes: int) -> torch.Tensor:
    """By transformers alone, the sequence at once."""
    model = moe.made(moe.qwen(**sizes))
    with torch.no_grad(), Routers(model).noting() as noted:
        model(torch.tensor([tokens]))
        return noted()


async def test_samples_tell_the_routes_of_prompt_and_reply(tmp_path):
    """In pages and rows, several at once, prompts in pieces, shared, and known from before."""
    settings = {"dtype": "float32", "num_threads": 1, "max_batch_tokens": 64}
    engine = TorchEngine(
        TorchEngineSettings(moe.model_folder(tmp_path), returns_routes=True, **settings)
    )
    await engine.prepare()
    beginning = [3 + number % 80 for number in range(150)]
    prompts = [beginning, [*beginning, 5, 6], [4], beginning[:70]]
    for _ in range(2):  # the second time prompts are known
        asked = [
            engine.sample(ids, SamplingParams(n=3, max_tokens=2 + number * 9, ignore_eos=True))
            for number, ids in enumerate(prompts)
        ]
        for ids, samples in zip(prompts, await asyncio.gather(*asked), strict=True):
            for sample in samples:
                tokens = [*ids, *sample.token_ids]
                assert len(sample.routes) == len(tokens)
                assert (sample.routes[-1] == UNKNOWN).all()
                found = sample.routes[:-1].sort(-1).values
                assert torch.equal(found, plain_routes(tokens)[:-1].sort(-1).values)
    await engine.close()


async def test_an_engine_that_is_not_asked_tells_none(tmp_path):
    engine = TorchEngine(TorchEngineSettings(moe.model_folder(tmp_path), dtype="float32"))
    await engine.prepare()
    [sample] = await engine.sample([3, 4], SamplingParams(max_tokens=2))
    assert sample.routes is None
    await engine.close()


async def test_a_conversation_as_one_row_has_its_routes(tmp_path):
    """The second prompt goes on from the first reply; what comes between was computed with it."""
    words = tokenizer("chatml")
    folder = moe.model_folder(tmp_path, moe.qwen(vocab_size=len(words)))
    engine = TorchEngine(TorchEngineSettings(folder, dtype="float32", returns_routes=True))
    await engine.prepare()
    model = ModelWrapper(engine, ModelSettings("toy", max_model_len=400), words)
    messages = [{"role": "user", "content": "the thing"}]
    for text in ("and then", None):
        [reply] = await model.chat_async(messages, max_tokens=9)
        messages.append({"role": "assistant", "content": reply.response_text})
        if text is not None:
            messages.append({"role": "user", "content": text})
    row = await model.convert_messages_to_experience_async(messages)
    assert row.metrics["token_fork"] == 0
    tokens = row.tokens.tolist()
    wanted = plain_routes(tokens, vocab_size=len(words))
    known = row.routed_experts != UNKNOWN
    assert known[:-1].all() and not known[-1].any()
    assert torch.equal(row.routed_experts[:-1].sort(-1).values, wanted[:-1].sort(-1).values)
    await engine.close()
