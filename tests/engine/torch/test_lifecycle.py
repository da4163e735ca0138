import asyncio
from dataclasses import replace

import pytest
import torch

from tests.common.models.toy import config, model_folder, tokenizer
from tests.engine.torch.standstill import Standstill
from tests.engine.torch.test_batching import prompt, ready
from trinity.common.models.loading import load_causal_lm
from trinity.common.models.protocol import SamplingParams, WeightTicket
from trinity.engine import engine_class
from trinity.engine.torch import TorchEngine, TorchEngineSettings
from trinity.engine.torch.jobs import SampleJob
from trinity.synchronizer.channel import CheckpointChannel
from trinity.utils.digest import weights_digest

LONG = SamplingParams(n=2, max_tokens=200, seed=1, ignore_eos=True)


def send(folder, path, version, seed=1, change=None):
    """A ticket for the weights that another seed gives."""
    model, _ = load_causal_lm(folder, "float32", seed)
    weights = dict(model.named_parameters())
    if change:
        change(weights)
    return CheckpointChannel(path).send(version, weights.items())


def test_the_registry_knows_the_engine():
    assert engine_class("torch") is TorchEngine


async def test_stop_token_max_and_min_tokens_are_exact(tmp_path):
    engine = await ready(model_folder(tmp_path))
    ids = prompt(10)
    [free] = await engine.sample(ids, SamplingParams(max_tokens=40, seed=3, ignore_eos=True))
    assert len(free.token_ids) == 40 and free.finish_reason == "length"
    stop = free.token_ids[20]
    first = free.token_ids.index(stop)
    params = SamplingParams(max_tokens=40, seed=3, ignore_eos=True, stop_token_ids=(stop,))
    [stopped] = await engine.sample(ids, params)
    assert stopped.token_ids == free.token_ids[: first + 1] and stopped.finish_reason == "stop"
    late = SamplingParams(
        max_tokens=40, seed=3, ignore_eos=True, stop_token_ids=(stop,), min_tokens=first + 5
    )
    [kept] = await engine.sample(ids, late)
    assert len(kept.token_ids) > first + 4 and stop not in kept.token_ids[: first + 4]
    await engine.close()


async def test_the_end_of_sequence_ends_a_sample(tmp_path):
    eos = tokenizer().eos_token_id
    folder = model_folder(tmp_path, model=config(eos_token_id=eos, vocab_size=eos + 10))
    engine = await ready(folder)
    params = SamplingParams(n=16, max_tokens=60, seed=0, temperature=1.5)
    ends = [s for s in await engine.sample([8], params) if s.finish_reason == "stop"]
    assert ends and all(s.token_ids[-1] == eos and eos not in s.token_ids[:-1] for s in ends)
    await engine.close()


async def test_a_stop_text_may_span_tokens_and_its_tokens_stay(tmp_path):
    engine = await ready(model_folder(tmp_path))
    made = tokenizer()
    params = SamplingParams(max_tokens=60, seed=4, ignore_eos=True)
    [free] = await engine.sample(prompt(10), params)
    letters = [i for i in range(5, 55) if made.decode(free.token_ids[i : i + 2]).isascii()]
    place = letters[0]
    stop = made.decode(free.token_ids[place : place + 2])
    params = SamplingParams(max_tokens=60, seed=4, ignore_eos=True, stop=(stop,))
    [cut] = await engine.sample(prompt(10), params)
    assert cut.finish_reason == "stop"
    assert stop in made.decode(cut.token_ids) and stop not in made.decode(cut.token_ids[:-1])
    await engine.close()


async def test_a_cancelled_request_frees_its_place(tmp_path):
    engine = await ready(model_folder(tmp_path))
    standstill = Standstill(engine)
    other = asyncio.create_task(engine.sample(prompt(5), LONG))
    gone = asyncio.create_task(engine.sample(prompt(6), LONG))
    await standstill.begun()
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    later = Standstill(engine, 2)
    standstill.end()
    await later.begun()
    assert (await engine.health())["running"] == 2
    later.end()
    assert await other == await engine.sample(prompt(5), LONG)
    health = await engine.health()
    assert (health["running"], health["waiting"]) == (0, 0)
    await engine.close()


@pytest.mark.parametrize("mode", ["pause", "keep", "abort"])
async def test_update_in_mid_request(tmp_path, mode):
    folder = model_folder(tmp_path / "model")
    ticket = send(folder, tmp_path / "channel", version=3)
    engine = await ready(folder, update_mode=mode)
    [old, _] = await engine.sample(prompt(5), LONG)
    standstill = Standstill(engine)
    task = asyncio.create_task(engine.sample(prompt(5), LONG))
    await standstill.begun()
    loading = asyncio.create_task(engine.load_weights(ticket))
    await standstill.asked()
    standstill.end()
    digest = await loading
    late = asyncio.create_task(engine.sample(prompt(5), LONG))
    [through, _], [new, _] = await task, await late
    assert digest == ticket.digest and await engine.version() == 3
    assert set(new.versions) == {3} and new.token_ids != old.token_ids
    if mode == "pause":
        assert through == old
    elif mode == "abort":
        assert through == new
    else:
        change = through.versions.index(3)
        assert 0 < change < 200 and through.versions == [0] * change + [3] * (200 - change)
        assert through.token_ids[:change] == old.token_ids[:change]
        assert through.token_ids != old.token_ids
    await engine.close()


async def test_new_weights_are_those_that_were_sent(tmp_path):
    folder = model_folder(tmp_path / "model")
    engine = await ready(folder)
    prompt_ids = prompt(70)
    await engine.sample(prompt_ids, SamplingParams(max_tokens=1, seed=0))
    await engine.load_weights(send(folder, tmp_path / "channel", version=1))
    model, _ = load_causal_lm(folder, "float32", 1)
    with torch.no_grad():
        logits = model(torch.tensor([prompt_ids])).logits[0, -1]
    [sample] = await engine.sample(prompt_ids, SamplingParams(max_tokens=1, seed=0))
    expected = float(logits.log_softmax(-1)[sample.token_ids[0]])
    assert sample.logprobs[0] == pytest.approx(expected, abs=1e-5)
    await engine.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("model.norm.weight"), "did not come"),
        (lambda w: w.update({"model.extra": torch.zeros(2)}), "does not have"),
        (lambda w: w.update({"model.norm.weight": torch.zeros(3)}), "came as"),
        (lambda w: w.update({"model.norm.weight": torch.zeros(32).bfloat16()}), "came as"),
    ],
)
async def test_weights_that_do_not_fit_are_an_error_and_end_sampling(tmp_path, change, message):
    folder = model_folder(tmp_path / "model")
    engine = await ready(folder)
    with pytest.raises(ValueError, match=message):
        await engine.load_weights(send(folder, tmp_path / "channel", 1, change=change))
    with pytest.raises(RuntimeError, match="stopped"):
        await engine.sample([5], SamplingParams(max_tokens=1))
    await engine.load_weights(send(folder, tmp_path / "channel", 2))
    assert len(await engine.sample([5], SamplingParams(max_tokens=1))) == 1
    await engine.close()


async def test_a_wrong_digest_is_an_error(tmp_path):
    folder = model_folder(tmp_path / "model")
    engine = await ready(folder)
    ticket = send(folder, tmp_path / "channel", 1)
    wrong = WeightTicket(1, ticket.method, "0" * 32, ticket.payload)
    with pytest.raises(RuntimeError, match="digest"):
        await engine.load_weights(wrong)
    await engine.close()


async def test_damaged_weights_are_reported_not_sampled(tmp_path):
    folder = model_folder(tmp_path / "model")
    engine = await ready(folder)

    def damage(weights):
        weights["model.norm.weight"] = torch.full((32,), float("nan"))

    await engine.load_weights(send(folder, tmp_path / "channel", 1, change=damage))
    with pytest.raises(FloatingPointError, match="not finite"):
        await engine.sample([5], SamplingParams(max_tokens=1))
    await engine.close()


async def test_errors_of_the_caller(tmp_path):
    engine = TorchEngine(TorchEngineSettings(str(tmp_path / "nowhere")))
    with pytest.raises(RuntimeError, match="prepare"):
        await engine.sample([1], SamplingParams())
    engine = await ready(model_folder(tmp_path), max_model_len=16)
    with pytest.raises(ValueError, match="at least 1"):
        await engine.sample([], SamplingParams())
    with pytest.raises(ValueError, match="at most"):
        await engine.sample(prompt(16), SamplingParams())
    [sample] = await engine.sample(prompt(10), SamplingParams(ignore_eos=True))
    assert len(sample.token_ids) == 6
    await engine.close()


async def test_a_missing_model_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    engine = TorchEngine(TorchEngineSettings(str(tmp_path / "empty")))
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        await engine.prepare()


async def test_closing_ends_what_runs(tmp_path):
    engine = await ready(model_folder(tmp_path))
    standstill = Standstill(engine)
    task = asyncio.create_task(engine.sample(prompt(5), LONG))
    await standstill.begun()
    closing = asyncio.create_task(engine.close())
    await standstill.asked()
    standstill.end()
    await closing
    with pytest.raises(ConnectionError, match="closed"):
        await task


async def test_a_request_that_comes_while_the_engine_ends_fails_and_so_do_those_that_run(tmp_path):
    engine = await ready(model_folder(tmp_path))
    worker = engine._worker
    await engine.pause()
    running = asyncio.create_task(engine.sample(prompt(8), LONG))
    while not (await engine.health())["waiting"]:
        await asyncio.sleep(0)
    late, was_done = [], asyncio.Event()
    loop = asyncio.get_running_loop()

    def end():
        worker._is_closing = True
        job = SampleJob(
            [5],
            SamplingParams(),
            late.append,
            stream_keys=[1],
            max_tokens=1,
            stop_ids=[],
            is_usual=True,
        )
        worker._put(lambda: worker._submit(job))
        loop.call_soon_threadsafe(was_done.set)

    worker._put(end)
    with pytest.raises(ConnectionError, match="closed"):
        await asyncio.wait_for(running, 60)
    await was_done.wait()
    assert isinstance(late[0].error, ConnectionError)
    await engine.close()


async def test_repetition_penalty_lowers_seen_tokens(tmp_path):
    engine = await ready(model_folder(tmp_path))
    params = {"max_tokens": 40, "seed": 0, "temperature": 0, "ignore_eos": True}
    [free] = await engine.sample(prompt(5), SamplingParams(**params))
    [other] = await engine.sample(prompt(5), SamplingParams(**params, repetition_penalty=50.0))
    assert len(set(other.token_ids)) == 40 > len(set(free.token_ids))
    await engine.close()


def test_random_weights_are_the_same_in_every_dtype_and_leave_the_generator_alone(tmp_path):
    folder = model_folder(tmp_path)
    state = torch.random.get_rng_state()
    full, is_random = load_causal_lm(folder, "float32", 7)
    half, _ = load_causal_lm(folder, "bfloat16", 7)
    assert is_random and torch.equal(state, torch.random.get_rng_state())
    digest = weights_digest(half.named_parameters())
    assert weights_digest(full.bfloat16().named_parameters()) == digest
    other, _ = load_causal_lm(folder, "bfloat16", 8)
    assert weights_digest(other.named_parameters()) != digest
    half.save_pretrained(folder)
    again, is_random = load_causal_lm(folder, "auto")
    assert not is_random and weights_digest(again.named_parameters()) == digest


def test_rope_overrides_reach_the_model(tmp_path):
    folder = model_folder(tmp_path)
    usual, _ = load_causal_lm(folder, "float32")
    overrides = {"rope_theta": 123.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    changed, _ = load_causal_lm(folder, "float32", config_overrides=overrides)
    found = changed.config.rope_parameters
    assert (found["rope_theta"], found["rope_type"], found["factor"]) == (123.0, "linear", 2.0)
    ids = torch.tensor([prompt(9)])
    assert not torch.equal(usual(ids).logits, changed(ids).logits)


async def test_questions_that_nobody_waits_for_do_not_end_the_engine(tmp_path):
    folder = model_folder(tmp_path / "model")
    engine = await ready(folder)
    standstill = Standstill(engine)
    long = asyncio.create_task(engine.sample(prompt(5), replace(LONG, request_id="long")))
    await standstill.begun()
    ticket = send(folder, tmp_path / "channel", version=3)
    asked = [engine.partial("long"), engine.pause(), engine.load_weights(ticket)]
    given_up = [asyncio.ensure_future(question) for question in asked]
    await asyncio.sleep(0)
    for question in given_up:
        question.cancel()
    await asyncio.gather(*given_up, return_exceptions=True)
    standstill.end()
    await engine.resume()
    assert len(await asyncio.wait_for(long, 60)) == 2
    await engine.close()


async def test_a_model_that_cannot_be_loaded_is_an_error_each_time(tmp_path):
    engine = TorchEngine(TorchEngineSettings(model_path=str(tmp_path)))
    for _ in range(2):
        with pytest.raises(OSError, match=r"config\.json"):
            await asyncio.wait_for(engine.prepare(), 60)
    await asyncio.wait_for(engine.close(), 60)


async def test_a_worker_that_fails_leaves_nobody_waiting(tmp_path):
    engine = await ready(model_folder(tmp_path))
    standstill = Standstill(engine)
    waiting = asyncio.create_task(engine.sample(prompt(5), LONG))
    await standstill.begun()
    engine._worker._put(lambda: 1 // 0)
    standstill.end()
    for asked in (waiting, engine.sample(prompt(5), LONG), engine.health()):
        with pytest.raises(ConnectionError, match="ZeroDivisionError"):
            await asyncio.wait_for(asked, 60)
    await engine.close()


class Forgetful:
    """A batcher that fails behind new weights."""

    def __init__(self, batcher):
        self._batcher = batcher

    def __getattr__(self, name):
        return getattr(self._batcher, name)

    def renew(self, version):
        raise MemoryError("no room")


async def test_whoever_sends_weights_learns_of_what_fails_behind_them(tmp_path):
    folder = model_folder(tmp_path / "model")
    engine = await ready(folder)
    engine._worker._batcher = Forgetful(engine._worker._batcher)
    with pytest.raises(MemoryError, match="no room"):
        ticket = send(folder, tmp_path / "channel", version=3)
        await asyncio.wait_for(engine.load_weights(ticket), 60)
    with pytest.raises(RuntimeError, match="no room"):
        await engine.sample(prompt(5), LONG)
    await engine.close()
