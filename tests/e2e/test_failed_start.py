"""A run that fails before its parts are there: one sentence on the screen, the rest in its log."""

from pathlib import Path

from tests.e2e.conftest import Start
from tests.e2e.toy import Toy


def test_a_cluster_that_does_not_answer_is_all_that_is_told(
    toy: Toy, start: Start, tmp_path: Path
) -> None:
    run = start(toy.config(tmp_path, cluster__ray_address="127.0.0.1:1"))
    assert run.wait() == 1
    assert run.screen.startswith("No Ray cluster answers at '127.0.0.1:1'")
    assert len(run.screen.splitlines()) == 1
    assert "Traceback" in run.log("launcher")
