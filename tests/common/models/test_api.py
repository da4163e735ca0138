"""The OpenAI API over a model, asked by the official client."""

import asyncio
import json
import threading
from dataclasses import replace

import httpx
import openai
import pytest

from tests.common.models.toy import model_folder, tokenizer
from trinity.common.models import ModelSettings, ModelWrapper
from trinity.common.models.api import ApiServer
from trinity.common.models.engines import EngineGroup
from trinity.common.models.fake import FakeEngine
from trinity.engine.torch import TorchEngine, TorchEngineSettings

ASK = [{"role": "user", "content": "What is the sum?"}]
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
CALL = 'let me see\n<tool_call>\n{"name": "find", "arguments": {"q": "é"}}\n</tool_call>'


def model_with(replies, template="qwen25", **settings):
    made = tokenizer(template)
    ids = [[*made.encode(text), made.eos_token_id] for text in replies]
    settings = {"name": "toy", "enable_history": True, **settings}
    engine = FakeEngine(ids, end_ids=[made.eos_token_id])
    return ModelWrapper(engine, ModelSettings("/models/toy", **settings), made)


@pytest.fixture
def server():
    made = ApiServer()
    yield made
    made.stop()


def test_chat_through_the_sync_client():
    model = model_with(["the sum", "the sum", "4"])
    client = model.get_openai_client()
    assert client.model_path == "/models/toy"
    found = client.chat.completions.create(
        model="toy", messages=ASK, n=2, logprobs=True, extra_body={"return_token_ids": True}
    )
    first = found.choices[0]
    assert (first.message.content, first.finish_reason) == ("the sum", "stop")
    ids = tokenizer("qwen25").encode("the sum<|im_end|>")
    assert first.token_ids == ids
    assert [entry.logprob for entry in first.logprobs.content] == [-1.0] * len(ids)
    assert found.usage.completion_tokens == 2 * len(ids)
    assert found.usage.prompt_tokens == len(found.prompt_token_ids)
    recorded = model.extract_experience_from_history()
    assert [e.tokens.tolist() for e in recorded] == [found.prompt_token_ids + ids] * 2
    more = client.chat.completions.create(model="/models/toy", messages=ASK, top_p=0.5, seed=3)
    assert more.choices[0].message.content == "4"


async def test_chat_through_the_async_client_and_streaming():
    model = model_with(["the inner sum of it all, and more of it"] * 2)
    client = model.get_openai_async_client()
    whole = await client.chat.completions.create(model="toy", messages=ASK)
    stream = await client.chat.completions.create(
        model="toy", messages=ASK, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage == whole.usage
    assert len(model.extract_experience_from_history()) == 2


def test_tools_over_two_turns_keep_the_sampled_tokens():
    model = model_with([CALL, "it is é"], enable_auto_tool_choice=True, tool_call_parser="hermes")
    client = model.get_openai_client()
    asked = {"model": "toy", "tools": [TOOL]}
    found = client.chat.completions.create(messages=ASK, **asked).choices[0]
    assert found.finish_reason == "tool_calls" and found.message.content == "let me see"
    [call] = found.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("find", {"q": "é"})
    talk = [*ASK, found.message.model_dump()]
    talk += [{"role": "tool", "tool_call_id": call.id, "content": "é is here"}]
    last = client.chat.completions.create(messages=talk, **asked).choices[0]
    assert last.message.content == "it is é" and not last.message.tool_calls
    one, two = model.extract_experience_from_history()
    assert two.tokens.tolist()[: len(one.tokens)] == one.tokens.tolist()
    assert model.token_counts["forks"] == 0
    row = model.convert_messages_to_experience([*talk, last.message.model_dump()], [TOOL])
    assert row.tokens.tolist() == two.tokens.tolist()


def test_streamed_tool_calls_and_tool_choice():
    model = model_with([CALL] * 2, enable_auto_tool_choice=True)
    client = model.get_openai_client()
    chunks = list(
        client.chat.completions.create(model="toy", messages=ASK, tools=[TOOL], stream=True)
    )
    calls = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or []]
    assert [call.function.name for call in calls] == ["find"]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    plain = client.chat.completions.create(
        model="toy", messages=ASK, tools=[TOOL], tool_choice="none"
    )
    assert plain.choices[0].message.content == CALL


def test_reasoning_is_split_off():
    model = model_with(["<think>\nhm\n</think>\n\nfour"], "qwen3", reasoning_parser="qwen3")
    found = model.get_openai_client().chat.completions.create(model="toy", messages=ASK)
    message = found.choices[0].message
    assert (message.content, message.reasoning_content) == ("four", "hm")
    assert model.extract_experience_from_history()[0].response_text.startswith("<think>")


def test_completions_of_texts_and_ids():
    model = model_with(["one", "two", "three"])
    client = model.get_openai_client()
    found = client.completions.create(model="toy", prompt=["a", "b"], logprobs=1)
    assert [choice.text for choice in found.choices] == ["one", "two"]
    assert found.choices[0].logprobs.tokens[-1] == "<|im_end|>"
    stream = client.completions.create(model="toy", prompt=[40, 41], stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "three"


async def test_calls_of_requests_that_run_at_once_have_ids_of_their_own():
    meeting = asyncio.Barrier(2)

    class Meeting(FakeEngine):
        async def sample(self, prompt_ids, params, adapter=None):
            await meeting.wait()
            return await super().sample(prompt_ids, params, adapter)

    made = tokenizer("qwen25")
    engine = Meeting([[*made.encode(CALL), made.eos_token_id]] * 2, end_ids=[made.eos_token_id])
    model = ModelWrapper(
        engine, ModelSettings("/models/toy", enable_auto_tool_choice=True), tokenizer=made
    )
    client = model.get_openai_async_client()
    jobs = [
        client.chat.completions.create(model="/models/toy", messages=ASK, tools=[TOOL])
        for _ in range(2)
    ]
    found = await asyncio.gather(*jobs)
    assert len({answer.choices[0].message.tool_calls[0].id for answer in found}) == 2


def test_only_max_model_len_limits_what_comes_through_the_api():
    model = model_with(
        ["x", "y"], max_prompt_tokens=3, max_response_tokens=2, max_model_len=90,
        min_response_tokens=2,
    )  # fmt: skip
    client = model.get_openai_client()
    client.chat.completions.create(model="toy", messages=ASK)
    engine = model.endpoint.group.engines[0]
    assert engine.params[0].max_tokens == 90 - len(engine.prompts[0])
    assert engine.params[0].min_tokens == 0
    with pytest.raises(openai.BadRequestError, match="more than 89") as caught:
        client.chat.completions.create(
            model="toy", messages=[{"role": "user", "content": "x " * 90}]
        )
    assert caught.value.code == "context_length_exceeded"
    assert "enable_prompt_truncation" not in str(caught.value)  # it does not hold there


@pytest.mark.parametrize(
    ("changes", "status", "message"),
    [
        ({"model": "other"}, 404, "'other' is not served"),
        ({"temperature": -1}, 400, "temperature = -1.0 is not possible: it must be 0 for .*, or"),
        ({"temperature": 0.001, "stream": True}, 400, "temperature = 0.001 is not possible"),
        ({"n": 0}, 400, "n = 0 is not possible: it must be at least 1"),
        ({"n": 5000}, 400, "n: .* less than or equal to 1024"),
        ({"max_tokens": 0}, 400, "max_tokens = 0 is not possible"),
        ({"max_tokens": 5, "max_completion_tokens": 0}, 400, "max_tokens = 0 is not possible"),
        ({"extra_body": {"min_tokens": -1}}, 400, "min_tokens = -1 is not possible"),
        ({"extra_body": {"top_k": -2}}, 400, "top_k = -2 is not possible"),
        ({"extra_body": {"top_k": 10**20}}, 400, "top_k = 100000000000000000000 is not possible"),
        ({"top_p": 1.5}, 400, "top_p = 1.5 is not possible"),
        ({"presence_penalty": 1.0}, 400, "presence_penalty: .*not offered"),
        ({"top_logprobs": 3, "logprobs": True}, 400, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, 400, "only 'text'"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"content": "hi"}]}, 400, "role None; it must be a name"),
        ({"messages": [{"role": "user", "content": 5}]}, 400, "content 5; it must be text"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400, "without a text"),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, 400, "tool_calls 5; it must"),
        (
            {"extra_body": {"chat_template_kwargs": {"tokenize": True}}},
            400,
            "can't have 'tokenize'",
        ),
        ({"extra_body": {"repetition_penalty": 1e-300}}, 400, "repetition_penalty = 1e-300"),
    ],
)
def test_wrong_requests_are_refused_with_a_reason(changes, status, message):
    client = model_with([]).get_openai_client()
    with pytest.raises(openai.APIStatusError, match=message) as caught:
        client.chat.completions.create(**{"model": "toy", "messages": ASK, **changes})
    assert caught.value.status_code == status


def test_what_the_chat_template_refuses_is_the_callers_mistake():
    template = "{% if messages[0].role != 'system' %}{{ raise_exception('No rules!') }}{% endif %}"
    model = model_with(["x"], chat_template=template)
    with pytest.raises(openai.BadRequestError, match="can't take these messages: No rules!"):
        model.get_openai_client().chat.completions.create(model="toy", messages=ASK)
    with pytest.raises(ValueError, match="can't take these messages: No rules!"):
        model.chat(ASK)


@pytest.mark.parametrize("prompt", [[], [[]], [-1], [2**70], [5, "a"], [[5], ["a"]], [True]])
def test_what_is_no_prompt_is_refused_in_one_sentence(prompt):
    client = model_with([]).get_openai_client()
    with pytest.raises(openai.BadRequestError, match=r"- prompt: must be a text, .* such prompts$"):
        client.completions.create(model="toy", prompt=prompt)


def test_a_request_that_fails_leaves_the_history_of_the_others():
    model = model_with(["one", "two"])
    client = model.get_openai_client()
    client.chat.completions.create(model="toy", messages=ASK)
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="toy", messages=[])
    client.chat.completions.create(model="toy", messages=ASK)
    with pytest.raises(openai.APIStatusError):  # the engine has no reply left
        client.with_options(max_retries=0).chat.completions.create(model="toy", messages=ASK)
    texts = [e.response_text for e in model.extract_experience_from_history()]
    assert texts == ["one", "two"]


def test_no_client_without_the_api():
    model = model_with([], enable_openai_api=False)
    for ask in (model.get_openai_client, model.get_openai_async_client, lambda: model.api_address):
        with pytest.raises(ValueError, match="enable_openai_api"):
            ask()


def agent(base_url, key, question):
    """Knows nothing of us."""
    client = openai.OpenAI(base_url=base_url, api_key=key)
    [card] = client.models.list().data
    talk = [{"role": "user", "content": question}]
    for _ in range(2):
        found = client.chat.completions.create(model=card.id, messages=talk)
        talk += [found.choices[0].message, {"role": "user", "content": "go on"}]
    return [m.content for m in talk if not isinstance(m, dict)]


def test_programs_that_know_only_an_address_are_kept_apart():
    model = model_with([])
    runs = [model.clone_with_isolated_history() for _ in range(3)]
    answers, programs = {}, []
    for number, run in enumerate(runs):
        made = tokenizer("qwen25")
        texts = [f"{number} one", f"{number} two"]
        ids = [[*made.encode(text), made.eos_token_id] for text in texts]
        engines = EngineGroup(FakeEngine(ids, end_ids=[made.eos_token_id]))
        run.endpoint = replace(run.endpoint, group=engines)
        run.begin_run(0)
        address, key = run.api_address, run.api_key

        def work(number=number, address=address, key=key):
            answers[number] = agent(f"{address}/v1", key, f"question {number}")

        programs.append(threading.Thread(target=work, daemon=True))
        programs[-1].start()
    for program in programs:
        program.join(60)
    for number, run in enumerate(runs):
        assert answers[number] == [f"{number} one", f"{number} two"]
        one, two = run.extract_experience_from_history()
        assert (one.response_text, two.response_text) == (f"{number} one", f"{number} two")
        assert two.tokens.tolist()[: len(one.tokens)] == one.tokens.tolist()


def test_a_server_of_its_own(server):
    model = model_with(["x"])
    server.start({"": model})
    assert server.address.startswith("http://127.0.0.1:")
    anonymous = httpx.get(f"{server.address}/v1/models")
    assert anonymous.status_code == 401 and "key" in anonymous.json()["error"]["message"]
    headers = {"Authorization": f"Bearer {server.api_key}"}
    assert httpx.get(f"{server.address}/health", headers=headers).json()["status"] == "ok"
    text = httpx.get(f"{server.address}/metrics", headers=headers).text
    assert "trinity_engine_running 0" in text
    missing = httpx.get(f"{server.address}/nobody/v1/models", headers=headers)
    assert missing.status_code == 404
    with pytest.raises(OSError, match="can't be had"):
        ApiServer(port=int(server.address.rsplit(":", 1)[1])).start({})


async def test_generate_and_the_api_give_the_same_for_a_seed(tmp_path):
    folder = model_folder(tmp_path)
    engine = TorchEngine(TorchEngineSettings(folder, dtype="float32", num_threads=1))
    await engine.prepare()
    model = ModelWrapper(engine, ModelSettings(folder, max_response_tokens=12))
    [expected] = await model.chat_async(ASK, seed=11)
    client = model.get_openai_async_client()
    many = [
        client.chat.completions.create(model=folder, messages=ASK, seed=11, max_tokens=12)
        for _ in range(3)
    ]
    for found in await asyncio.gather(*many):
        assert found.choices[0].message.content == expected.response_text
    await engine.close()
