import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.buffer.tokenizers_for_tests import characters
from trinity.cli.data import app
from trinity.cli.usage import UsageError
from trinity.common.schema.database import DatabaseProblem

CONFIG = """
mode: both
algorithm: {{algorithm_type: grpo, repeat_times: 2}}
model: {{model_path: {folder}/model, max_prompt_tokens: 30, max_response_tokens: 10}}
buffer:
  batch_size: 2
  explorer_input:
    taskset:
      name: sums
      path: {folder}/train.jsonl
      format: {{prompt_key: question, response_key: answer}}
      default_workflow_type: simple_workflow
      default_reward_fn_type: math_reward
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = ['{"question": "1+1?", "answer": "2"}', '{"question": "[b]2+2?[/b]", "answer": "4"}']
    (tmp_path / "train.jsonl").write_text("\n".join([*rows, '{"question": "long long long"}']))
    characters().save_pretrained(tmp_path / "model")
    (tmp_path / "run.yaml").write_text(CONFIG.format(folder=tmp_path))
    return tmp_path


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


def test_show_renders_what_the_config_asks(folder: Path):
    output = run("show", "--config", folder / "run.yaml", "--rows", 3)
    assert "sums: 3 rows, columns question, answer" in output
    assert "<s>user" in output and "1+1?<e>" in output and "[b]2+2?[/b]<e>" in output
    assert "bad row: train.jsonl, line 3, 'answer': missing" in output


def test_a_reward_of_a_plugin_that_is_not_given_is_told(folder: Path):
    config = folder / "run.yaml"
    config.write_text(config.read_text().replace("math_reward", "rewards_of_mine"))
    with pytest.raises(UsageError, match=r"'rewards_of_mine'.*--plugin-dir"):
        run("show", "--config", config)


def test_stats_ends_with_1_for_broken_rows(folder: Path):
    keys = ("-k", "prompt_key=question", "-k", "response_key=answer")
    output = run("stats", folder / "train.jsonl", *keys, code=1)
    assert "broken: 1" in output and "train.jsonl, line 3, 'answer': missing" in output
    assert "prompt, characters: 10 to 17" in output
    assert "broken: 0" in run("stats", folder / "train.jsonl", "-k", "prompt_key=question")


def test_images_count_as_the_tokens_that_they_become(folder: Path):
    rows = [
        {"question": "What is it?", "answer": name, "picture": f"{name}.png"}
        for name in ("red", "blue")
    ]
    (folder / "spots.jsonl").write_text("\n".join(map(json.dumps, rows)))
    mark = characters().convert_tokens_to_ids("x")
    form = {"model_type": "llava", "image_token_id": mark, "image_seq_length": 4}
    (folder / "model" / "config.json").write_text(json.dumps(form))
    keys = ("-k", "prompt_key=question", "-k", "response_key=answer", "-k", "image_key=picture")
    given = (folder / "spots.jsonl", *keys, "--workflow", "simple_mm_workflow")
    output = run("show", *given, "--model", folder / "model")
    assert "What is it?" in output
    asked = run("show", *given[:-4], "--workflow", "simple_workflow", "--model", folder / "model")
    assert tokens_of(output) == tokens_of(asked) + 4
    assert "repeated: 0" in run("stats", *given)  # the same question, about other pictures
    (folder / "model" / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UsageError, match="no image_token_id"):
        run("show", *given, "--model", folder / "model")


def tokens_of(output: str) -> int:
    return int(re.search(r"prompt \((\d+) tokens\)", output)[1])


def test_convert_and_show_what_came_of_it(folder: Path):
    database = folder / "tasks.db"
    assert "3 tasks written" in run("convert", folder / "train.jsonl", database)
    output = run("show", database, "--table", "train", "-k", "prompt_key=question", "-r", 1)
    assert "1+1?" in output


def test_wrong_arguments_are_named(folder: Path):
    with pytest.raises(UsageError, match="Name a data set"):
        run("show")
    with pytest.raises(UsageError, match=r"no data set 'x'. It has: sums"):
        run("show", "--config", folder / "run.yaml", "--name", "x")
    rows = folder / "train.jsonl"
    with pytest.raises(UsageError, match="'promt=x'"):
        run("show", rows, "-k", "promt=x")
    with pytest.raises(UsageError, match="prompt_type=plain: Input should be 'messages'"):
        run("show", rows, "-k", "prompt_type=plain")
    with pytest.raises(UsageError, match="--kind is 'sfft'; use task, cpt, dpo"):
        run("show", rows, "--kind", "sfft")
    with pytest.raises(UsageError, match=r"'math_workflo'\. Did you mean 'math_workflow'"):
        run("stats", rows, "--workflow", "math_workflo")
    with pytest.raises(UsageError, match="No tokenizer can be loaded from '/no/model'"):
        run("show", rows, "--model", "/no/model")
    with pytest.raises(UsageError, match="--start is 9, but train has 3 rows"):
        run("show", rows, "--start", 9)
    with pytest.raises(UsageError, match=r"^'quesion' is no column"):
        run("show", rows, "-k", "prompt_key=quesion")


def test_a_database_that_is_not_there_is_not_made(folder: Path):
    with pytest.raises(UsageError, match="There is no database"):
        run("show", folder / "none.db")
    with pytest.raises(DatabaseProblem, match="There is no database"):
        run("convert", folder / "none.db", folder / "x.jsonl")
    assert not (folder / "none.db").exists()


def test_without_a_column_whole_rows_are_shown_with_a_hint(folder: Path):
    output = run("show", folder / "train.jsonl", "-r", 1)
    assert "'answer': '2'" in output and "-k prompt_key=<column>" in output


def test_help_has_the_options_of_data_sets_and_its_own():
    output = run("show", "--help")
    assert all(option in output for option in ("--config", "--workflow", "--rows", "--start"))
