import asyncio
import json
import time

import httpx
import pytest

from trinity.common.models import ModelSettings, ModelWrapper, SamplingParams
from trinity.engine import engine_class
from trinity.engine.openai.engine import OpenAIEngine, ServiceError
from trinity.engine.openai.pacing import Pacer, wait_before_retry
from trinity.engine.openai.settings import OpenAIEngineSettings

ASK = [{"role": "user", "content": "hi"}]


class Service:
    """Answers with the statuses it is given, then well."""

    def __init__(self, *statuses, headers=None, num_at_once=1):
        self.statuses = list(statuses)
        self.headers = headers or {}
        self.asked = []
        self.running = self.most = 0
        self._meeting = asyncio.Barrier(num_at_once)

    async def meet(self):
        """Wait until ``num_at_once`` requests are here, and for any that should not be."""
        await self._meeting.wait()
        for _ in range(100):
            await asyncio.sleep(0)

    async def __call__(self, request):
        if request.url.path.endswith("/models"):
            return httpx.Response(200, json={"data": []})
        self.asked.append(json.loads(request.content))
        self.running += 1
        self.most = max(self.most, self.running)
        await self.meet()
        self.running -= 1
        status = self.statuses.pop(0) if self.statuses else 200
        if isinstance(status, Exception):
            raise status
        if status != 200:
            return httpx.Response(
                status, json={"error": {"message": "not now"}}, headers=self.headers
            )
        choice = {"message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}
        count = self.asked[-1]["n"]
        return httpx.Response(
            200, json={"choices": [choice] * count, "usage": {"completion_tokens": count}}
        )


async def engine_on(service, monkeypatch, **settings):
    monkeypatch.setenv("MY_URL", "http://service/v1/")
    monkeypatch.setenv("MY_KEY", "secret")
    made = OpenAIEngineSettings(
        "big", "MY_URL", "MY_KEY", **{"first_wait_s": 0.001, "max_retries": 3, **settings}
    )
    engine = OpenAIEngine(made, httpx.MockTransport(service))
    await engine.prepare()
    return engine


class StubbornService(Service):
    """Gives one reply to every request, whatever ``n`` is; or none."""

    def __init__(self, count=1, **kw):
        super().__init__(**kw)
        self.count = count

    async def __call__(self, request):
        answer = await super().__call__(request)
        body = json.loads(answer.content)
        if "choices" in body:
            body["choices"] = body["choices"][: self.count]
        return httpx.Response(answer.status_code, json=body)


async def test_a_service_that_gives_fewer_replies_than_asked_for_is_asked_again(monkeypatch):
    service = StubbornService()
    engine = await engine_on(service, monkeypatch)
    assert len(await engine.chat(ASK, None, SamplingParams(n=3, seed=7))) == 3
    assert [(asked["n"], asked["seed"]) for asked in service.asked] == [(3, 7), (2, 8), (1, 9)]


@pytest.mark.parametrize("body", ['{"error": {"message": "no credit"}}', '{"choices": []}', "<p>"])
async def test_an_answer_without_a_reply_is_told(monkeypatch, body):
    async def service(request):
        return httpx.Response(200, text=body)

    engine = await engine_on(service, monkeypatch)
    with pytest.raises(ServiceError, match=r"no reply.*(credit|choices|p)"):
        await engine.chat(ASK, None, SamplingParams())


def test_both_spellings_find_it():
    assert engine_class("openai") is engine_class("external") is OpenAIEngine


async def test_a_wrapper_over_it_gives_texts_that_are_never_trained_on(monkeypatch):
    service = Service()
    engine = await engine_on(service, monkeypatch)
    settings = ModelSettings("big", gives_tokens=False, temperature=0.3, enable_history=True)
    model = ModelWrapper(engine, settings)
    found = await model.chat_async(ASK, n=2, max_tokens=7)
    assert [e.response_text for e in found] == ["hello", "hello"]
    assert not any(e.action_mask.any() for e in found)
    [body] = service.asked
    assert (body["model"], body["n"], body["temperature"], body["max_tokens"]) == ("big", 2, 0.3, 7)
    client = model.get_openai_async_client()
    answer = await client.chat.completions.create(model="big", messages=ASK)
    assert answer.choices[0].message.content == "hello"
    assert [e.response_text for e in model.extract_experience_from_history()] == ["hello"] * 3
    assert (await engine.health())["tokens"] == 3
    await engine.close()


async def test_it_tries_again_while_that_may_help(monkeypatch):
    service = Service(429, 503, httpx.ConnectError("no route"))
    engine = await engine_on(service, monkeypatch)
    [reply] = await engine.chat(ASK, None, SamplingParams())
    assert reply.text == "hello" and len(service.asked) == 4
    assert (await engine.health())["retries"] == 3


async def test_it_gives_up_with_the_last_reason(monkeypatch):
    engine = await engine_on(Service(*[500] * 9), monkeypatch)
    with pytest.raises(ServiceError, match="4 tries; the last one: 500: not now"):
        await engine.chat(ASK, None, SamplingParams())


async def test_a_wrong_request_is_not_repeated(monkeypatch):
    service = Service(400)
    engine = await engine_on(service, monkeypatch)
    with pytest.raises(ServiceError, match="400: not now"):
        await engine.chat(ASK, None, SamplingParams())
    assert len(service.asked) == 1


async def test_what_needs_tokens_is_refused(monkeypatch):
    engine = await engine_on(Service(), monkeypatch)
    for ask in (
        engine.sample([1], SamplingParams()),
        engine.logprobs([1, 2]),
        engine.load_weights(None),
    ):
        with pytest.raises(ServiceError, match="no token ids"):
            await ask


async def test_variables_and_key_are_checked_at_the_start(monkeypatch):
    monkeypatch.delenv("MY_URL", raising=False)
    engine = OpenAIEngine(OpenAIEngineSettings("big", "MY_URL", "MY_KEY"))
    with pytest.raises(ServiceError, match="MY_URL is not set"):
        await engine.prepare()

    async def refuse(request):
        return httpx.Response(401)

    with pytest.raises(ServiceError, match="refuses the key in MY_KEY"):
        await engine_on(refuse, monkeypatch)


async def test_requests_are_limited_in_number_and_pace(monkeypatch):
    service = Service(num_at_once=2)
    engine = await engine_on(service, monkeypatch, max_concurrent=2)
    await asyncio.gather(*[engine.chat(ASK, None, SamplingParams()) for _ in range(8)])
    assert service.most == 2
    pacer = Pacer(10, max_per_minute=60 / 0.02)
    start = time.monotonic()

    async def once():
        async with pacer:
            return time.monotonic() - start

    times = sorted(await asyncio.gather(*[once() for _ in range(5)]))
    assert times[-1] >= 0.08


def test_waits_double_unless_the_service_says():
    assert wait_before_retry(0, 1.0, {"retry-after": "7"}) == 7
    assert wait_before_retry(0, 1.0, {"retry-after": "9999"}) == 60
    for attempt in range(4):
        assert 0.5 * 2**attempt <= wait_before_retry(attempt, 1.0, {}) <= 2**attempt
