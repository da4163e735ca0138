"""The page of experiences, drawn without a browser."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("streamlit")

from streamlit.testing.v1 import AppTest

from tests.common.config.files import BASE, with_edits, write
from trinity.buffer.rows.sql import write_tasks
from trinity.cli.launcher import app
from trinity.cli.usage import UsageError
from trinity.cli.view import _tasks_of
from trinity.common.experience import EID, Experience
from trinity.common.schema.database import Database
from trinity.common.schema.tables import ExperienceTables


def draw(url: str, table: str) -> None:
    from trinity.perf.viewer import ExperienceViewer

    ExperienceViewer(url, table).main()


@pytest.fixture
def url(tmp_path: Path) -> str:
    path = f"sqlite:///{tmp_path / 'rows.db'}"
    database, tables = Database(path), ExperienceTables("b")
    database.open()
    database.create(*tables.tables)
    rows = [
        Experience(
            tokens=[1, 2, 3, 4],
            prompt_length=2,
            prompt_text=f"question {number}",
            response_text=f"answer {number}",
            reward=float(number % 2),
            eid=EID(0, f"t{number}", 0),
            info={"model_version": number // 10},
        )
        for number in range(25)
    ]
    database.run(lambda connection: tables.insert(connection, rows))
    database.close()
    return path


def page(url: str, table: str = "b") -> AppTest:
    shown = AppTest.from_function(draw, args=(url, table), default_timeout=300).run()
    assert not shown.exception
    return shown


def texts(shown: AppTest) -> list[str]:
    return [code.value for code in shown.code if code.value.startswith("question")]


def test_rows_are_paged_and_filtered(url: str) -> None:
    shown = page(url)
    assert texts(shown) == [f"question {number}" for number in range(10)]
    assert "25 experiences" in [caption.value for caption in shown.caption]
    shown.number_input(key="page").set_value(3).run()
    assert texts(shown) == [f"question {number}" for number in range(20, 25)]
    shown.number_input(key="reward_min").set_value(0.5)
    shown.number_input(key="version_min").set_value(2).run()
    assert texts(shown) == ["question 21", "question 23"]
    shown.text_input(key="task").set_value("t23").run()
    assert texts(shown) == ["question 23"]


def test_without_a_tokenizer_a_reply_has_the_text_that_came_with_it(url: str) -> None:
    shown = page(url)
    assert "answer 3" in [code.value for code in shown.code]
    assert "--tokenizer" in shown.sidebar.caption[0].value


def test_an_unknown_table_is_told(url: str) -> None:
    [error] = page(url, "c").error
    assert "no table 'c'" in error.value and "b" in error.value


def test_what_the_command_wants(tmp_path: Path) -> None:
    run = CliRunner().invoke
    assert "--config" in str(run(app, ["view"]).exception)
    missing = run(app, ["view", "--url", str(tmp_path / "none.db"), "--table", "b"])
    assert "no database" in str(missing.exception)


def draw_table(url: str, table: str, schema: str = "") -> None:
    from trinity.perf.viewer import main

    main(["--url", url, "--table", table, "--schema", schema])


def table_page(*args: str) -> AppTest:
    shown = AppTest.from_function(draw_table, args=args, default_timeout=300).run()
    assert not shown.exception
    return shown


def test_data_sets_and_tasks_are_shown_row_by_row(url: str) -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    pair = {"prompt": "which?", "chosen": "this", "rejected": "that", "weight": 2}
    write_tasks(
        url, "data", [{"messages": turns}, pair, *({"question": f"q {n}"} for n in range(9))]
    )
    shown = table_page(url, "data")
    assert shown.title[0].value == "Rows of data"
    assert [code.value for code in shown.code][:6] == ["hi", "ho", "which?", "this", "that", "2"]
    told = [caption.value for caption in shown.caption]
    assert told[:4] == ["11 rows", "messages: user", "messages: assistant", "prompt"]
    shown.number_input(key="page").set_value(2).run()
    assert [code.value for code in shown.code] == ["q 8"]
    assert table_page(url, "data", "sft").title[0].value == "Rows of data"


def test_a_schema_that_is_not_that_of_the_table_is_told(url: str) -> None:
    write_tasks(url, "data", [{"question": "q"}])
    [error] = table_page(url, "data", "experience").error
    assert "'data' holds raw rows" in error.value
    [error] = table_page(url, "b", "task").error
    assert "'b' holds experiences" in error.value
    assert texts(table_page(url, "b", "experience"))[0] == "question 0"


def test_an_unknown_schema_is_told(url: str) -> None:
    said = CliRunner().invoke(app, ["view", "--url", url, "--table", "b", "--schema", "rlhf"])
    assert "may be experience, sft, dpo, task" in str(said.exception)


def test_tasks_of_a_run_are_found_in_its_file(tmp_path: Path) -> None:
    taskset = {"name": "t", "path": "sqlite:////data/tasks.db", "storage_type": "sql"}
    edits = {"buffer.explorer_input.taskset": taskset}
    found = _tasks_of(write(tmp_path, with_edits(edits)))
    assert found == {"url": "sqlite:////data/tasks.db", "table": "t"}
    with pytest.raises(UsageError, match="in a database"):
        _tasks_of(write(tmp_path, BASE, "other.yaml"))
