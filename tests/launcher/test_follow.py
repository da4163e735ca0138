from pathlib import Path

from typer.testing import CliRunner

from trinity.cli.launcher import app
from trinity.launcher.follow import Follower, Line, is_wanted, saying, search


def texts(follower: Follower) -> list[str]:
    return [f"{line.source}: {line.text}" for line in follower.read()]


def test_new_lines_come_once_and_whole(tmp_path: Path) -> None:
    log = tmp_path / "explorer.log"
    log.write_text("INFO old\nINFO newer\n")
    follower = Follower(tmp_path, last=1)
    assert texts(follower) == ["explorer: INFO newer"]
    with log.open("a") as stream:
        stream.write("INFO one\nINFO hal")
    assert texts(follower) == ["explorer: INFO one"]
    with log.open("a") as stream:
        stream.write("f\n")
    (tmp_path / "10.0.0.1").mkdir()
    (tmp_path / "10.0.0.1" / "engine.log").write_text("INFO from another node\n")
    assert texts(follower) == [
        "10.0.0.1/engine: INFO from another node",
        "explorer: INFO half",
    ]
    log.write_text("INFO anew\n")  # rotated
    assert texts(follower) == ["explorer: INFO anew"]


def test_a_file_that_goes_away_meanwhile_is_passed_over(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.log").write_text(f"INFO of {name}\n")
    lines = Follower(tmp_path, last=None).read()
    assert next(lines).text == "INFO of a"
    (tmp_path / "b.log").unlink()
    assert [line.text for line in lines] == ["INFO of c"]


def test_lines_are_said_while_a_block_lasts(tmp_path: Path) -> None:
    (tmp_path / "explorer.log").write_text("INFO of an earlier run\n")
    said: list[str] = []
    with saying([tmp_path], said.append):
        (tmp_path / "trainer.log").write_text("INFO step 1\nDEBUG detail\n")
    assert said == ["trainer: INFO step 1", "trainer: DEBUG detail"]
    (tmp_path / "trainer.log").write_text("INFO too late\n")
    assert len(said) == 2


def test_level_and_keyword() -> None:
    assert is_wanted(Line("a", "WARNING x"), "INFO")
    assert not is_wanted(Line("a", "DEBUG x"), "INFO")
    assert is_wanted(Line("a", "a library's own line"), "ERROR")
    assert not is_wanted(Line("a", "INFO x"), "INFO", keyword="y")


def test_a_search_shows_what_stands_around(tmp_path: Path) -> None:
    lines = [f"INFO {number}" for number in range(40)]
    (tmp_path / "a.log").write_text("\n".join(lines) + "\n")
    blocks = [[line.text for line in block] for block in search(tmp_path, "INFO (2|4|30)$")]
    assert blocks == [lines[0:10], lines[25:36]]


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "trainer.log").write_text("INFO step 1\nDEBUG detail\n")
    run = CliRunner().invoke
    shown = run(app, ["log", "-d", str(tmp_path), "-n", "5", "--no-follow"])
    assert shown.output == "trainer: INFO step 1\n"
    assert "Either --config or --log-dir" in str(run(app, ["log"]).exception)
    assert "no folder" in str(run(app, ["log", "-d", str(tmp_path / "none")]).exception)
