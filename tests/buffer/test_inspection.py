from tests.buffer.tokenizers_for_tests import characters
from trinity.buffer.inspection import (
    ExperienceViewer,
    Seen,
    TaskViewer,
    histogram,
    look,
    statistics,
)
from trinity.buffer.rows import BadRow, ListRows
from trinity.buffer.schema import FORMATTER
from trinity.buffer.schema.task import TaskFormatter
from trinity.common.config.buffer import FormatConfig, TasksetConfig
from trinity.common.models.chat import ChatFormat
from trinity.common.models.settings import ModelSettings

KEYS = {"prompt_key": "q", "response_key": "a"}
CHAT = ChatFormat(ModelSettings(model_path="x"), characters())


def section(**fields: object) -> TasksetConfig:
    return TasksetConfig(path="x", format=KEYS, **fields)  # type: ignore[arg-type]


def seen(found: Seen | BadRow) -> Seen:
    assert isinstance(found, Seen)
    return found


def test_a_task_is_shown_as_its_workflow_asks_it():
    config = section(default_workflow_type="simple_workflow", default_reward_fn_type="math_reward")
    config.format.system_prompt = "be short"
    found = seen(look(ListRows([{"q": "1+1?", "a": 2}]), 0, TaskViewer(config, CHAT)))
    prompt = "<s>system\nbe short<e>\n<s>user\n1+1?<e>\n<s>assistant\n"
    assert found.parts == [("prompt", prompt), ("truth", "2")]
    assert found.num_tokens == {"prompt": len(CHAT.encode(prompt))}


def test_a_long_prompt_is_noted():
    rows = ListRows([{"q": "x" * 50, "a": "y"}], "f.jsonl")
    found = seen(look(rows, 0, TaskViewer(section(), CHAT, max_prompt_tokens=20)))
    assert "above the limit of 20: masked out" in found.note


def test_an_environments_row_is_shown_as_it_is():
    config = TasksetConfig(path="x")
    found = seen(look(ListRows([{"size": 4}]), 0, TaskViewer(config)))
    assert found.parts == [("prompt", "{'size': 4}")]


def test_trained_turns_are_marked():
    form = FormatConfig(enable_concatenated_multi_turn=True)
    dialogue = [
        {"role": role, "content": content}
        for role, content in [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    ]
    viewer = ExperienceViewer(FORMATTER.get("sft")(form, characters()))
    found = seen(look(ListRows([{"message": dialogue}]), 0, viewer))
    assert found.parts[1] == ("response", "⟦b<e>⟧\n<s>user\nc<e>\n<s>assistant\n⟦d<e>⟧\n")


def test_statistics_of_a_mixed_set():
    rows = [{"q": "one", "a": 1}, {"q": "three", "a": 2}, {"q": "one", "a": 3}, {"a": 4}]
    config = section()
    found = statistics(
        ListRows(rows, "f.jsonl"), TaskFormatter(config).check, TaskViewer(config), key="q"
    )
    assert (found.num_rows, found.num_duplicates, found.num_measured) == (4, 1, 3)
    assert found.duplicates == [("f.jsonl, row 3", "f.jsonl, row 1")]
    assert [str(bad) for bad in found.bad_rows] == ["f.jsonl, row 4, 'q': missing; the row has a"]
    assert found.lengths == {"prompt": [9, 11, 9]}


def test_repetitions_are_found_by_a_key_that_reaches_into_objects():
    rows = ListRows([{"q": {"text": text}, "n": n} for n, text in enumerate("aab")])
    found = statistics(rows, lambda row: None, lambda row: Seen("", (), {}), key="q.text")
    assert found.duplicates == [("row, row 2", "row, row 1")]


def test_lengths_of_large_sets_are_sampled():
    rows = ListRows([{"q": "x" * i, "a": i} for i in range(1, 200)])
    found = statistics(rows, lambda row: None, TaskViewer(section()), max_measured=20)
    assert found.num_measured == 20


def test_histograms_hold_every_length_once():
    bins = histogram([1, 2, 2, 9, 30])
    assert sum(count for _, _, count in bins) == 5
    assert bins[0] == (1, 3, 3)
    assert bins[-1][0] <= 30 <= bins[-1][1]
    assert histogram([4, 4]) == [(4, 4, 2)]
