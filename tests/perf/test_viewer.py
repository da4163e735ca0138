"""The page of experiences, drawn without a browser."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("streamlit")

from streamlit.testing.v1 import AppTest

from trinity.cli.launcher import app
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
    shown = AppTest.from_function(draw, args=(url, table), default_timeout=60).run()
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


def test_an_unknown_table_is_told(url: str) -> None:
    [error] = page(url, "c").error
    assert "no table 'c'" in error.value and "b" in error.value


def test_what_the_command_wants(tmp_path: Path) -> None:
    run = CliRunner().invoke
    assert "--config" in str(run(app, ["view"]).exception)
    missing = run(app, ["view", "--url", str(tmp_path / "none.db"), "--table", "b"])
    assert "no database" in str(missing.exception)
