"""The API of mode `serve` over a scripted engine: replies, feedback, commits, and who may ask."""

import asyncio
import threading

import pytest

from tests.workflows.test_real_wrapper import sampled, wrapper
from trinity.common.experience import Experience
from trinity.explorer.proxy.client import TrinityClient
from trinity.explorer.proxy.desk import Desk, UnknownReplyError
from trinity.explorer.proxy.service import Service, ServiceSettings

httpx = pytest.importorskip("httpx")
uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")
ASK = {"messages": [{"role": "user", "content": "hi"}]}


def reply():
    return Experience(tokens=[1, 2, 3], prompt_length=1)


def test_feedback_groups_replies_into_runs_of_a_task():
    desk = Desk()
    for msg_id in ("a", "b", "c"):
        desk.record(msg_id, [reply()])
    assert desk.feedback(1.0, ["a", "b"], "t") == 2
    assert desk.feedback(0.0, ["c"], "t") == 1
    with pytest.raises(UnknownReplyError):
        desk.feedback(1.0, ["a", "x"], "t")
    assert desk.feedback(0.5, ["c"], "t", run_id=1) == 1
    assert desk.commit() == 3 and desk.commit() == 0
    batch = asyncio.run(desk.next_batch())
    assert [(e.eid.task, e.eid.run, e.eid.step, e.eid.suffix, e.reward) for e in batch] == [
        ("t", 0, 0, "a", 1),
        ("t", 0, 1, "b", 1),
        ("t", 1, 0, "c", 0.5),
    ]
    with pytest.raises(UnknownReplyError):
        desk.feedback(1.0, ["a"], "t")


def test_a_reply_that_can_not_be_trained_on_takes_feedback_like_others():
    desk = Desk()
    cut = reply()
    cut.truncate_status = "prompt_truncated"
    desk.record("cut", [cut])
    desk.record("whole", [reply()])
    assert desk.feedback(1.0, ["cut", "whole"], "t") == 1
    assert desk.feedback(0.0, ["cut"], "u") == 0
    assert desk.commit() == 1


def test_old_replies_are_forgotten_and_counted():
    desk = Desk(max_pending=2)
    for msg_id in ("a", "b", "c"):
        desk.record(msg_id, [reply(), reply()])
    with pytest.raises(UnknownReplyError):
        desk.feedback(1.0, ["a"], "t")
    assert desk.feedback(1.0, ["c"], "t") == 2
    assert desk.counts()["forgotten_reply_count"] == 1


def test_a_reply_that_is_named_twice_counts_once():
    desk = Desk()
    desk.record("a", [reply()])
    desk.record("b", [reply()])
    assert desk.feedback(1.0, ["a", "b", "a"], "t") == 2
    assert desk.commit() == 2
    assert [e.eid.step for e in asyncio.run(desk.next_batch())] == [0, 1]


class Log:
    def __init__(self):
        self.written = []

    async def acquire(self):
        pass

    async def write(self, experiences):
        self.written += experiences

    async def release(self):
        pass


def service(tmp_path, replies, **settings):
    model, ids = wrapper(replies, enable_history=False)
    settings = ServiceSettings("127.0.0.1", 0, "key", tmp_path / "url.txt", **settings)
    return Service(model, model.endpoint.group.engines, settings, Log()), ids


async def until(is_so):
    async with asyncio.timeout(60):
        while not is_so():
            await asyncio.sleep(0.005)


async def test_the_event_loop_goes_on_while_the_api_starts(tmp_path, monkeypatch):
    """The trainer of the same process lives by it."""
    may_start = threading.Event()
    begin = uvicorn.Server.startup

    async def startup(server, sockets=None):
        await asyncio.to_thread(may_start.wait)
        await begin(server, sockets)

    monkeypatch.setattr(uvicorn.Server, "startup", startup)
    made, _ = service(tmp_path, [])
    await made.prepare()
    step = asyncio.create_task(made.next_batch())
    await asyncio.sleep(0)
    may_start.set()
    await until((tmp_path / "url.txt").exists)
    step.cancel()
    await made.close()


async def test_what_is_rewarded_over_http_becomes_a_step(tmp_path):
    made, ids = service(tmp_path, ["one", "two", "three"])
    await made.prepare()
    step = asyncio.create_task(made.next_batch())
    await until((tmp_path / "url.txt").exists)
    address = (tmp_path / "url.txt").read_text().strip()
    async with httpx.AsyncClient(base_url=address, headers={"Authorization": "Bearer key"}) as http:
        first = (await http.post("/v1/chat/completions", json=ASK)).json()
        second = (await http.post("/v1/chat/completions", json=ASK)).json()
        async with http.stream(
            "POST", "/v1/chat/completions", json={**ASK, "stream": True}
        ) as stream:
            lines = [line async for line in stream.aiter_lines() if line.startswith("data: {")]
        third = httpx.Response(200, text=lines[0].removeprefix("data: ")).json()
        assert (await http.post("/commit")).json() == {"experiences": 0}
        for answer, reward in ((first, 1.0), (second, 0.0), (third, 0.5)):
            told = {"reward": reward, "msg_ids": [answer["id"]], "task_id": "q"}
            assert (await http.post("/feedback", json=told)).json() == {"experiences": 1}
        assert (await http.post("/feedback", json={**told, "msg_ids": ["x"]})).status_code == 404
        assert (await http.post("/feedback", json={**told, "reward": "much"})).status_code == 400
        assert (await http.post("/commit")).json() == {"experiences": 3}
        tasks = await step
        made.submit(1, tasks)
        result = await made.collect(1)
        status = (await http.get("/status")).json()
        client = TrinityClient(address, "key")
        assert await client.alive_async() and await client.get_metrics_async() == status
        assert await client.commit_async() == 0
        with pytest.raises(httpx.HTTPStatusError, match=r"404. No reply 'chatcmpl-.*trained"):
            await client.feedback_async(1.0, [first["id"]], "q")
        with pytest.raises(httpx.HTTPStatusError, match=r"401. The API key is missing or wrong"):
            await TrinityClient(address, "wrong").commit_async()
        assert not await TrinityClient(address, "wrong").alive_async()
    for path in ("/feedback", "/commit"):
        assert httpx.post(f"{address}{path}", json=told).status_code == 401
    await made.close()
    assert (
        status["explorer_step"] == 1
        and status["model_version"] == 0
        and status["total_experience_count"] == 3
    )
    assert [sampled(e) for e in result.experiences] == ids
    assert [(e.eid.batch, e.eid.task, e.eid.run, e.reward) for e in result.experiences] == [
        (1, "q", 0, 1),
        (1, "q", 1, 0),
        (1, "q", 2, 0.5),
    ]
    assert result.metrics["rollout/reward/mean"] == 0.5 and len(tasks) == 1
    assert result.metrics["rollout/model_0/total_request_count"] == 3
    assert result.metrics["rollout/model_0/model_version"] == 0
    assert {e.eid.suffix for e in made._log.written} == {a["id"] for a in (first, second, third)}


async def test_too_few_engines_end_the_run(tmp_path):
    made, _ = service(tmp_path, ["one"], check_interval_s=0.02)

    async def ill():
        raise ConnectionError("gone")

    made._model.endpoint.group.engines[0].health = ill
    await made.prepare()
    with pytest.raises(ConnectionError, match="min_running_model_num"):
        await asyncio.wait_for(made.next_batch(), 60)
    await made.close()


async def test_replies_on_their_way_to_the_log_are_not_lost_at_the_end(tmp_path):
    subject, _ = service(tmp_path, [])
    begun, may_end = asyncio.Event(), asyncio.Event()

    class SlowLog(Log):
        async def write(self, experiences):
            begun.set()
            await may_end.wait()
            await super().write(experiences)

    subject._log = log = SlowLog()
    await subject.prepare()
    await subject._open()
    subject.desk.record("a", [reply()])
    await asyncio.wait_for(begun.wait(), 60)
    closing = asyncio.create_task(subject.close())
    subject.desk.record("b", [reply()])
    while not closing.done() and not may_end.is_set():
        await asyncio.sleep(0)
        may_end.set()
    await asyncio.wait_for(closing, 60)
    assert [e.eid.suffix for e in log.written] == ["a", "b"]
