import json
from pathlib import Path

import pytest

from tests.buffer.tokenizers_for_tests import characters
from trinity.buffer import check_experience_buffer, get_buffer_reader
from trinity.buffer.reader.dataset import DatasetReader
from trinity.buffer.rows import BadRowError, ListRows
from trinity.buffer.rows.sql import write_tasks
from trinity.buffer.schema import FORMATTER
from trinity.buffer.selector import SELECTORS, DataSource
from trinity.common.config.buffer import DataSelectorConfig, ExperienceBufferConfig, FormatConfig
from trinity.common.constants import OnBadRow

TOKENIZER = characters()


def reader(rows: list[dict], total: int | None = None, kind: str = "shuffle", **settings):
    config = FormatConfig(prompt_type="plaintext", prompt_key="q", response_key="a")
    source = ListRows(rows, "train.jsonl")
    selector = SELECTORS.get(kind)(DataSource(source), DataSelectorConfig(selector_type=kind))
    formatter = FORMATTER.get("sft")(config, TOKENIZER, settings.pop("max_tokens", None))
    return DatasetReader(source, formatter, selector, name="sft", total=total, **settings)


ROWS = [{"q": f"q{i}", "a": f"a{i}"} for i in range(5)]


async def test_epochs_in_full_batches_with_ids_of_their_own():
    source = reader(ROWS, total=10, batch_size=4)
    first, second = await source.read(), await source.read()
    with pytest.raises(StopAsyncIteration):
        await source.read()
    ids = [e.eid.uid for e in first + second]
    assert len(set(ids)) == 8
    assert {e.eid.task for e in first} | {second[0].eid.task} == set(range(5))
    assert second[1].eid.run == 1


async def test_a_resume_reads_on_as_if_unbroken():
    unbroken = reader(ROWS, total=15)
    expected = [[e.eid.uid for e in await unbroken.read(3)] for _ in range(5)]
    first = reader(ROWS, total=15)
    found = [[e.eid.uid for e in await first.read(3)] for _ in range(2)]
    second = reader(ROWS, total=15)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    found += [[e.eid.uid for e in await second.read(3)] for _ in range(3)]
    assert found == expected


async def test_bad_rows_end_the_run_or_are_left_out():
    rows = [*ROWS[:2], {"q": "no answer"}, {"q": "x" * 50, "a": "y"}]
    with pytest.raises(BadRowError) as error:
        await reader(rows, kind="sequential", max_tokens=40).read(4)
    assert [bad.key for bad in error.value.bad_rows] == ["a", "a"]
    source = reader(rows, kind="sequential", max_tokens=40, on_bad_row=OnBadRow.SKIP)
    assert [e.eid.task for e in await source.read(4)] == [0, 1, 0, 1]
    assert source.num_bad == 2


def write_data(path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))


async def test_rows_of_a_table_are_a_data_set_too(tmp_path: Path):
    TOKENIZER.save_pretrained(tmp_path / "model")
    path = f"sqlite:///{tmp_path}/data.db"
    write_tasks(path, "sft_rows", [{"q": str(i), "a": "yes"} for i in range(3)])
    keys = FormatConfig(prompt_type="plaintext", prompt_key="q", response_key="a")
    section = ExperienceBufferConfig(
        name="sft_rows", storage_type="sql", path=path, schema_type="sft", format=keys
    )
    assert check_experience_buffer(section) == []
    source = get_buffer_reader(section, tokenizer_path=str(tmp_path / "model"), batch_size=3)
    assert [e.response_text for e in await source.read()] == ["yes<e>\n"] * 3
    [problem] = check_experience_buffer(section.model_copy(update={"name": "other"}))
    assert (problem.key, "no table 'other'" in problem.message) == ("name", True)


def test_loading_a_data_set_shows_how_far_it_is_if_asked(tmp_path: Path, capfd):
    keys = {"storage_type": "file", "schema_type": "experience", "path": str(tmp_path / "t.jsonl")}
    (tmp_path / "t.jsonl").write_text('{"tokens": [1, 2], "prompt_length": 1}\n' * 20)
    get_buffer_reader(ExperienceBufferConfig(name="quiet", **keys))
    assert capfd.readouterr().err == ""
    get_buffer_reader(ExperienceBufferConfig(name="shown", enable_progress_bar=True, **keys))
    assert "Loading shown" in capfd.readouterr().err


async def test_a_section_with_a_tokenizer_of_a_folder(tmp_path: Path):
    TOKENIZER.save_pretrained(tmp_path / "model")
    write_data(tmp_path / "train.jsonl")
    config = ExperienceBufferConfig(
        name="sft_data", storage_type="file", schema_type="sft", path=str(tmp_path / "train.jsonl"),
        format={"prompt_type": "plaintext", "prompt_key": "q", "response_key": "a"}, total_epochs=2,
    )  # fmt: skip
    source = get_buffer_reader(config, tokenizer_path=str(tmp_path / "model"), batch_size=5)
    batches = [await source.read(), await source.read()]
    assert batches[0][0].response_text == "a0<e>\n"
    with pytest.raises(StopAsyncIteration):
        await source.read()
