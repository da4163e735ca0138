"""`trinity run --dlc` on two machines of a job: here two commands, each with a Ray node."""

import shutil
import tempfile
from pathlib import Path

import pytest

from tests.e2e.conftest import Start
from tests.e2e.toy import Toy
from tests.ports import free_port


@pytest.mark.long
def test_the_same_command_on_each_machine(toy: Toy, start: Start, tmp_path: Path) -> None:
    port = free_port()
    place = tempfile.mkdtemp(prefix="r", dir="/tmp")  # its path must be short
    job = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RAY_TMPDIR": place,
    }
    commands = [
        start(
            toy.config(
                tmp_path / f"{rank}",
                checkpoint_root_dir=str(tmp_path / "jobs"),
                cluster__ray_address="auto",
            ),
            "--dlc",
            env={**job, "RANK": str(rank)},
        )
        for rank in (1, 0)
    ]
    other, first = commands
    try:
        first.succeed()
        assert f"2 machines are together at 127.0.0.1:{port}." in first.screen
        assert first.summary["stages"][0]["steps"] > 0
        other.succeed()
        assert f"Machine 1 of 2 works for the run at 127.0.0.1:{port}." in other.screen
    finally:
        shutil.rmtree(place, ignore_errors=True)
