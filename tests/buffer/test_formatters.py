import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.buffer.tokenizers_for_tests import (
    CHATML,
    DROPS_REASONING,
    MARKED,
    THINKING,
    WITH_TOOLS,
    characters,
)
from trinity.buffer.rows.check import RowFault
from trinity.buffer.schema import FORMATTER
from trinity.buffer.schema.messages import clean_message
from trinity.buffer.schema.task import TaskFormatter
from trinity.common.config.buffer import FormatConfig, TasksetConfig
from trinity.common.experience import Experience, split_dpo_experience_to_single_turn
from trinity.trainer.batch import TrainBatch

TOKENIZERS = {
    name: characters(template)
    for name, template in {
        "chatml": CHATML,
        "tools": WITH_TOOLS,
        "drops": DROPS_REASONING,
        "marked": MARKED,
        "thinking": THINKING,
    }.items()
}


def sft(row: dict, template: str = "chatml", max_tokens: int | None = None, **keys) -> Experience:
    config = FormatConfig(**keys)
    return FORMATTER.get("sft")(config, TOKENIZERS[template], max_tokens).format(row)


def dpo(row: dict, **keys) -> Experience:
    return FORMATTER.get("dpo")(FormatConfig(**keys), TOKENIZERS["tools"]).format(row)


def text(experience: Experience, mask: list[bool] | None = None) -> str:
    ids = experience.tokens[experience.prompt_length :].tolist()
    chosen = ids if mask is None else [i for i, on in zip(ids, mask, strict=True) if on]
    return TOKENIZERS["chatml"].decode(chosen)


PLAIN = {"prompt_type": "plaintext", "prompt_key": "question", "response_key": "answer"}


def test_plain_text_is_question_and_answer():
    found = sft({"question": "1+1?", "answer": "2"}, **PLAIN)
    assert found.prompt_text == "<s>user\n1+1?<e>\n<s>assistant\n"
    assert found.response_text == text(found) == "2<e>\n"
    assert found.action_mask.all()
    assert found.messages[-1] == {"role": "assistant", "content": "2"}


def test_a_system_prompt_of_the_row_wins():
    row = {"question": "q", "answer": "a", "sys": "from row"}
    literal = sft(row, system_prompt="literal", **PLAIN)
    of_row = sft(row, system_prompt="literal", system_prompt_key="sys", **PLAIN)
    assert literal.messages[0]["content"] == "literal"
    assert of_row.messages[0]["content"] == "from row"


def test_dotted_keys_reach_into_objects_and_columns_come_first():
    row = {"x": {"question": "q"}, "x.answer": "a", "reward_model": {"answer": "b"}}
    keys = {"prompt_type": "plaintext", "prompt_key": "x.question"}
    assert text(sft(row, response_key="x.answer", **keys)) == "a<e>\n"
    assert text(sft(row, response_key="reward_model.answer", **keys)) == "b<e>\n"


DIALOGUE = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "first"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "second"},
]


def test_messages_train_on_the_last_answer():
    for value in (DIALOGUE, json.dumps(DIALOGUE)):
        assert text(sft({"message": value})) == "second<e>\n"


def test_concatenated_turns_train_on_every_answer():
    found = sft({"message": DIALOGUE}, enable_concatenated_multi_turn=True)
    assert found.experience_type == "multi_turn"
    assert found.prompt_text == "<s>user\none<e>\n<s>assistant\n"
    assert text(found, found.action_mask.tolist()) == "first<e>second<e>"


def test_marked_templates_train_on_what_they_mark():
    found = sft({"message": DIALOGUE}, "marked", enable_concatenated_multi_turn=True)
    assert text(found, found.action_mask.tolist()) == "first<e>second<e>"


def test_a_turn_that_the_template_rewrites_later_is_not_trained_on():
    dialogue = [{**m} for m in DIALOGUE]
    dialogue[1]["content"] = "<think>x</think>first"
    dialogue[3]["content"] = "<think>y</think>second"
    found = sft({"message": dialogue}, "drops", enable_concatenated_multi_turn=True)
    assert text(found, found.action_mask.tolist()) == "<think>y</think>second<e>"


def test_tools_and_tool_calls_of_tables_and_of_json():
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"a": None, "b": 1}}}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 2}'}}
    dialogue = [
        {"role": "user", "content": "go", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": {"result": 3}},
        {"role": "assistant", "content": "done", "tool_calls": None},
    ]
    found = sft({"message": dialogue, "tools": tools}, "tools")
    assert found.tools == [{"type": "function", "function": {"name": "f", "parameters": {"b": 1}}}]
    assert '[f {"x": 2}]' in found.prompt_text
    assert '{"result": 3}' in found.prompt_text
    same = sft({"message": json.dumps(dialogue), "tools": json.dumps(found.tools)}, "tools")
    assert same.tokens.tolist() == found.tokens.tolist()


def test_a_template_and_thinking_of_the_config():
    row = {"message": DIALOGUE}
    swapped = sft(row, chat_template="{% for m in messages %}({{ m.content }}){% endfor %}")
    assert swapped.prompt_text + swapped.response_text == "(one)(first)(two)(second)"
    thinking = sft({"message": [*DIALOGUE[:1], {"role": "assistant", "content": "<think>x"}]},
                   "thinking", enable_thinking=True)  # fmt: skip
    assert thinking.prompt_text.endswith("assistant\n<think>")


@pytest.mark.parametrize(
    ("row", "keys", "fault"),
    [
        ({"question": "q"}, PLAIN, "'answer': missing; the row has question"),
        ({"question": None, "answer": "a"}, PLAIN, "'question': null"),
        ({"question": 3, "answer": "a"}, PLAIN, "'question': of type int, not text"),
        ({"question": "q", "answer": " "}, PLAIN, "'answer': empty"),
        ({"message": []}, {}, "'message': empty"),
        ({"message": "[{"}, {}, "'message': a text that is not JSON"),
        ({"message": [{"content": "x"}]}, {}, "'message': a message without a role"),
        ({"message": DIALOGUE[:3]}, {}, "the last message is by 'user'"),
        ({"message": DIALOGUE[1:2]}, {}, "an answer without a question"),
        ({"message": DIALOGUE, "tools": "x"}, {}, "'tools': a text that is not JSON"),
    ],
)
def test_faults_name_key_and_reason(row: dict, keys: dict, fault: str):
    with pytest.raises(RowFault) as error:
        sft(row, **keys)
    assert fault in str(error.value)


def test_a_long_row_is_a_fault():
    with pytest.raises(RowFault, match="above the limit of 10"):
        sft({"message": DIALOGUE}, max_tokens=10)


PAIR = {"prompt_type": "plaintext", "prompt_key": "q"}


def test_preference_pairs_of_texts():
    found = dpo({"q": "hm?", "chosen": "yes", "rejected": "no"}, **PAIR)
    decode = TOKENIZERS["chatml"].decode
    assert found.experience_type == "dpo"
    assert decode(found.tokens) == "<s>user\nhm?<e>\n<s>assistant\n"
    assert decode(found.chosen) == "yes<e>\n"
    assert decode(found.rejected) == "no<e>\n"


@pytest.mark.parametrize("form", ["answers", "one message", "text", "whole dialogues", "no prompt"])
def test_preference_pairs_of_messages(form: str):
    prompt = DIALOGUE[:3]
    good, bad = ({"role": "assistant", "content": c} for c in ("good", "bad"))
    row: dict = {"message": prompt, "chosen": [good], "rejected": [bad]}
    if form == "one message":
        row |= {"chosen": good, "rejected": bad}
    elif form == "text":
        row |= {"chosen": "good", "rejected": "bad"}
    elif form != "answers":
        row |= {"chosen": [*prompt, good], "rejected": [*prompt, bad]}
    if form == "no prompt":
        del row["message"]
    found = dpo(row)
    assert found.messages == prompt
    assert (found.chosen_messages, found.rejected_messages) == ([good], [bad])


def test_plain_text_training_starts_after_the_first_token():
    found = FORMATTER.get("cpt")(FormatConfig(prompt_key="t"), TOKENIZERS["chatml"]).format(
        {"t": "abc"}
    )
    assert (found.prompt_length, len(found.tokens)) == (1, 3)


def test_what_nobody_sampled_is_trained_at_temperature_1():
    """The losses of SFT and DPO are of the model's own distribution, whatever rollouts are at."""
    cpt = FORMATTER.get("cpt")(FormatConfig(prompt_key="t"), TOKENIZERS["chatml"])
    turns = {"messages_key": "message", "enable_concatenated_multi_turn": True}
    answer = {"role": "assistant", "content": "good"}
    pair = dpo({"q": "?", "chosen": "a", "rejected": "b"}, **PAIR)
    rows = [
        sft({"question": "1+1?", "answer": "2"}, **PLAIN),
        sft({"message": [*DIALOGUE[:3], answer]}, prompt_type="messages", **turns),
        cpt.format({"t": "abc"}),
        *split_dpo_experience_to_single_turn([pair]),
    ]
    sampled = Experience(tokens=[1, 2, 3], prompt_length=1, info={"temperature": 0.6})
    batch = TrainBatch.from_experiences([*rows, sampled])
    assert batch["temperature"].tolist() == pytest.approx([1.0] * 5 + [0.6])


WORDS = st.text(alphabet="abc äé<>/\n[]{}'\"", max_size=12)
TURNS = st.lists(st.tuples(st.sampled_from(["user", "assistant", "tool"]), WORDS), max_size=5)


@pytest.mark.parametrize("name", ["chatml", "marked", "drops", "tools"])
def test_tokens_are_those_of_the_tokenizers_own_template(name: str):
    tokenizer = TOKENIZERS[name]

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(turns=TURNS, answer=WORDS, many=st.booleans())
    def run(turns: list[tuple[str, str]], answer: str, many: bool) -> None:
        turns = [("system", "s"), ("user", "u"), *turns, ("assistant", answer)]
        dialogue = [{"role": role, "content": content} for role, content in turns]
        found = sft({"message": dialogue}, name, enable_concatenated_multi_turn=many)
        whole = tokenizer.apply_chat_template(dialogue, tokenize=True, return_dict=False)
        assert found.tokens.tolist() == whole
        if not many:
            head = tokenizer.apply_chat_template(
                dialogue[:-1], tokenize=True, return_dict=False, add_generation_prompt=True
            )
            assert found.prompt_length <= len(head)
            assert whole[: found.prompt_length] == head[: found.prompt_length]

    run()


@settings(max_examples=60, deadline=None)
@given(TURNS, WORDS)
def test_the_mask_holds_exactly_what_assistants_said(turns: list[tuple[str, str]], answer: str):
    turns = [("user", "u"), *turns, ("assistant", answer)]
    dialogue = [{"role": role, "content": content} for role, content in turns]
    said = "".join(f"{content}<e>" for role, content in turns if role == "assistant")
    for template in ("marked", "chatml"):
        found = sft({"message": dialogue}, template, enable_concatenated_multi_turn=True)
        assert text(found, found.action_mask.tolist()) == said


def test_parts_that_are_no_text_are_the_fault_of_the_row():
    parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "what?"}]
    row = {"message": [{"role": "user", "content": parts}, {"role": "assistant", "content": "x"}]}
    for read in (sft, lambda row: FORMATTER.get("sft").check(row, FormatConfig())):
        with pytest.raises(RowFault, match="'message': a part of type 'image'"):
            read(row)


def test_content_parts_stay_as_they_are():
    parts = [{"type": "text", "text": "hi"}]
    assert clean_message({"role": "user", "content": parts})["content"] == parts


def test_tasks_take_workflow_and_reward_of_their_row():
    config = TasksetConfig(
        path="x",
        format={
            "prompt_key": "q",
            "response_key": "a.b",
            "workflow_key": "w",
            "reward_fn_key": "r",
        },
        default_workflow_type="usual",
        default_reward_fn_type="usual_reward",
        repeat_times=3,
        workflow_args={"max_turns": 2},
        rollout_args={"temperature": 0.5},
    )
    formatter = TaskFormatter(config, taskset_id=1)
    row = {"q": "question", "a": {"b": "truth"}, "w": "special", "r": None}
    task = formatter.format(row, 4)
    assert (task.workflow, task.reward_fn) == ("special", "usual_reward")
    assert (task.task_desc, task.truth) == ("question", "truth")
    assert task.index == {"index": 4, "taskset_id": 1}
    assert (task.repeat_times, task.rollout_args.temperature) == (3, 0.5)
    with pytest.raises(RowFault, match=r"a\.b.*missing"):
        formatter.format({"q": "question"})


def test_an_environment_needs_no_columns():
    task = TaskFormatter(TasksetConfig(path="x")).format({"size": 4, "seed": 1})
    assert task.raw_task == {"size": 4, "seed": 1}
