"""Chunks come as the tokens do, and put together they are the reply."""

import asyncio
from itertools import pairwise

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.common.models.toy import tokenizer
from trinity.common.models import ModelSettings, ModelWrapper
from trinity.common.models.api import ApiServer
from trinity.common.models.fake import FakeEngine
from trinity.common.models.streaming import sure_text

ASK = [{"role": "user", "content": "What is the sum?"}]
CALL = 'let me see\n<tool_call>\n{"name": "find", "arguments": {"q": "é"}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}


class SlowEngine(FakeEngine):
    """Shows one more token each time one looks, and ends when all is seen and ``may_end`` set."""

    def __init__(self, reply, end_id, fails=False):
        super().__init__([reply], end_ids=[end_id])
        self.reply, self.fails = reply, fails
        self.shown = 0
        self.may_end = asyncio.Event()
        self.is_cancelled = False

    async def sample(self, prompt_ids, params, adapter=None):
        try:
            while self.shown < len(self.reply) - 1 or not self.may_end.is_set():
                await asyncio.sleep(0.01)
                if self.fails and self.shown == len(self.reply) - 1:
                    raise RuntimeError("out of memory")
        except asyncio.CancelledError:
            self.is_cancelled = True
            raise
        return await super().sample(prompt_ids, params)

    async def partial(self, request_id):
        self.shown = min(self.shown + 1, len(self.reply) - 1)
        return [self.reply[: self.shown]]


@pytest.fixture
async def serve():
    """Serves a reply over a socket; its engine lives in the server's loop."""
    servers = []

    def make(text, fails=False, **settings):
        made = tokenizer("qwen25")
        ids = [*made.encode(text), made.eos_token_id]
        engine = SlowEngine(ids, made.eos_token_id, fails)
        settings = {"name": "toy", "enable_history": True, **settings}
        model = ModelWrapper(engine, ModelSettings("/models/toy", **settings), made)
        server = ApiServer()
        server.start({"": model})
        servers.append(server)
        client = openai.AsyncOpenAI(
            base_url=f"{server.address}/v1", api_key=server.api_key, max_retries=0
        )
        return client, engine, model

    yield make
    for server in servers:
        await asyncio.to_thread(server.stop)


async def test_text_comes_before_the_reply_is_done(serve):
    text = "the inner sum of it all, é and 漢字"
    client, engine, model = serve(text)
    stream = await client.chat.completions.create(model="toy", messages=ASK, stream=True)
    found = ""
    async for chunk in stream:
        found += chunk.choices[0].delta.content or ""
        if found == text and chunk.choices[0].delta.content:
            assert not engine.may_end.is_set()
            engine.may_end.set()
    assert found == text and chunk.choices[0].finish_reason == "stop"
    assert len(model.extract_experience_from_history()) == 1


async def test_completions_stream_too(serve):
    client, engine, _ = serve("one two three")
    stream = await client.completions.create(model="toy", prompt="a", stream=True)
    found = []
    async for chunk in stream:
        found.append(chunk.choices[0].text)
        engine.may_end.set()
    assert "".join(found) == "one two three" and len(found) > 2


async def test_calls_of_tools_and_reasoning_are_no_content(serve):
    client, engine, _ = serve(CALL, enable_auto_tool_choice=True, tool_call_parser="hermes")
    engine.may_end.set()
    stream = await client.chat.completions.create(
        model="toy", messages=ASK, tools=[TOOL], stream=True
    )
    deltas = [chunk.choices[0].delta async for chunk in stream]
    assert "".join(delta.content or "" for delta in deltas) == "let me see"
    assert [c.function.name for d in deltas for c in d.tool_calls or []] == ["find"]
    client, engine, _ = serve("<think>\nhm\n</think>\n\nfour", reasoning_parser="qwen3")
    engine.may_end.set()
    stream = await client.chat.completions.create(model="toy", messages=ASK, stream=True)
    deltas = [chunk.choices[0].delta async for chunk in stream]
    assert "".join(delta.content or "" for delta in deltas) == "four"


async def test_a_client_that_leaves_ends_the_request(serve):
    client, engine, model = serve("the sum of the sums")
    stream = await client.chat.completions.create(model="toy", messages=ASK, stream=True)
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    await stream.close()
    async with asyncio.timeout(60):
        while not engine.is_cancelled:
            await asyncio.sleep(0.01)
    assert model.extract_experience_from_history() == []


async def test_a_failure_in_mid_stream_is_told(serve):
    client, _, _ = serve("the sum of the sums", fails=True)
    stream = await client.chat.completions.create(model="toy", messages=ASK, stream=True)
    with pytest.raises(openai.APIError, match="out of memory"):
        async for _ in stream:
            pass


@given(
    text=st.text(alphabet="ab<[ {\n", max_size=30),
    stops=st.lists(st.text(alphabet="ab<", min_size=1, max_size=3), max_size=2),
    may_call=st.booleans(),
)
def test_what_is_shown_stays(text, stops, may_call):
    shown = [
        sure_text(text[:end], stops, may_call=may_call, may_reason=False)
        for end in range(len(text) + 1)
    ]
    for earlier, later in pairwise(shown):
        assert later.startswith(earlier)
    cuts = [text.find(stop) for stop in stops if stop in text]
    assert text[: min(cuts, default=len(text))].startswith(shown[-1])
