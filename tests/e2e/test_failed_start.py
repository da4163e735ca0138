"""A run that fails before its parts are there: one sentence on the screen, the rest in its log."""

import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.e2e.conftest import Start
from tests.e2e.toy import Toy
from tests.ray_head import ray_head


def test_a_cluster_that_does_not_answer_is_all_that_is_told(
    toy: Toy, start: Start, tmp_path: Path
) -> None:
    run = start(toy.config(tmp_path, cluster__ray_address="127.0.0.1:1"))
    assert run.wait() == 1
    assert run.screen.startswith("No Ray cluster answers at '127.0.0.1:1'")
    assert len(run.screen.splitlines()) == 1
    assert "Traceback" in run.log("launcher")


def test_an_argument_that_a_method_does_not_take_is_told_by_its_key(
    toy: Toy, start: Start, tmp_path: Path
) -> None:
    config = toy.config(tmp_path, algorithm__policy_loss_fn_args={"clip_rang_low": 0.2})
    run = start(config)
    assert run.wait() == 2
    assert "algorithm.policy_loss_fn_args.clip_rang_low = 0.2" in run.screen
    assert "Did you mean `clip_range_low`?" in run.screen
    assert "Traceback" not in run.screen and run.remaining() == []


@pytest.mark.parametrize("joins", [False, pytest.param(True, marks=pytest.mark.long)])
def test_more_gpus_than_there_are_end_it_at_once_with_a_table(
    toy: Toy, start: Start, tmp_path: Path, joins: bool
) -> None:
    with ray_head(num_cpus=1) if joins else nullcontext("local") as address:
        config = toy.config(
            tmp_path,
            cluster={"ray_address": address, "node_num": 8, "gpu_per_node": 8},
            explorer__rollout_model={"engine_type": "torch", "engine_num": 60},
        )
        start_s = time.monotonic()
        run = start(config)
        assert run.wait() == 2
        assert time.monotonic() - start_s < 400  # Ray itself would wait on
        assert "This run needs 64 GPUs (60 explorer, 0 auxiliary models, 4 trainer)" in run.screen
        assert "needed" in run.screen and "found" in run.screen
        assert "Traceback" not in run.screen and run.remaining() == []
