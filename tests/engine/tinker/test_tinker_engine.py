"""What `TinkerEngine` does in a way of its own; `tests/engine/test_conformance.py` has the rest."""

import asyncio
import contextlib
import gc
from dataclasses import replace

import pytest
import torch

pytest.importorskip("tinker")

from tests.common.models.toy import config, model_folder
from tests.engine.test_conformance import plain_logprobs, prompt
from tests.engine.tinker.served import NAME, engine_of, serving
from tests.tinker_service import TinkerTestService
from trinity.common.errors import TrinityError
from trinity.common.models import SamplingParams
from trinity.common.models.loading import load_causal_lm
from trinity.engine.tinker.engine import TinkerEngine
from trinity.engine.tinker.saved import SavedModel, ticket_of
from trinity.engine.tinker.service import TinkerServiceError, TinkerServiceLost
from trinity.engine.tinker.settings import TinkerEngineSettings, TinkerServiceSettings
from trinity.synchronizer.channel import CheckpointChannel

LONG = SamplingParams(max_tokens=400, ignore_eos=True, seed=1)
LIMIT_S = 100  # far less than the library goes on for by itself
PROBE_S = "trinity.engine.tinker.service._PROBE_S"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("tinker"), model=config(initializer_range=0.05))


@pytest.fixture
def service(folder):
    with serving(folder) as place:
        yield place


def hasten(engine: TinkerEngine, timeout_s: float) -> None:
    """Let requests from now on, no more the start, have ``timeout_s``."""
    service = engine._service
    service._settings = replace(service._settings, timeout_s=timeout_s)


async def running(engine: TinkerEngine, params: SamplingParams = LONG) -> asyncio.Task:
    task = asyncio.create_task(engine.sample(prompt(30), params))
    while not (await engine.health())["running"]:
        await asyncio.sleep(0.005)
    return task


async def asked(service: TinkerTestService, request: str) -> None:
    """Wait until the service was asked for something."""
    async with asyncio.timeout(LIMIT_S):
        while request not in service.requests:
            await asyncio.sleep(0.01)


async def test_samples_under_way_end_on_the_weights_they_began_with(service, folder):
    engine = engine_of(service, folder)
    await engine.prepare()
    model, _ = load_causal_lm(folder, "float32", 1)
    path = service.keep(model.state_dict(), NAME, "version_7")
    old, ids = await running(engine), prompt(30)
    assert await engine.load_weights(ticket_of(7, path)) == path
    [new] = await engine.sample(ids, SamplingParams(max_tokens=9, ignore_eos=True, seed=1))
    [before] = await old
    assert await engine.version() == 7
    assert before.versions == [0] * 400 and new.versions == [7] * 9
    for sample, seed in ((before, 0), (new, 1)):
        expected, _ = load_causal_lm(folder, "float32", seed)
        wanted = plain_logprobs(expected, [*ids, *sample.token_ids], 30, 1.0)
        torch.testing.assert_close(torch.tensor(sample.logprobs), wanted, atol=1e-5, rtol=0)
    await engine.close()


async def test_weights_that_are_not_there_end_sampling_until_right_ones_come(
    service, folder, tmp_path
):
    engine = engine_of(service, folder)
    await engine.prepare()
    model, _ = load_causal_lm(folder, "float32", 1)
    with pytest.raises(ValueError, match="don't reach the Tinker service"):
        await engine.load_weights(CheckpointChannel(tmp_path).send(3, model.named_parameters()))
    with pytest.raises(TinkerServiceError, match="There is no 'tinker://nowhere'"):
        await engine.load_weights(ticket_of(3, "tinker://nowhere"))
    with pytest.raises(RuntimeError, match="stopped"):
        await engine.sample([5], SamplingParams(max_tokens=1))
    path = service.keep(model.state_dict(), NAME, "right")
    await engine.load_weights(ticket_of(4, path))
    assert len(await engine.sample([5], SamplingParams(max_tokens=1, seed=1))) == 1
    await engine.close()


@pytest.mark.parametrize("params", [{"min_p": 0.1}, {"min_tokens": 3}, {"repetition_penalty": 1.1}])
async def test_parameters_that_the_service_has_not_are_refused(service, folder, params):
    engine = engine_of(service, folder)
    await engine.prepare()
    with pytest.raises(ValueError, match=next(iter(params))):
        await engine.sample([5], SamplingParams(**params))
    with pytest.raises(ValueError, match="temperature 1"):
        await engine.logprobs([5, 6], temperature=0.5)
    assert await engine.logprobs([5]) == []
    await engine.close()


async def test_an_end_of_text_beside_stop_texts_ends_the_sample(service, folder):
    """The service stops at texts or at ids; the engine sees to what it did not stop at."""
    engine = engine_of(service, folder)
    await engine.prepare()
    [free] = await engine.sample(prompt(10), LONG)
    stop = free.token_ids[20]
    params = SamplingParams(
        max_tokens=400, ignore_eos=True, seed=1, stop=("never",), stop_token_ids=(stop,)
    )
    [cut] = await engine.sample(prompt(10), params)
    assert cut.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert cut.logprobs == free.logprobs[: len(cut.token_ids)] and cut.finish_reason == "stop"
    await engine.close()


async def test_a_cancelled_request_is_cancelled_there_too(service, folder):
    engine = engine_of(service, folder)
    await engine.prepare()
    task = await running(engine, SamplingParams(max_tokens=900, ignore_eos=True, n=8))
    await asked(service, "retrieve_future")  # the library knows the request's id by then
    task.cancel()
    await asked(service, "cancel_future")
    await engine.close()


async def test_requests_that_wait_end_with_the_engine(service, folder):
    engine = engine_of(service, folder)
    await engine.prepare()
    await engine.pause()
    waiting = asyncio.create_task(engine.sample([5], SamplingParams(max_tokens=1)))
    await asyncio.sleep(0)
    await engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        await asyncio.wait_for(waiting, 60)


async def test_sequences_longer_than_the_service_takes_are_refused_at_the_start(service, folder):
    place = TinkerServiceSettings(NAME, service.address)
    engine = TinkerEngine(TinkerEngineSettings(place, folder, max_model_len=1025))
    with pytest.raises(TinkerServiceError, match="is 1025, but toy/model takes 1024 tokens"):
        await engine.prepare()
    await engine.close()


async def test_what_users_ask_for_is_at_the_temperature_that_is_trained_at(service, folder):
    place = TinkerServiceSettings(NAME, service.address)
    engine = TinkerEngine(TinkerEngineSettings(place, folder, keeps_temperature=True))
    await engine.prepare()
    with pytest.raises(ValueError, match=r"temperature is 0\.7"):
        await engine.sample([5], SamplingParams(temperature=0.7))
    for heat in (0.0, 1.0):
        assert await engine.sample([5], SamplingParams(temperature=heat, max_tokens=1))
    await engine.close()


async def start(base_url: str, folder: str, **changes: object) -> str:
    """What a start fails with."""
    place = {"base_model": NAME, "base_url": base_url, "start_timeout_s": LIMIT_S, **changes}
    engine = TinkerEngine(TinkerEngineSettings(TinkerServiceSettings(**place), folder))
    with pytest.raises(TrinityError) as error:
        await asyncio.wait_for(engine.prepare(), 2 * LIMIT_S)
    return str(error.value)


async def test_a_start_that_fails_names_the_service_and_why(service, folder, monkeypatch):
    brief = {"start_timeout_s": 1.0}
    refused = await start("http://127.0.0.1:9", folder, **brief)
    assert "service at http://127.0.0.1:9" in refused and "can't be reached" in refused
    unknown = await start(service.address, folder, base_model="other/model")
    assert "no model 'other/model'; it has toy/model" in unknown
    service.status = 503
    assert "answers with status 503" in await start(service.address, folder, **brief)
    service.status = 429
    assert "answers with status 429" in await start(service.address, folder, **brief)
    service.status, service.hangs = None, True
    with monkeypatch.context() as patch:
        patch.setattr(PROBE_S, 2.0)
        assert "does not answer" in await start(service.address, folder, **brief)
    service.hangs = False
    monkeypatch.setenv("TINKER_API_KEY", "tml-wrong")
    assert "Invalid API key" in await start(service.address, folder)
    monkeypatch.setenv("TINKER_API_KEY", "wrong")
    assert "must start with the 'tml-' prefix" in await start(service.address, folder)


def heartbeats() -> set[asyncio.Task]:
    """Of the library's sessions: they go on telling a service that they live."""
    tasks = [task for task in gc.get_objects() if issubclass(type(task), asyncio.Task)]
    return {t for t in tasks if not t.done() and "_session_heartbeat" in str(t.get_coro())}


@pytest.mark.parametrize(
    ("fault", "value", "why"),
    [("status", 500, "status 500"), ("status", 429, "status 429"), ("hangs", True, "not answer")],
)
async def test_a_service_that_dies_ends_requests_within_the_deadline(
    service, folder, fault, value, why, monkeypatch
):
    of_others = heartbeats()
    engine = engine_of(service, folder)
    await engine.prepare()
    hasten(engine, 3.0)
    [beating] = heartbeats() - of_others
    setattr(service, fault, value)
    if fault == "hangs":
        monkeypatch.setattr(PROBE_S, 2.0)
    with pytest.raises(TinkerServiceLost, match=f"no answer in 3 s.*{why}"):
        await asyncio.wait_for(engine.sample(prompt(5), SamplingParams(max_tokens=2)), LIMIT_S)
    with pytest.raises(ConnectionError, match=r"model\.tinker\.timeout"):
        await engine.health()  # which ends the run
    await asyncio.wait_for(engine.close(), LIMIT_S)
    async with asyncio.timeout(LIMIT_S):  # it is told to end, by the library's own thread
        while not beating.done():
            await asyncio.sleep(0.01)


async def test_beats_end_though_the_library_loses_what_should_end_them(
    service, folder, monkeypatch
):
    """It does where that comes while a beat connects: the error says "Connection error" then."""

    async def deaf(holder, session_id):
        for _ in range(4):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(10 * LIMIT_S)

    monkeypatch.setattr(
        "tinker.lib.internal_client_holder.InternalClientHolder._session_heartbeat", deaf
    )
    monkeypatch.setattr("trinity.engine.tinker.service._CLOSE_S", 2.0)
    engine = engine_of(service, folder)
    await engine.prepare()
    beats = engine._service._beats
    await asyncio.wait_for(engine.close(), LIMIT_S)
    assert beats.done()


async def test_a_slow_request_of_a_living_service_is_not_its_death(service, folder):
    engine = engine_of(service, folder)
    await engine.prepare()
    hasten(engine, 2.0)
    with service.busy(), pytest.raises(TinkerServiceError, match=r"no answer in 2 s") as error:
        await engine.sample(prompt(5), SamplingParams(max_tokens=2))
    assert not isinstance(error.value, ConnectionError)
    assert (await engine.health())["running"] == 0
    await engine.close()


@pytest.mark.parametrize("text", ["{", "[]", '{"rank": 4}'])
def test_a_checkpoint_whose_file_is_not_whole_is_named(tmp_path, text):
    (tmp_path / "tinker.json").write_text(text)
    with pytest.raises(ValueError, match=r"tinker\.json is not as"):
        SavedModel.read(tmp_path)
