"""Every form of tool call and reasoning: parsed, left alone where it is broken."""

import json

import pytest

from trinity.common.models.reply_parsers import REASONING_PARSERS, TOOL_PARSERS, parse_reply

CALLS = {
    "hermes": 'hm\n<tool_call>\n{"name": "find", "arguments": {"q": "é", "k": 2}}\n</tool_call>',
    "llama3_json": '{"name": "find", "parameters": {"q": "é", "k": 2}}',
    "mistral": 'hm [TOOL_CALLS][{"name": "find", "arguments": {"q": "é", "k": 2}}]',
    "pythonic": '[find(q="é", k=2)]',
    "qwen3_coder": "hm\n<tool_call>\n<function=find>\n<parameter=q>\né\n</parameter>\n"
    "<parameter=k>\n2\n</parameter>\n</function>\n</tool_call>",
}
BROKEN = {
    "hermes": '<tool_call>\n{"name": "find", "arguments"\n</tool_call>',
    "llama3_json": '{"name": "find", "parameters": ',
    "mistral": '[TOOL_CALLS][{"name": ',
    "pythonic": '[find("é")]',
    "qwen3_coder": "<tool_call>\n<function=find>\n<parameter=q>",
}


def test_all_parsers_are_here():
    assert set(TOOL_PARSERS.names()) == set(CALLS) == set(BROKEN)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_in_each_form(name):
    parsed = parse_reply(CALLS[name], name, None)
    [call] = parsed.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("find", {"q": "é", "k": 2})
    assert parsed.content == ("hm" if CALLS[name].startswith("hm") else "")


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("text", ["", "no call [at] {all}", None])
def test_what_is_no_call_stays_text(name, text):
    reply = BROKEN[name] if text is None else text
    parsed = parse_reply(reply, name, None)
    assert (parsed.content, parsed.tool_calls) == (reply, ())


def test_several_calls_keep_their_order():
    twice = CALLS["hermes"] + CALLS["hermes"].removeprefix("hm").replace("find", "open")
    assert [call.name for call in parse_reply(twice, "hermes", None).tool_calls] == ["find", "open"]
    twice = f"{CALLS['llama3_json']}; {CALLS['llama3_json']}"
    assert len(parse_reply(twice, "llama3_json", None).tool_calls) == 2
    assert len(parse_reply('[find(q=1), open(p="x")]', "pythonic", None).tool_calls) == 2


@pytest.mark.parametrize("name", REASONING_PARSERS.names())
def test_reasoning_in_each_form(name):
    whole = parse_reply("<think>\nhm\n</think>\n\nfour", None, name)
    assert (whole.reasoning, whole.content) == ("hm", "four")
    opened_by_the_prompt = parse_reply("hm\n</think>\n\nfour", None, name)
    assert (opened_by_the_prompt.reasoning, opened_by_the_prompt.content) == ("hm", "four")
    cut = parse_reply("<think>\nhm", None, name)
    assert (cut.reasoning, cut.content) == ("hm", "")
    none = parse_reply("four", None, name)
    assert (none.reasoning, none.content) == (None, "four")


def test_a_call_within_reasoning_is_none():
    reply = f"<think>{CALLS['hermes']}</think>\n\nfour"
    assert parse_reply(reply, "hermes", "qwen3").tool_calls == ()
