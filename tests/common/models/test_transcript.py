"""Token in, token out: what is trained on is what was sampled, over turns and templates."""

import json
import random

import pytest

from tests.common.models.toy import TEMPLATES, tokenizer
from trinity.common.models import ModelSettings, ModelWrapper
from trinity.common.models.fake import FakeEngine
from trinity.common.models.transcript import Conversation

WORDS = ["the", "inner", "call", "tool", "thé", "数", "\n\n", " a", "ther", "{", '":', "42"]
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]


def odd_tokens(made, text, rng):
    """Token ids of ``text`` that encoding it would often not give: single characters."""
    ids = []
    for piece in text.split(" "):
        joined = piece if not ids else f" {piece}"
        ids += made.encode(joined) if rng.random() < 0.5 else [
            token for letter in joined for token in made.encode(letter)
        ]  # fmt: skip
    return ids


class Dialogue:
    """A model with scripted replies, and the rows of every call."""

    def __init__(self, template, seed=0, **settings):
        self.tokenizer = tokenizer(template)
        self.rng = random.Random(seed)
        self.replies = []
        end = self.tokenizer.eos_token_id
        self.engine = FakeEngine(self._scripted(), end_ids=[end])
        settings = {"enable_auto_tool_choice": True, **settings}
        parser = "llama3_json" if template == "llama3" else "hermes"
        self.model = ModelWrapper(
            self.engine,
            ModelSettings("toy", tool_call_parser=parser, enable_history=True, **settings),
            self.tokenizer,
        )
        self.messages = []

    def _scripted(self):
        return self.replies

    async def turn(self, text, tools=None, is_cut=False, **sampling):
        """The next reply is ``text``; it becomes part of the conversation."""
        ids = odd_tokens(self.tokenizer, text, self.rng)
        self.engine._replies = iter([ids if is_cut else [*ids, self.tokenizer.eos_token_id]])
        [reply] = await self.model.run.replies(Conversation(self.messages, tools), sampling)
        self.messages = [*self.messages, reply.message]
        return reply

    def say(self, text, role="user"):
        self.messages = [*self.messages, {"role": role, "content": text}]


def extends(later, earlier):
    return later.tokens.tolist()[: len(earlier.tokens)] == earlier.tokens.tolist()


@pytest.mark.parametrize("template", TEMPLATES)
async def test_a_later_turn_goes_on_from_the_sampled_tokens(template):
    talk = Dialogue(template)
    talk.say("go")
    first = (await talk.turn("the inner there")).experience
    talk.say("and then?")
    second = (await talk.turn("in the other")).experience
    talk.say("more")
    third = (await talk.turn("the end")).experience
    assert extends(second, first) and extends(third, second)
    assert talk.model.token_counts["turns"] == 2 and talk.model.token_counts["forks"] == 0
    assert third.metrics["token_fork"] == 0
    shown = talk.model.endpoint.chat.render(talk.messages[:-1])
    assert talk.tokenizer.decode(third.tokens[: third.prompt_length]) == shown


async def test_drift_is_counted_and_does_not_happen():
    talk = Dialogue("chatml")
    talk.say("go")
    made = talk.tokenizer
    letters = [token for letter in "there" for token in made.encode(letter)]
    assert letters != made.encode("there")
    talk.engine._replies = iter([[*letters, made.eos_token_id], made.encode("x")])
    [first] = await talk.model.chat_async(talk.messages)
    talk.messages += [{"role": "assistant", "content": "there"}, {"role": "user", "content": "?"}]
    [second] = await talk.model.chat_async(talk.messages)
    assert extends(second, first)
    assert talk.model.token_counts == {"turns": 1, "forks": 0, "drifts": 1}
    assert second.metrics == {"token_fork": 0.0, "token_drift": 1.0}


async def test_a_template_that_drops_reasoning_forks():
    talk = Dialogue("qwen3")
    talk.say("go")
    first = (await talk.turn("<think>\nhm\n</think>\n\nfour")).experience
    talk.say("sure?")
    second = (await talk.turn("yes")).experience
    assert not extends(second, first)
    assert "hm" not in second.prompt_text
    assert second.metrics["token_fork"] == 1 and talk.model.token_counts["forks"] == 1


async def test_a_template_that_never_shows_reasoning_forks():
    talk = Dialogue("chatml")
    shown = "message.content.split('</think>')[-1]"
    talk.tokenizer.chat_template = talk.tokenizer.chat_template.replace("message.content", shown)
    talk.say("go")
    first = (await talk.turn("<think> hm </think> four")).experience
    talk.say("sure?")
    second = (await talk.turn("yes")).experience
    assert not extends(second, first) and "hm" not in second.prompt_text
    assert second.metrics["token_fork"] == 1 and talk.model.token_counts["forks"] == 1


async def test_what_was_sampled_after_a_stop_text_is_not_in_the_next_prompt():
    talk = Dialogue("chatml")
    talk.say("go")
    talk.engine._end_ids = talk.tokenizer.encode("D")
    first = (await talk.turn("call the tool END", is_cut=True, stop=["END"])).experience
    assert talk.messages[-1]["content"] == "call the tool "
    talk.say("found")
    second = (await talk.turn("so")).experience
    assert "END" in talk.tokenizer.decode(first.tokens) and "END" not in second.prompt_text
    assert second.metrics["token_fork"] == 1 and talk.model.token_counts["forks"] == 1


@pytest.mark.parametrize(("asked", "trained_at"), [(0.6, 0.6), (None, 0.8), (0, 1.0)])
async def test_a_conversation_has_the_temperature_that_its_turns_were_sampled_at(asked, trained_at):
    """Greedy logprobs are those at 1. A row without a temperature is scored at the settings'."""
    talk = Dialogue("chatml", temperature=0.8)
    talk.say("go")
    first = (await talk.turn("the inner", temperature=asked)).experience
    talk.say("and?")
    await talk.turn("x", temperature=asked)
    found = await talk.model.convert_messages_to_experience_async(talk.messages)
    assert found.info["temperature"] == first.info["temperature"] == trained_at


async def test_turns_of_several_temperatures_are_no_experience():
    talk = Dialogue("chatml")
    talk.say("go")
    await talk.turn("the inner", temperature=0.6)
    talk.say("and?")
    await talk.turn("x", temperature=1.2)
    with pytest.raises(ValueError, match=r"sampled at temperatures 0.6 and 1.2.*return each turn"):
        await talk.model.convert_messages_to_experience_async(talk.messages)


async def test_a_conversation_that_was_not_sampled_has_the_temperature_of_its_logprobs():
    talk = Dialogue("chatml", temperature=0.8)
    said = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "the inner"}]
    found = await talk.model.convert_messages_to_experience_async(said)
    assert found.info["temperature"] == 0.8
    found = await talk.model.convert_messages_to_experience_async(said, temperature=0)
    assert found.info["temperature"] == 1.0


async def test_a_reply_without_an_end_gets_one_that_is_not_sampled():
    talk = Dialogue("chatml")
    talk.say("go")
    first = (await talk.turn("the inner", is_cut=True)).experience
    talk.say("and?")
    second = (await talk.turn("x")).experience
    assert extends(second, first)
    assert "the inner<|im_end|>\n<|im_start|>user" in second.prompt_text
    found = await talk.model.convert_messages_to_experience_async(talk.messages)
    sampled = found.tokens[found.prompt_length :][found.action_mask]
    assert talk.tokenizer.decode(sampled) == "the innerx<|im_end|>"


async def test_a_changed_reply_is_encoded_anew():
    talk = Dialogue("chatml")
    talk.say("go")
    first = (await talk.turn("the inner")).experience
    talk.messages[-1] = {"role": "assistant", "content": "another"}
    talk.say("and?")
    second = (await talk.turn("x")).experience
    assert not extends(second, first) and "another" in second.prompt_text
    assert talk.model.token_counts == {"turns": 0, "forks": 0, "drifts": 0}


async def test_samples_of_one_prompt_branch():
    talk = Dialogue("chatml")
    talk.say("go")
    made = talk.tokenizer
    ends = [[*made.encode(word), made.eos_token_id] for word in ("left", "right", "x", "y")]
    talk.engine._replies = iter(ends)
    left, right = await talk.model.chat_async(talk.messages, n=2)
    for branch in (left, right):
        reply = {"role": "assistant", "content": branch.response_text}
        [then] = await talk.model.chat_async([*talk.messages, reply, *talk.messages])
        assert extends(then, branch)


async def test_conversation_as_one_experience_has_sampled_ids_logprobs_and_versions():
    talk = Dialogue("qwen25")
    talk.say("go")
    rows = []
    for version, text in enumerate(["the inner", "call there", "end"]):
        talk.engine._version = version
        rows.append((await talk.turn(text)).experience)
        talk.say("next")
    found = await talk.model.convert_messages_to_experience_async(talk.messages)
    assert found.tokens.tolist() == rows[-1].tokens.tolist()
    sampled = [e.tokens[e.prompt_length :].tolist() for e in rows]
    mask = found.action_mask
    assert found.tokens[found.prompt_length :][mask].tolist() == [t for ids in sampled for t in ids]
    assert found.logprobs[mask].tolist() == [-1.0] * int(mask.sum())
    assert found.logprobs[~mask].tolist() == [0.0] * int((~mask).sum())
    assert sorted(set(found.token_versions.tolist())) == [0, 1, 2]
    assert (found.info["model_version"], found.info["model_version_drift"]) == (0, 2)
    assert found.metrics["token_fork"] == 0


async def test_a_conversation_that_forked_says_so_as_one_experience():
    talk = Dialogue("qwen3")
    talk.say("go")
    await talk.turn("<think>\nhm\n</think>\n\nfour")
    talk.say("sure?")
    await talk.turn("yes")
    talk.say("really?")
    last = (await talk.turn("yes")).experience
    found = await talk.model.convert_messages_to_experience_async(talk.messages)
    assert found.tokens.tolist() == last.tokens.tolist()
    assert last.metrics["token_fork"] == 0 and found.metrics["token_fork"] == 1


async def test_a_conversation_is_known_without_the_tools_that_its_prompts_had():
    talk = Dialogue("qwen25")
    talk.say("go")
    sampled = (await talk.turn("the inner", TOOLS)).experience
    found = await talk.model.convert_messages_to_experience_async(talk.messages)
    assert found.tokens.tolist() == sampled.tokens.tolist()
    assert found.logprobs.tolist() == sampled.logprobs.tolist()
    other = [{"type": "function", "function": {"name": "other", "parameters": {}}}]
    scored = await talk.model.convert_messages_to_experience_async(talk.messages, other)
    assert scored.tokens.tolist() != sampled.tokens.tolist()


@pytest.mark.parametrize("arguments", ['{"q": "\\ud83d"}', '"{\\"q\\": \\"\\\\ud83d\\"}"'])
async def test_half_a_surrogate_pair_in_a_call_is_no_end_of_the_run(arguments):
    talk = Dialogue("qwen25")
    talk.say("go")
    call = f'<tool_call>\n{{"name": "find", "arguments": {arguments}}}\n</tool_call>'
    reply = await talk.turn(call, TOOLS)
    [made] = reply.message["tool_calls"]
    assert made["function"]["arguments"].encode()
    talk.say("found", role="tool")
    assert (await talk.turn("so", TOOLS)).experience.prompt_text


def random_reply(rng, template):
    words = " ".join(rng.choices(WORDS, k=rng.randrange(1, 6))).strip() or "x"
    if template == "qwen3" and rng.random() < 0.3:
        words = f"<think>\n{words}\n</think>\n\nso {words}"
    if rng.random() < 0.4:
        arguments = {"q": rng.choice(WORDS), "k": rng.randrange(9)}
        name = "arguments" if template != "llama3" else "parameters"
        call = json.dumps({"name": "find", name: arguments}, ensure_ascii=rng.random() < 0.5)
        if template == "llama3":
            return call
        return f"{words}\n<tool_call>\n{call}\n</tool_call>"
    return words


@pytest.mark.parametrize("template", TEMPLATES)
async def test_random_tool_dialogues(template):
    """200 dialogues a template: a later row extends the earlier one, or the counter says so."""
    forks = 0
    for number in range(200):
        talk = Dialogue(template, seed=number)
        rng = talk.rng
        has_tools = template in ("qwen25", "qwen3", "llama3")
        tools = TOOLS if has_tools else None
        talk.say("find it")
        before, counted = None, 0
        for _ in range(rng.randrange(2, 5)):
            reply = await talk.turn(random_reply(rng, template), tools, is_cut=rng.random() < 0.1)
            row = reply.experience
            assert row.tokens[row.prompt_length :].tolist() == reply.completion.token_ids
            if before is not None and not extends(row, before):
                counted += 1
                assert row.metrics["token_fork"] == 1
            before = row
            if reply.message.get("tool_calls"):
                talk.say("found " + rng.choice(WORDS), role="tool")
            else:
                talk.say("and " + rng.choice(WORDS))
        assert talk.model.token_counts["forks"] == counted
        forks += counted
        found = talk.model.run.transcript.known_row(Conversation(talk.messages[:-1], tools))
        assert found is not None and found.ids == before.tokens.tolist()
    assert (forks > 0) == (template == "qwen3")
