"""What every engine must do, asked of each that is installed.

`make test-vllm` runs it in an environment that has vLLM.
"""

import asyncio
import importlib.util
import random
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.common.models.toy import config, model_folder, tokenizer
from trinity.common.models import ModelSettings, ModelWrapper, SamplingParams
from trinity.common.models.loading import load_causal_lm
from trinity.synchronizer.channel import CheckpointChannel

HAS_VLLM = importlib.util.find_spec("vllm") is not None
HAS_TINKER = importlib.util.find_spec("tinker") is not None
ENGINES = [
    pytest.param("torch"),
    pytest.param("vllm", marks=pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")),
    pytest.param("tinker", marks=pytest.mark.skipif(not HAS_TINKER, reason="no tinker installed")),
]
# On a GPU vLLM's float32 attention multiplies in TF32.
TOLERANCE = {
    "torch": 1e-5,
    "vllm": 5e-3 if torch.cuda.is_available() else 1e-3,
    "tinker": 1e-5,
}
TRIES = 20  # at a request in its course: a busy machine may come to it too late
# What a service gives no way to do; `tests/engine/tinker` says what it does instead.
LACKS = {
    "tinker": {"temperature", "min_tokens", "partial", "keep", "digest", "folder", "vocabulary"}
}

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.parametrize("kind", ENGINES, scope="module", indirect=True),
]


@pytest.fixture(scope="module")
def kind(request):
    return request.param


def needs(kind, what):
    if what in LACKS.get(kind, ()):
        pytest.skip(f"{kind} has no {what}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, kind):
    return model_in(tmp_path_factory.mktemp(kind))


def model_in(folder):
    """A model wide enough for the kernels of all engines."""
    made = config(
        hidden_size=128, intermediate_size=128, head_dim=32, initializer_range=0.05,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    return model_folder(folder, model=made)


def make(kind, folder, places, **settings):
    if kind == "tinker":
        from tests.engine.tinker.served import engine_of, serving

        return engine_of(places.enter_context(serving(folder)), folder)
    if kind == "torch":
        from trinity.engine.torch import TorchEngine, TorchEngineSettings

        given = {"dtype": "float32", "num_threads": 1, **settings}
        return TorchEngine(TorchEngineSettings(folder, **given))
    from trinity.engine.vllm.engine import VLLMEngine
    from trinity.engine.vllm.settings import VLLMEngineSettings

    given = {
        "dtype": "float32", "enforce_eager": True, "max_model_len": 1024,
        "kv_cache_bytes": 2**28, "gpu_memory_utilization": 0.05, **settings,
    }  # fmt: skip
    return VLLMEngine(VLLMEngineSettings(folder, **given))


@pytest.fixture(scope="module")
def engine(kind, folder):
    """One engine for all tests: starting vLLM takes its time. It updates in mode "keep"."""
    holder, places = {}, ExitStack()

    async def get():
        if not holder:
            holder["engine"] = make(kind, folder, places, update_mode="keep")
            await holder["engine"].prepare()
        return holder["engine"]

    with places:
        yield get


def prompt(length, seed=0):
    rng = random.Random(f"{seed}/{length}")
    return [rng.randrange(7, 260) for _ in range(length)]


def plain_logprobs(model, ids, length, temperature):
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, length - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[length:])[:, None])[:, 0]


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
async def test_logprobs_equal_a_direct_forward_pass(kind, folder, engine, temperature):
    if temperature != 1:
        needs(kind, "temperature")
    model, _ = load_causal_lm(folder, "float32", 0)
    engine = await engine()
    for length in (1, 40, 130):
        ids = prompt(length)
        params = SamplingParams(
            n=2, temperature=temperature, max_tokens=20, ignore_eos=True, seed=1
        )
        for sample in await engine.sample(ids, params):
            whole = [*ids, *sample.token_ids]
            expected = plain_logprobs(model, whole, length, temperature)
            found = torch.tensor(sample.logprobs)
            torch.testing.assert_close(found, expected, atol=TOLERANCE[kind], rtol=0)
            scored = torch.tensor(await engine.logprobs(whole, temperature))
            assert len(scored) == len(whole) - 1
            torch.testing.assert_close(scored[length - 1 :], expected, atol=TOLERANCE[kind], rtol=0)


async def test_samples_are_independent_and_seeds_repeat(kind, engine):
    engine = await engine()
    params = SamplingParams(n=6, temperature=1.0, max_tokens=12, seed=5, ignore_eos=True)
    first = await engine.sample(prompt(20), params)
    again = await engine.sample(prompt(20), params)
    assert [s.token_ids for s in first] == [s.token_ids for s in again]
    assert len({tuple(s.token_ids) for s in first}) == 6
    other = SamplingParams(n=6, temperature=1.0, max_tokens=12, seed=6, ignore_eos=True)
    assert await engine.sample(prompt(20), other) != first


async def test_greedy_takes_the_most_likely(kind, folder, engine):
    model, _ = load_causal_lm(folder, "float32", 0)
    engine = await engine()
    ids = prompt(15)
    [sample] = await engine.sample(
        ids, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    )
    for token in sample.token_ids:
        with torch.no_grad():
            assert int(model(torch.tensor([ids])).logits[0, -1].argmax()) == token
        ids.append(token)


async def test_lengths_and_stops_are_exact(kind, engine):
    engine = await engine()
    made = tokenizer()
    base = {"temperature": 1.0, "seed": 3, "ignore_eos": True, "max_tokens": 40}
    [free] = await engine.sample(prompt(10), SamplingParams(**base))
    assert len(free.token_ids) == len(free.logprobs) == 40 and free.finish_reason == "length"
    stop = free.token_ids[20]
    first = free.token_ids.index(stop)
    [cut] = await engine.sample(prompt(10), SamplingParams(**base, stop_token_ids=(stop,)))
    assert cut.token_ids == free.token_ids[: first + 1] and cut.finish_reason == "stop"
    if "min_tokens" not in LACKS.get(kind, ()):
        late = SamplingParams(**base, stop_token_ids=(stop,), min_tokens=first + 3)
        [kept] = await engine.sample(prompt(10), late)
        assert len(kept.token_ids) > first + 2 and stop not in kept.token_ids[: first + 2]
    place = next(
        k for k in range(3, 38) if made.decode(free.token_ids[k : k + 2]).isascii()
        and made.decode(free.token_ids[k : k + 2]).strip()
    )  # fmt: skip
    text = made.decode(free.token_ids[place : place + 2])
    [ended] = await engine.sample(prompt(10), SamplingParams(**base, stop=(text,)))
    assert ended.finish_reason == "stop"
    assert text in made.decode(ended.token_ids) and text not in made.decode(ended.token_ids[:-1])


async def test_two_hundred_requests_of_mixed_lengths(kind, engine):
    engine = await engine()
    rng = random.Random(0)
    count = 40 if kind == "tinker" else 200  # the service of the tests takes one after the other
    asked = [
        (prompt(rng.randrange(1, 300), k), SamplingParams(max_tokens=rng.randrange(1, 40), seed=k))
        for k in range(count)
    ]
    found = await asyncio.gather(*[engine.sample(*request) for request in asked])
    for (_, params), [sample] in zip(asked, found, strict=True):
        assert len(sample.token_ids) == len(sample.logprobs) == len(sample.versions)
        assert len(sample.token_ids) == params.max_tokens or sample.finish_reason == "stop"
    assert (await engine.health())["running"] == 0


async def test_cancelled_requests_free_their_place(kind, engine):
    engine = await engine()
    params = SamplingParams(n=4, max_tokens=900, ignore_eos=True, seed=0)
    for _ in range(TRIES):
        task = asyncio.create_task(engine.sample(prompt(5), params))
        while not (task.done() or (await engine.health())["running"]):
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait([task])
        if task.cancelled():
            break
    assert task.cancelled()
    async with asyncio.timeout(60):
        while (await engine.health())["running"]:
            await asyncio.sleep(0.005)
    assert len(await engine.sample(prompt(5), SamplingParams(max_tokens=2, seed=0))) == 1


async def test_tokens_are_known_while_they_come(kind, engine):
    needs(kind, "partial")
    engine = await engine()
    params = SamplingParams(n=2, max_tokens=300, ignore_eos=True, seed=1, request_id="r")
    for _ in range(TRIES):
        task = asyncio.create_task(engine.sample(prompt(9), params))
        seen = []
        while not task.done():
            await asyncio.sleep(0)  # the engine answers between two steps
            seen.append(await engine.partial("r"))
        whole = [completion.token_ids for completion in await task]
        growing = [found for found in seen if found and found[0]]
        if len(growing) > 2:
            break
    assert len(growing) > 2 and len(growing[0][0]) < 300
    for found in growing:
        assert [ids[: len(part)] for ids, part in zip(whole, found, strict=True)] == found
    assert await engine.partial("r") == []


async def test_unicode_and_special_tokens_go_through_a_wrapper(kind, folder, engine):
    model = ModelWrapper(await engine(), ModelSettings(folder, max_response_tokens=5))
    text = "数 é 🙂 <|im_end|> \n\n the"
    [found] = await model.chat_async([{"role": "user", "content": text}], seed=1, ignore_eos=True)
    assert text in found.prompt_text
    assert found.tokens[: found.prompt_length].tolist() == tokenizer().encode(found.prompt_text)
    assert found.response_length == 5


async def test_errors_of_the_caller(kind, engine):
    engine = await engine()
    with pytest.raises(ValueError, match="at least 1"):
        await engine.sample([], SamplingParams())
    with pytest.raises(ValueError, match="at most"):
        await engine.sample(prompt(1024), SamplingParams())
    with pytest.raises(ValueError, match="adapter"):
        await engine.sample([5], SamplingParams(), adapter="none")


async def test_paused_requests_wait(kind, engine):
    engine = await engine()
    await engine.pause()
    task = asyncio.create_task(engine.sample(prompt(5), SamplingParams(max_tokens=2, seed=0)))
    await asyncio.sleep(0.1)
    assert not task.done()
    await engine.resume()
    await asyncio.wait_for(task, 100)


async def test_weights_change_in_mid_request_and_every_token_tells(kind, folder, engine, tmp_path):
    needs(kind, "keep")
    engine = await engine()
    channel = CheckpointChannel(tmp_path)
    params = SamplingParams(n=2, max_tokens=600, ignore_eos=True, seed=1, request_id="through")
    for version in range(7, 7 + TRIES):
        before = await engine.version()
        model, _ = load_causal_lm(folder, "float32", version)
        ticket = channel.send(version, model.named_parameters())
        [whole, _] = await engine.sample(prompt(30), params)
        task = asyncio.create_task(engine.sample(prompt(30), params))
        while not (task.done() or any(await engine.partial("through"))):
            await asyncio.sleep(0.005)
        assert await engine.load_weights(ticket) == ticket.digest
        [through, _] = await task
        assert await engine.version() == version
        if version in through.versions:
            break
    change = through.versions.index(version)
    wanted = [before] * change + [version] * (600 - change)
    assert 0 < change < 600 and through.versions == wanted
    assert through.token_ids[:change] == whole.token_ids[:change]
    assert through.token_ids != whole.token_ids
    ids = prompt(60)
    [new] = await engine.sample(ids, SamplingParams(max_tokens=10, ignore_eos=True, seed=1))
    expected = plain_logprobs(model, [*ids, *new.token_ids], 60, 1.0)
    torch.testing.assert_close(torch.tensor(new.logprobs), expected, atol=TOLERANCE[kind], rtol=0)


async def test_weights_that_do_not_fit_end_sampling_until_right_ones_come(
    kind, folder, engine, tmp_path
):
    needs(kind, "digest")
    engine = await engine()
    model, _ = load_causal_lm(folder, "float32", 0)
    right = dict(model.named_parameters())
    wrong = {name: tensor for name, tensor in right.items() if name != "model.norm.weight"}
    channel = CheckpointChannel(tmp_path)
    with pytest.raises(ValueError, match="did not come"):
        await engine.load_weights(channel.send(8, wrong.items()))
    with pytest.raises(RuntimeError, match="stopped"):
        await engine.sample([5], SamplingParams(max_tokens=1))
    ticket = channel.send(9, right.items())
    assert await engine.load_weights(ticket) == ticket.digest
    ids = prompt(60)
    [sample] = await engine.sample(ids, SamplingParams(max_tokens=5, ignore_eos=True, seed=1))
    expected = plain_logprobs(model, [*ids, *sample.token_ids], 60, 1.0)
    torch.testing.assert_close(
        torch.tensor(sample.logprobs), expected, atol=TOLERANCE[kind], rtol=0
    )


async def test_ids_that_are_no_tokens_harm_only_who_sends_them(kind, engine):
    needs(kind, "vocabulary")
    engine = await engine()
    other = asyncio.create_task(
        engine.sample(prompt(20), SamplingParams(max_tokens=300, ignore_eos=True))
    )
    brief = SamplingParams(max_tokens=4, min_tokens=2)
    for ids, stops in (([5, 10**6], ()), ([5, -1], ()), ([5], (10**6,)), ([5], (-2,))):
        with pytest.raises(ValueError, match=r"There is no token (1000000|-1|-2): the ids"):
            await engine.sample(ids, replace(brief, stop_token_ids=stops))
    with pytest.raises(ValueError, match="There is no token 1000000"):
        await engine.logprobs([5, 10**6, 7])
    [sample] = await other
    assert len(sample.token_ids) == 300


async def test_the_engine_closes(kind, engine):
    engine = await engine()
    await engine.close()
    with pytest.raises((RuntimeError, ConnectionError)):
        await engine.sample([5], SamplingParams(max_tokens=1))


async def test_a_start_that_fails_shows_why(kind, folder, tmp_path):
    needs(kind, "folder")
    Path(tmp_path, "empty").mkdir()
    with pytest.raises(Exception, match=r"config\.json|empty"):
        await make(kind, str(tmp_path / "empty"), None).prepare()
