import asyncio
import pickle

import pytest
import torch

from tests.common.models.toy import TEMPLATES, model_folder, tokenizer
from trinity.common.models import ModelSettings, ModelWrapper
from trinity.common.models.fake import FakeEngine
from trinity.common.models.protocol import Completion
from trinity.common.models.replies import text_until_stop
from trinity.engine.torch import TorchEngine, TorchEngineSettings
from trinity.utils.actor import ProcessRestarted

ASK = [{"role": "user", "content": "What is the sum?"}]


def wrapper(replies=(), template="chatml", **settings):
    made = tokenizer(template)
    end = made.eos_token_id
    ids = [[*made.encode(text), end] for text in replies]
    engine = FakeEngine(ids, end_ids=[end])
    return ModelWrapper(engine, ModelSettings("toy", **settings), made), engine


async def test_chat_gives_experiences_of_exact_tokens():
    model, engine = wrapper(["four", "five"], temperature=0.7, max_response_tokens=9)
    model.begin_run(1)
    first, second = await model.chat_async(ASK, n=2)
    prompt = "<|im_start|>user\nWhat is the sum?<|im_end|>\n<|im_start|>assistant\n"
    assert first.prompt_text == prompt
    assert engine.prompts == [tokenizer().encode(prompt)]
    assert first.tokens.tolist() == engine.prompts[0] + tokenizer().encode("four<|im_end|>")
    assert first.prompt_length == len(engine.prompts[0])
    assert (first.response_text, second.response_text) == ("four", "five")
    assert first.logprobs.tolist() == [-1.0] * first.response_length
    assert first.token_versions.tolist() == [0] * first.response_length
    assert first.info == {
        "finish_reason": "stop",
        "model_version": 0,
        "model_version_drift": 0,
        "temperature": 0.7,
    }
    params = engine.params[0]
    assert (params.n, params.temperature, params.max_tokens) == (2, 0.7, 9)


def test_sync_methods_work_in_threads_and_beside_a_running_loop():
    model, _ = wrapper(["a", "b", "c"])
    assert model.chat(ASK)[0].response_text == "a"

    async def inside():
        return model.chat(ASK)[0].response_text, await asyncio.to_thread(model.chat, ASK)

    plain, threaded = asyncio.run(inside())
    assert (plain, threaded[0].response_text) == ("b", "c")
    assert model.model_version == 0
    assert model.logprobs([1, 2, 3]).tolist() == [-2.0, -2.0]


@pytest.mark.parametrize("temperature", [-1.0, 1e-9, float("nan"), float("inf")])
async def test_nothing_is_scored_at_a_temperature_that_nothing_is_sampled_at(temperature):
    model, _ = wrapper()
    said = [*ASK, {"role": "assistant", "content": "four"}]
    told = f"temperature = {temperature} is not possible: it must be 0"
    with pytest.raises(ValueError, match=told):
        await model.logprobs_async([1, 2, 3], temperature)
    with pytest.raises(ValueError, match=told):
        await model.convert_messages_to_experience_async(said, temperature=temperature)
    for possible in (0, 0.01, None):
        assert (await model.logprobs_async([1, 2, 3], possible)).tolist() == [-2.0, -2.0]


async def test_request_seeds_come_from_run_and_call_number_alone():
    model, engine = wrapper(["x"] * 8)
    seeds = []
    for run in (7, 8, 7):
        clone = model.clone_with_isolated_history()
        clone.begin_run(run)
        for _ in range(2):
            await clone.chat_async(ASK)
        seeds.append([params.seed for params in engine.params[-2:]])
    assert seeds[0] == seeds[2] and len({*seeds[0], *seeds[1]}) == 4
    await model.chat_async(ASK, seed=5)
    assert engine.params[-1].seed == 5


async def test_sampling_parameters_override_settings_and_unknown_ones_are_named():
    model, engine = wrapper(["x", "y"], top_k=4, min_response_tokens=3, max_model_len=100)
    await model.chat_async(ASK, top_p=0.5, max_tokens=20, stop="END", temperature=None, logprobs=1)
    params = engine.params[0]
    assert (params.top_p, params.top_k, params.min_tokens, params.max_tokens) == (0.5, 4, 3, 20)
    assert params.stop == ("END",) and params.temperature == 1.0
    await model.chat_async(ASK)
    assert engine.params[1].max_tokens == 100 - len(engine.prompts[1])
    with pytest.raises(TypeError, match=r"top_q.*known are"):
        await model.chat_async(ASK, top_q=1)


async def test_generate_takes_texts_in_order():
    model, _ = wrapper(["1", "2", "3", "4"])
    found = await model.generate_async(["first", "second"], n=2)
    assert [e.response_text for e in found] == ["1", "2", "3", "4"]
    assert [e.prompt_text for e in found] == ["first", "first", "second", "second"]


@pytest.mark.parametrize(
    ("reply", "stops", "text"),
    [
        (["ab", "\n\n"], ["\n"], "ab"),  # the last token has the stop text twice
        (["a\n", "b", "<|im_end|>"], ["\n"], "a\nb"),  # before min_tokens, which no stop ends
        (["a\n", "b", "END"], ["\n", "END"], "a\nb"),
        (["abE", "N", "D."], ["END"], "ab"),
        (["é", "é"], ["é"], "é"),
        (["END"], ["END", ""], ""),
    ],
)
def test_a_text_ends_before_the_stop_text_that_the_last_token_completes(reply, stops, text):
    class Pieces:
        def decode(self, ids, skip_special_tokens):
            return "".join(reply[place] for place in ids).replace("<|im_end|>", "")

    done = Completion([*range(len(reply))], [0.0] * len(reply), "stop")
    assert text_until_stop(Pieces(), done, stops) == text


async def test_a_stop_text_is_cut_from_the_text_and_stays_in_the_tokens():
    made = tokenizer()
    ids = made.encode("one two END")
    engine = FakeEngine([ids], end_ids=[ids[-1]])
    model = ModelWrapper(engine, ModelSettings("toy"), made)
    [found] = await model.chat_async(ASK, stop=["END"])
    assert found.response_text == "one two "
    assert found.tokens[found.prompt_length :].tolist() == ids


@pytest.mark.parametrize("limits", [{"max_prompt_tokens": 10}, {"max_model_len": 11}])
async def test_a_long_prompt_gives_masked_experiences(limits):
    model, engine = wrapper(**limits)
    found = await model.chat_async(ASK, n=3)
    assert not engine.prompts and len(found) == 3
    for experience in found:
        assert (experience.prompt_length, len(experience.tokens)) == (10, 11)
        assert experience.logprobs.tolist() == [0.0]
        assert experience.truncate_status == "prompt_truncated"
        assert experience.reward == 0 and not experience.action_mask.any()
        assert experience.response_text.startswith("[This experience is masked out")


async def test_a_long_prompt_is_sampled_whole_without_truncation():
    model, engine = wrapper(["x"], max_prompt_tokens=10, enable_prompt_truncation=False)
    [found] = await model.chat_async(ASK)
    assert found.prompt_length == len(engine.prompts[0]) > 10
    assert found.truncate_status is None and found.action_mask.any()


async def test_a_prompt_without_room_for_a_reply_is_an_error_without_truncation():
    model, _ = wrapper(max_prompt_tokens=10, max_model_len=11, enable_prompt_truncation=False)
    with pytest.raises(ValueError, match=r"more than 10 \(max_model_len - 1\)"):
        await model.chat_async(ASK)


async def test_a_reply_may_be_begun_for_the_model():
    model, engine = wrapper(["ur"])
    await model.chat_async([*ASK, {"role": "assistant", "content": "fo"}])
    assert tokenizer().decode(engine.prompts[0]).endswith("<|im_start|>assistant\nfo")


async def test_template_settings():
    model, engine = wrapper(["x"], template="qwen3", enable_thinking=False)
    await model.chat_async(ASK)
    assert tokenizer().decode(engine.prompts[0]).endswith("<think>\n\n</think>\n\n")
    model, engine = wrapper(["x"], chat_template="{{ messages[0].content }}!")
    await model.chat_async(ASK)
    assert tokenizer().decode(engine.prompts[0]) == "What is the sum?!"
    bare = tokenizer()
    bare.chat_template = None
    model = ModelWrapper(FakeEngine([]), ModelSettings("bare"), bare)
    with pytest.raises(ValueError, match="no chat template"):
        await model.chat_async(ASK)


async def test_history_is_recorded_per_clone():
    model, _ = wrapper(["a", "b", "c"], enable_history=True)
    one, two = model.clone_with_isolated_history(), model.clone_with_isolated_history()
    await one.chat_async(ASK, n=2)
    await two.chat_async(ASK)
    texts = [e.response_text for e in one.extract_experience_from_history(clear_history=False)]
    assert texts == ["a", "b"]
    assert len(one.extract_experience_from_history()) == 2
    assert one.extract_experience_from_history() == []
    assert [e.response_text for e in two.extract_experience_from_history()] == ["c"]
    off, _ = wrapper()
    with pytest.raises(ValueError, match="enable_history"):
        off.extract_experience_from_history()


async def test_state_of_a_run():
    model, _ = wrapper(["a"], enable_history=True)
    await model.set_workflow_state({"step": 1})
    await model.set_workflow_state({"env": "x"})
    assert await model.get_workflow_state() == {"step": 1, "env": "x"}
    await model.chat_async(ASK)
    await model.clean_workflow_state()
    assert await model.get_workflow_state() == {}
    assert model.extract_experience_from_history() == []


async def test_properties():
    model, _ = wrapper(name="the-model", temperature=0.5)
    assert (model.model_path, model.model_name) == ("toy", "the-model")
    assert model.generate_kwargs["temperature"] == 0.5
    assert await model.model_version_async == 0
    assert await model.get_message_token_len(ASK) > 5
    assert model.get_current_load() == 0


class DeadEngine(FakeEngine):
    async def sample(self, prompt_ids, params, adapter=None):
        raise ConnectionError("the process ended")


async def test_a_dead_engine_is_stepped_over():
    made = tokenizer()
    alive = FakeEngine([made.encode("a")] * 2)
    model = ModelWrapper([DeadEngine([]), alive], ModelSettings("toy"), made)
    assert (await model.chat_async(ASK))[0].response_text == "a"
    model = ModelWrapper([DeadEngine([])], ModelSettings("toy"), made)
    with pytest.raises(ConnectionError, match="ended"):
        await model.chat_async(ASK)


class MeetingEngine(FakeEngine):
    """Answers once all requests of a test are at its engines."""

    def __init__(self, tokens, meeting):
        super().__init__(tokens)
        self.meeting = meeting

    async def sample(self, prompt_ids, params, adapter=None):
        await self.meeting.wait()
        return await super().sample(prompt_ids, params, adapter)


async def test_requests_go_to_the_least_loaded_engine():
    made = tokenizer()
    meeting = asyncio.Barrier(8)
    engines = [MeetingEngine([made.encode("a")] * 8, meeting) for _ in range(2)]
    model = ModelWrapper(engines, ModelSettings("toy"), made)
    clones = [model.clone_with_isolated_history() for _ in range(8)]
    await asyncio.gather(*[clone.chat_async(ASK) for clone in clones])
    assert [len(engine.prompts) for engine in engines] == [4, 4]


def test_a_wrapper_can_be_sent_to_another_process(tmp_path):
    folder = model_folder(tmp_path)
    model = ModelWrapper([], ModelSettings(folder))
    assert model.tokenizer is not None
    copy = pickle.loads(pickle.dumps(model))
    assert copy.tokenizer.eos_token == "<|im_end|>"


async def test_a_conversation_from_elsewhere_is_encoded_and_scored(tmp_path):
    folder = model_folder(tmp_path)
    engine = TorchEngine(TorchEngineSettings(folder, dtype="float32", num_threads=1))
    await engine.prepare()
    model = ModelWrapper(engine, ModelSettings(folder, temperature=0.8))
    talk = [
        *ASK,
        {"role": "assistant", "content": "four"},
        {"role": "user", "content": "sure?"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "thanks"},
    ]
    found = await model.convert_messages_to_experience_async(talk)
    sampled = found.tokens[found.prompt_length :][found.action_mask]
    assert model.tokenizer.decode(sampled) == "four<|im_end|>yes<|im_end|>"
    assert model.tokenizer.decode(found.tokens[: found.prompt_length]).endswith("assistant\n")
    scored = await model.logprobs_async(found.tokens, 0.8)
    expected = torch.where(found.action_mask, scored[found.prompt_length - 1 :], 0.0)
    assert torch.equal(found.logprobs, expected)
    assert found.experience_type == "multi_turn" and found.truncate_status is None
    await engine.close()


@pytest.mark.parametrize("template", TEMPLATES)
async def test_masks_of_all_templates(template):
    model, _ = wrapper(template=template)
    end = model.tokenizer.eos_token
    talk = [*ASK, {"role": "assistant", "content": "the one"}, *ASK]
    talk += [{"role": "assistant", "content": "in two"}]
    found = await model.convert_messages_to_experience_async(talk)
    sampled = found.tokens[found.prompt_length :][found.action_mask]
    assert model.tokenizer.decode(sampled) == f"the one{end}in two{end}"


async def test_a_conversation_that_is_too_long_is_cut_and_marked():
    talk = [*ASK, {"role": "assistant", "content": "one " * 30}]
    model, _ = wrapper(max_model_len=40)
    found = await model.convert_messages_to_experience_async(talk)
    assert len(found.tokens) == 39 and found.truncate_status == "response_truncated"
    model, _ = wrapper(max_model_len=12)
    found = await model.convert_messages_to_experience_async(talk)
    assert found.truncate_status == "prompt_truncated" and not found.action_mask.any()
    with pytest.raises(ValueError, match="no assistant"):
        await model.convert_messages_to_experience_async(ASK)


async def test_requests_wait_for_an_engine_that_is_started_again():
    class Restarting(FakeEngine):
        failures = 2

        async def sample(self, prompt_ids, params, adapter=None):
            self.failures -= 1
            if self.failures >= 0:
                raise ProcessRestarted("not ready")
            return await super().sample(prompt_ids, params)

    made = tokenizer()
    engine = Restarting([[*made.encode("four"), made.eos_token_id]], end_ids=[made.eos_token_id])
    model = ModelWrapper(engine, ModelSettings("toy", enable_history=True), made)
    model.begin_run(5)
    [found] = await model.chat_async([{"role": "user", "content": "2+2?"}])
    assert found.response_text == "four" and len(engine.params) == 1
    assert len(model.extract_experience_from_history()) == 1
    engine.failures = -1
    again = ModelWrapper(FakeEngine([[5]]), ModelSettings("toy", enable_history=True), made)
    again.begin_run(5)
    await again.chat_async([{"role": "user", "content": "2+2?"}])
    assert again.endpoint.group.engines[0].params[0].seed == engine.params[0].seed


async def test_the_adapter_of_a_model_is_named():
    with_one, _ = wrapper(adapter="lora")
    without, _ = wrapper()
    assert with_one.get_lora_request() == "lora"
    assert await without.get_lora_request_async() is None
