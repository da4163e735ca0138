import contextlib
import io
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trinity.utils.log import LOG_DIR_ENV, LOG_LEVEL_ENV, LOG_NODE_IP_ENV, get_logger

LINE = r"INFO \d\d-\d\d \d\d:\d\d:\d\d \[test_log.py:\d+\] "


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (LOG_DIR_ENV, LOG_LEVEL_ENV, LOG_NODE_IP_ENV):
        monkeypatch.delenv(name, raising=False)
    yield
    monkeypatch.undo()
    for name in ("explorer", "trainer"):  # leave no open files to later tests
        get_logger(name)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(LOG_DIR_ENV, str(tmp_path / "log"))
    return tmp_path / "log"


def test_each_part_has_its_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    get_logger("explorer").info("one")
    get_logger("trainer").info("two")
    assert "one" in (folder / "explorer.log").read_text()
    assert "two" in (folder / "trainer.log").read_text()
    assert capsys.readouterr().err == ""


def test_warnings_are_on_the_screen_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    get_logger("explorer").warning("beware")
    assert "beware" in capsys.readouterr().err
    assert "beware" in (folder / "explorer.log").read_text()


def test_a_full_disk_is_told_of_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder.mkdir()
    (folder / "explorer.log").symlink_to("/dev/full")
    for number in range(3):
        get_logger("explorer").info("line %d", number)
    told = capsys.readouterr().err
    assert told.count("explorer.log can't be written to: No space left on device") == 1
    assert len(told.splitlines()) == 1


def test_without_a_folder_all_goes_to_the_screen(capsys: pytest.CaptureFixture[str]) -> None:
    get_logger("explorer").info("hello")
    assert "hello" in capsys.readouterr().err


def test_the_screen_is_the_one_of_the_moment(capsys: pytest.CaptureFixture[str]) -> None:
    logger = get_logger("explorer")
    with contextlib.redirect_stderr(io.StringIO()) as other:
        logger.info("inside")
    logger.info("outside")
    assert "inside" in other.getvalue()
    assert "inside" not in (err := capsys.readouterr().err) and "outside" in err
    assert sys.stderr is not other


@pytest.mark.parametrize(
    ("message", "lines"),
    [("one", ["one"]), ("one\ntwo", ["one", "two"]), ("", [""]), ("\ntwo", ["", "two"])],
)
def test_every_line_bears_the_prefix(folder: Path, message: str, lines: list[str]) -> None:
    get_logger("explorer").info(message)
    written = (folder / "explorer.log").read_text().splitlines()
    prefix = written[0].removesuffix(lines[0])
    assert prefix.startswith("INFO ") and "[test_log.py:" in prefix
    assert written == [prefix + line for line in lines]


def test_tracebacks_bear_the_prefix(folder: Path) -> None:
    try:
        raise ValueError("inner")
    except ValueError:
        get_logger("explorer").exception("it failed")
    written = (folder / "explorer.log").read_text().splitlines()
    assert len(written) > 3
    assert all(line.startswith("ERROR ") and "[test_log.py:" in line for line in written)
    assert written[-1].endswith("ValueError: inner")


def test_a_second_call_adds_no_second_line(folder: Path) -> None:
    get_logger("explorer")
    get_logger("explorer").info("once")
    assert (folder / "explorer.log").read_text().count("once") == 1


def test_a_new_folder_is_followed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = get_logger("explorer")
    monkeypatch.setenv(LOG_DIR_ENV, str(tmp_path / "second"))
    assert get_logger("explorer") is logger
    logger.info("moved")
    assert "moved" in (tmp_path / "second" / "explorer.log").read_text()
    assert (folder / "explorer.log").read_text() == ""


def test_levels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOG_LEVEL_ENV, "warning")
    assert get_logger("explorer").level == logging.WARNING
    assert get_logger("trainer", "debug").level == logging.DEBUG
    assert get_logger("trainer").level == logging.DEBUG


def test_files_by_node(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOG_NODE_IP_ENV, "1")
    get_logger("explorer").info("here")
    [path] = folder.glob("*/explorer.log")
    assert path.parent.name.count(".") == 3
