"""A run that was stopped or killed goes on as if nothing had been."""

import json
import re
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch

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
    folder = job / f"global_step_{step}" / "actor"
    files = ("model", "optim", "extra_state")
    return {
        name: torch.load(folder / f"{name}_world_size_1_rank_0.pt", weights_only=True)
        for name in files
    }


def differences(left: object, right: object, path: str = "") -> list[str]:
    """Where two nested states differ in a bit."""
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
    assert_same_end(resumed, finished, first_step=3)
    assert len(resumed.summary["stages"][0]["rewards"]) == 2


def test_a_killed_run_goes_on_bitwise_the_same(
    finished: Command, toy: Toy, start: Start, tmp_path: Path
) -> None:
    config = toy.config(
        tmp_path,
        buffer__total_steps=4,
        trainer__save_interval=1,
        buffer__explorer_input__taskset={"default_reward_fn_type": "toy_reward"},
    )
    killed = start(config)
    killed.wait_for(lambda: "Checkpoint of step 1 is" in killed.log("trainer"), "a checkpoint")
    killed.process.kill()
    assert killed.wait() == -9
    assert killed.remaining(grace_s=15) == []
    resumed = start(config).succeed()
    step = int(resumed.screen.partition("resumed at step ")[2].split()[0])
    assert_same_end(resumed, finished, first_step=step + 1)


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
