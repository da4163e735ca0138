"""A run that was stopped or killed goes on as if nothing had been."""

import json
import re
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.e2e.command import Command
from tests.e2e.conftest import Start
from tests.e2e.test_grpo_run import scalars
from tests.e2e.toy import Toy
from trinity.buffer.storage.journal import JsonlJournal, outcome

OF_THE_PROCESS = (
    "/time/", "/timing_per_token_ms/", "/perf/", "_per_second", "pipeline/buffer/", "/eval/",
)  # fmt: skip
"""Metrics that tell of this process: its times, what it has counted since it began, and what is
evaluated at its start."""


def state_of(job: Path, step: int) -> dict[str, object]:
    """What all ranks saved of actor and critic."""
    folder = job / f"global_step_{step}"
    found = {str(path.relative_to(folder)): _loaded(path) for path in folder.glob("*/*.pt")}
    assert {"model_", "optim_", "extra_"} <= {Path(name).name[:6] for name in found}
    return found


def _loaded(path: Path) -> object:
    return torch.load(path, weights_only=True)


def differences(left: object, right: object, path: str = "") -> list[str]:
    """Where two nested states differ in a bit."""
    if isinstance(left, DTensor) and isinstance(right, DTensor):  # this rank's part
        left, right = left._local_tensor, right._local_tensor
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return [] if torch.equal(left, right) and left.dtype == right.dtype else [path]
    if isinstance(left, dict) and isinstance(right, dict):
        if left.keys() != right.keys():
            return [f"{path}: {left.keys() ^ right.keys()}"]
        return [d for key in left for d in differences(left[key], right[key], f"{path}/{key}")]
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        pairs = enumerate(zip(left, right, strict=True))
        return [d for i, (a, b) in pairs for d in differences(a, b, f"{path}/{i}")]
    return [] if left == right else [f"{path}: {left!r} and {right!r}"]


def assert_same_end(run: Command, unbroken: Command, first_step: int) -> None:
    """Weights, optimizer, random state and the metrics from ``first_step`` on are the same."""
    assert differences(state_of(run.job, 4), state_of(unbroken.job, 4)) == []
    for role in ("trainer", "explorer"):
        own, other = scalars(run.job, role), scalars(unbroken.job, role)
        names = {name for name in other if not any(part in f"/{name}" for part in OF_THE_PROCESS)}
        assert {"actor/grad_norm", "rollout/reward/mean"} & names
        for name in names:
            assert own[name][-(5 - first_step) :] == other[name][first_step - 1 :], name


@pytest.mark.long
def test_a_stopped_run_goes_on_bitwise_the_same(
    finished: Command, toy: Toy, start: Start, tmp_path: Path
) -> None:
    config = toy.config(tmp_path, buffer__total_steps=2, trainer__save_hf_checkpoint="never")
    first = start(config).succeed()
    assert first.summary["stages"][0]["steps"] == 2
    resumed = start(config, "buffer.total_steps=4").succeed()
    assert "resumed at step 2" in resumed.screen
    assert not re.search(r"^step [01]/4", resumed.screen, flags=re.MULTILINE)
    assert_same_end(resumed, finished, first_step=3)
    assert len(resumed.summary["stages"][0]["rewards"]) == 2


def test_a_killed_run_goes_on_bitwise_the_same(
    finished: Command, toy: Toy, start: Start, tmp_path: Path
) -> None:
    config = toy.config(
        tmp_path,
        buffer__total_steps=4,
        trainer__save_interval=1,
        buffer__explorer_input__taskset={
            "reward_fn_args": {"waits_on": "t9 ", "waits_for": str(tmp_path / "go")}  # of step 3
        },
    )
    killed = start(config)
    killed.wait_for(lambda: "Checkpoint of step 1 is" in killed.log("trainer"), "a checkpoint")
    killed.process.kill()
    assert killed.wait() == -9
    assert killed.remaining(grace_s=60) == []
    (tmp_path / "go").touch()
    resumed = start(config).succeed()
    step = int(resumed.screen.partition("resumed at step ")[2].split()[0])
    assert_same_end(resumed, finished, first_step=step + 1)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_run_with_all_that_has_a_state_goes_on_bitwise_the_same(
    toy: Toy, start: Start, tmp_path: Path, ranks: int
) -> None:
    """Critic, adapter, schedules, a penalty that adapts, tasks and mini-batches in random order."""
    rows = {"actor_rollout_ref": {"actor": {"shuffle": True}}}
    settings = {
        "buffer__total_steps": 4,
        "buffer__explorer_input__taskset": {
            "data_selector": {"selector_type": "shuffle"},
            "reward_fn_args": {"seconds": 1.0},  # it must not end before it is killed
        },
        "model__lora_configs": [{"lora_rank": 4, "lora_alpha": 8}],
        "algorithm__algorithm_type": "ppo",
        "algorithm__kl_penalty_fn": "k2",
        "algorithm__kl_penalty_fn_args": {"adaptive": True, "target_kl": 1e-6, "horizon": 100},
        "algorithm__optimizer": {"lr_scheduler_type": "cosine", "lr_warmup_steps_ratio": 0.5},
        "trainer__ppo_epochs": 2,
        "trainer__mini_batch_size": 8,
        "trainer__num_processes": ranks,
        "trainer__save_interval": 1,
        "trainer__save_hf_checkpoint": "never",
        "trainer__trainer_config": rows,
    }
    unbroken = start(toy.config(tmp_path / "unbroken", **settings)).succeed()
    config = toy.config(tmp_path, **settings)
    killed = start(config)
    killed.wait_for(lambda: "Checkpoint of step 1 is" in killed.log("trainer"), "a checkpoint")
    killed.process.kill()
    killed.wait()
    resumed = start(config).succeed()
    step = int(resumed.screen.partition("resumed at step ")[2].split()[0])
    assert_same_end(resumed, unbroken, first_step=step + 1)
    saved = state_of(resumed.job, 4)
    assert len(saved) == 2 * 3 * ranks
    first = scalars(unbroken.job, "trainer")
    assert len(set(first["actor/lr"])) == 4 and first["critic/grad_norm"][-1] > 0


def rows_read(path: Path) -> Counter[tuple[object, ...]]:
    """How often each sample (step, task, run) was read by the run whose ledger this is."""
    lines = path.with_name(path.name + ".ledger").read_text().splitlines()
    [run] = {json.loads(line)["run"] for line in lines}
    journal = JsonlJournal(str(path))
    journal.open(run)
    uses = outcome(journal.events()).uses
    experiences = journal.load(list(uses))
    journal.close()
    ids = [(e.eid.batch, e.eid.task, e.eid.run) for e in experiences]
    return Counter(dict(zip(ids, uses.values(), strict=True)))


def newer_checkpoint(run: Command, last: int) -> int | None:
    """The newest step whose checkpoint the log calls complete, if it is after ``last``."""
    found = re.findall(r"Checkpoint of step (\d+) is", run.log("trainer"))
    newest = max(map(int, found), default=0)
    return newest if newest > last else None


@pytest.mark.long
def test_each_sample_is_read_once_though_the_run_is_killed_twice(
    toy: Toy, start: Start, tmp_path: Path
) -> None:
    """The explorer is ahead of the trainer: a checkpoint has samples that nobody has read."""
    config = toy.config(
        tmp_path,
        buffer__total_steps=8,
        buffer__explorer_input__taskset={"reward_fn_args": {"seconds": 0.5}},
        buffer__trainer_input={
            "experience_buffer": {
                "name": "experiences",
                "storage_type": "queue",
                "path": str(tmp_path / "kept.jsonl"),
            }
        },
        synchronizer__sync_interval=2,
        synchronizer__sync_offset=1,
        trainer__save_interval=1,
    )
    last = 0
    for _ in range(2):
        run = start(config)
        last = run.wait_for(partial(newer_checkpoint, run, last), f"a checkpoint after {last}")
        run.process.kill()
        run.wait()
    start(config).succeed()
    wanted = {(step, task, run) for step in range(1, 9) for task in range(4) for run in range(4)}
    read = rows_read(tmp_path / "kept.jsonl")
    assert set(read) == wanted
    assert set(read.values()) == {1}
