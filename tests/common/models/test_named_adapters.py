"""Adapters that requests name, from a wrapper and its API to several engines."""

import httpx
import openai
import pytest

from tests.common.models.toy import tokenizer
from trinity.common.models import ModelSettings, ModelWrapper
from trinity.common.models.api import ApiServer
from trinity.common.models.engines import EngineGroup
from trinity.common.models.fake import FakeEngine
from trinity.common.models.protocol import NamedAdapter

ASK = [{"role": "user", "content": "What is the sum?"}]
ONE = NamedAdapter("one", "/adapters/one")


class WithAdapters(FakeEngine):
    """Notes through which adapter each request goes; has no room for one called ``refused``."""

    def __init__(self, *args, refused="", **kwargs):
        super().__init__(*args, **kwargs)
        self.asked: list[str | None] = []
        self._refused, self.is_lost = refused, False
        self._known: dict[str, NamedAdapter] = {}

    async def sample(self, prompt_ids, params, adapter=None):
        self.asked.append(adapter)
        return await super().sample(prompt_ids, params, adapter)

    async def adapters(self):
        if self.is_lost:
            raise ConnectionError("The engine has ended.")
        return list(self._known.values())

    async def load_adapter(self, adapter):
        if self._refused in (adapter.name, adapter.path):
            raise ValueError("no room")
        if adapter.path == "/lost":
            raise ConnectionError("The engine has ended.")
        if adapter.name in self._known:
            raise ValueError("loaded already")
        self._known[adapter.name] = adapter

    async def unload_adapter(self, name):
        if name not in self._known:
            raise LookupError(name)
        del self._known[name]


def model_with(*texts, refused="", **settings):
    made = tokenizer("qwen25")
    ids = [[*made.encode(text), made.eos_token_id] for text in texts]
    engine = WithAdapters(ids, end_ids=[made.eos_token_id], refused=refused)
    given = {"name": "toy", "enable_history": True, "has_named_adapters": True, **settings}
    return ModelWrapper(engine, ModelSettings("/models/toy", **given), made), engine


async def test_what_an_adapter_replies_is_no_experience_of_the_model():
    model, engine = model_with("a", "b", "c", "d", adapter="mine")
    await model.endpoint.group.load_adapter(ONE)
    client = model.get_openai_async_client()
    replies = {}
    for name in ("one", "toy", "one", "mine"):
        reply = await client.chat.completions.create(model=name, messages=ASK)
        replies[reply.choices[0].message.content] = reply.model
    assert engine.asked == ["one", None, "one", None]
    assert replies == {"a": "one", "b": "toy", "c": "one", "d": "toy"}
    recorded = model.extract_experience_from_history()
    assert [e.response_text for e in recorded] == ["b", "d"]
    with pytest.raises(ValueError, match="nothing was recorded"):
        model.with_adapter("one").extract_experience_from_history()


async def test_a_conversation_with_an_adapter_goes_on_from_its_own_tokens():
    model, engine = model_with("the inner sum", "4", "5")
    await model.endpoint.group.load_adapter(ONE)
    first = await model.with_adapter("one").chat_async(ASK)
    talk = [*ASK, {"role": "assistant", "content": "the inner sum"}, *ASK]
    await model.with_adapter("one").chat_async(talk)
    known = first[0].tokens.tolist()
    assert engine.prompts[1][: len(known)] == known
    model.begin_run(3)
    assert model.with_adapter("one").token_counts["turns"] == 0


def test_the_api_tells_nobody_of_an_adapters_replies():
    model, _ = model_with("a", "b", loads_adapters=True)
    server, told = ApiServer(), []
    server.on_chat = lambda name, experiences: told.append(experiences[0].response_text)
    server.start({"": model})
    try:
        headers = {"Authorization": f"Bearer {server.api_key}"}
        body = {"lora_name": "one", "lora_path": "/adapters/one"}
        url = f"{server.address}/v1/load_lora_adapter"
        assert httpx.post(url, json=body).status_code == 401
        assert httpx.post(url, json=body, headers=headers).status_code == 200
        client = openai.OpenAI(base_url=f"{server.address}/v1", api_key=server.api_key)
        for name in ("one", "toy"):
            client.chat.completions.create(model=name, messages=ASK)
        assert told == ["b"]
        unknown = httpx.post(url, json=body | {"lora_pth": "x"}, headers=headers)
        assert unknown.status_code == 400 and "lora_pth" in unknown.text
    finally:
        server.stop()


async def test_nothing_is_loaded_where_that_is_off():
    model, engine = model_with("a")
    app = model.get_openai_async_client()
    with pytest.raises(openai.NotFoundError, match="enable_runtime_lora_updating to true"):
        await app.post("/load_lora_adapter", body={"lora_name": "x", "lora_path": "y"}, cast_to=str)
    assert await engine.adapters() == []


async def test_one_adapter_takes_the_place_of_another_only_if_it_can_be_loaded():
    model, engine = model_with(loads_adapters=True, refused="/adapters/wrong")
    client = model.get_openai_async_client()
    await model.endpoint.group.load_adapter(ONE)

    async def load(path, **body):
        body |= {"lora_name": "one", "lora_path": path}
        await client.post("/load_lora_adapter", body=body, cast_to=str)

    with pytest.raises(openai.BadRequestError, match="no room"):
        await load("/adapters/wrong", load_inplace=True)
    assert await engine.adapters() == [ONE]
    await load("/adapters/two", load_inplace=True)
    assert await engine.adapters() == [NamedAdapter("one", "/adapters/two")]
    await load("/adapters/three", load_inplace=True)
    with pytest.raises(openai.BadRequestError, match="load_inplace"):
        await load("/adapters/one")
    with pytest.raises((openai.InternalServerError, ConnectionError)):  # no mistake of the client
        await load("/lost", load_inplace=True)


async def test_all_engines_load_an_adapter_or_none():
    engines = [WithAdapters([]), WithAdapters([], refused="two")]
    group = EngineGroup(engines)
    await group.load_adapter(ONE)
    with pytest.raises(ValueError, match="no room"):
        await group.load_adapter(NamedAdapter("two", "/adapters/two"))
    assert [await engine.adapters() for engine in engines] == [[ONE], [ONE]]
    await engines[1].unload_adapter("one")  # it was started again
    assert await group.adapters() == []
    await group.unload_adapter("one")
    assert await engines[0].adapters() == []
    with pytest.raises(LookupError):
        await group.unload_adapter("one")


async def test_adapters_are_known_while_an_engine_is_started_again():
    engines = [WithAdapters([]), WithAdapters([])]
    group = EngineGroup(engines)
    await group.load_adapter(ONE)
    engines[0].is_lost = True
    assert await group.adapters() == [ONE]
    engines[1].is_lost = True
    with pytest.raises(ConnectionError):
        await group.adapters()
