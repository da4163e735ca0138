"""No room for a checkpoint: the older ones stay whole, and the run ends or goes on as told."""

import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.e2e.conftest import Start
from tests.e2e.toy import Toy
from tests.small_disk import mounted
from trinity.checkpoint import layout

_LEFT_BYTES = 100_000  # enough for logs, too little for a checkpoint


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MB."""
    with mounted(tmp_path / "disk", "4m") as folder:
        yield folder


def test_a_disk_without_any_room_leaves_the_cause_on_the_screen(
    toy: Toy, start: Start, tmp_path: Path, small_disk: Path
) -> None:
    config = toy.config(
        tmp_path,
        checkpoint_root_dir=str(small_disk),
        buffer__total_steps=1000,
        data_processor__experience_pipeline={"save_input": True},
    )
    run = start(config)
    run.wait_for_step(1)
    with suppress(OSError), (small_disk / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(b"x" * 4096)
    assert run.wait() == 1
    assert "database or disk is full" in run.last_lines or "No space left" in run.last_lines
    assert "Traceback" not in run.screen and "Logging error" not in run.screen
    assert run.screen.count("launcher.log can't be written to") == 1
    assert run.remaining() == []


def after_error(log: str) -> str:
    return log.rpartition("could not be saved")[2]


@pytest.mark.parametrize(
    ("rule", "ranks"),
    [
        ("stop", 1),
        pytest.param("continue", 1, marks=pytest.mark.long),
        pytest.param("stop", 2, marks=pytest.mark.long),
        pytest.param("continue", 2, marks=pytest.mark.long),
    ],
)
def test_a_full_disk(
    toy: Toy, start: Start, tmp_path: Path, small_disk: Path, rule: str, ranks: int
) -> None:
    config = toy.config(
        tmp_path,
        checkpoint_root_dir=str(small_disk),
        buffer__total_steps=1000,
        trainer__save_interval=1,
        trainer__max_checkpoints_to_keep=1,
        trainer__on_save_error=rule,
        trainer__num_processes=ranks,
        trainer__save_hf_checkpoint="never",
    )
    run = start(config)
    run.wait_for(lambda: "Checkpoint of step 1 is" in run.log("trainer"), "a checkpoint")
    filler = small_disk / "filler"

    def fill() -> None:
        """Take what is free, again and again: a checkpoint that is deleted makes room."""
        free = shutil.disk_usage(small_disk).free
        with filler.open("ab") as file, suppress(OSError):  # the run may be quicker
            file.write(b"x" * max(0, free - _LEFT_BYTES))

    def fails() -> bool:
        fill()
        return "could not be saved" in run.log("trainer") or run.process.poll() is not None

    run.wait_for(fails, "an error")
    if rule == "stop":
        assert run.wait() == 1
        assert "MB are free" in run.last_lines or "No space left" in run.last_lines
    else:
        run.wait_for(lambda: " Step " in after_error(run.log("trainer")), "a step after it")
        filler.unlink()
        run.wait_for(
            lambda: "is complete" in after_error(run.log("trainer")), "a checkpoint after it"
        )
        run.interrupt()
        assert run.wait() == 130
    assert layout.checkpoints(run.job) == [layout.find_latest(run.job).folder]  # the one kept
    assert layout.drop_torn(run.job) == []
    assert run.remaining() == []
