"""What the buffers of a stage are told of its configuration."""

import asyncio
import json
from pathlib import Path

import pytest

from tests.buffer.samples import experience
from tests.common.models.toy import model_folder
from trinity.algorithm.sample_strategy.mix import MixSampleStrategy
from trinity.buffer.operators import ExperienceOperator
from trinity.buffer.operators.base import Processed
from trinity.buffer.reader import READER, ReaderSettings
from trinity.buffer.rows import DataError
from trinity.buffer.schema.experience import to_row
from trinity.common.config import Config
from trinity.common.config.arithmetic import EXPERT_DATA_RATIO
from trinity.common.config.buffer import ExperienceBufferConfig
from trinity.common.errors import DeadlineError
from trinity.common.experience import Experience
from trinity.launcher.buffers import Buffers, open_buffers
from trinity.launcher.build_explorer import _settings as explorer_settings
from trinity.launcher.plan import RunPlan, make_plan


class Told:
    """A plugin's reader that keeps what it was told."""

    def __init__(self, config: ExperienceBufferConfig, settings: ReaderSettings) -> None:
        self.settings = settings


READER.register_module("test_told")(Told)


class Waits(ExperienceOperator):
    """Never ends."""

    async def process(self, exps: list[Experience]) -> Processed:
        await asyncio.Event().wait()
        raise AssertionError


async def test_an_operator_may_take_as_long_as_a_sync(tmp_path: Path) -> None:
    pipeline = {"operators": [{"name": f"{__name__}.Waits"}], "save_input": False}
    found = opened(
        tmp_path,
        algorithm={"algorithm_type": "grpo", "repeat_times": 2},
        buffer={"batch_size": 4, "total_steps": 5},
        data_processor={"experience_pipeline": pipeline},
        synchronizer={"sync_timeout": 0.2},
    )
    assert found.pipeline is not None
    with pytest.raises(DeadlineError, match="the operator Waits"):
        async with asyncio.timeout(60):
            await found.pipeline.process([experience()])


def opened(root: Path, **sections: object) -> Buffers:
    return open_buffers(plan_of(root, **sections), lambda text: None)


def plan_of(root: Path, **sections: object) -> RunPlan:
    config = {
        "checkpoint_root_dir": str(root / "jobs"),
        "model": {"model_path": model_folder(root / "model"), "max_model_len": 64},
        "explorer": {"rollout_model": {"engine_type": "torch"}},
        **sections,
    }
    return make_plan(Config.model_validate(config), found_gpus=0)


def test_a_data_set_has_the_tokenizer_code_that_the_model_may_run(tmp_path: Path) -> None:
    told = {"storage_type": "test_told", "path": "x"}
    for may_run in (True, False):
        found = opened(
            tmp_path / str(may_run),
            mode="train",
            algorithm={"algorithm_type": "sft"},
            buffer={"total_steps": 1, "trainer_input": {"experience_buffer": told}},
            trainer={"trust_remote_code": may_run},
        )
        assert found.reader.settings.trust_remote_code is may_run


async def test_a_further_input_is_read_once_however_long_the_run(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(to_row(experience(0, run))) + "\n" for run in range(3)))
    further = {"storage_type": "file", "path": str(path), "schema_type": "experience"}
    found = opened(
        tmp_path,
        algorithm={"algorithm_type": "grpo", "repeat_times": 2},
        buffer={"batch_size": 4, "total_steps": 5},
        data_processor={"experience_pipeline": {"inputs": {"old": further}}},
    )
    await found.prepare()
    assert found.pipeline is not None
    metrics = await found.pipeline.process([])
    assert metrics["experience_pipeline/input/old"] == 3
    assert "experience_pipeline/input/old" not in await found.pipeline.process([])
    await found.close()


def test_data_that_do_not_fill_a_step_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "response": "b"}\n' * 3)
    taskset = {"path": str(path), "default_workflow_type": "simple_workflow"}
    grpo = {"algorithm": {"algorithm_type": "grpo", "repeat_times": 2}}
    buffer = {"batch_size": 4, "explorer_input": {"taskset": taskset}}
    with pytest.raises(DataError, match=r"1 epoch of 3 tasks .* 4 \(buffer.batch_size"):
        opened(tmp_path / "tasks", buffer=buffer, **grpo)
    assert opened(tmp_path / "more", buffer={**buffer, "total_epochs": 2}, **grpo).tasks is not None
    answers = {"path": str(path), "format": {"prompt_type": "plaintext"}}
    buffer = {"train_batch_size": 8, "trainer_input": {"experience_buffer": answers}}
    sft = {"mode": "train", "algorithm": {"algorithm_type": "sft"}}
    with pytest.raises(DataError, match=r"of 3 rows .* 8 \(buffer.train_batch_size"):
        opened(tmp_path / "rows", buffer=buffer, **sft)
    assert opened(tmp_path / "on", buffer={**buffer, "total_steps": 1}, **sft).reader is not None


def test_expert_rows_of_a_step_are_not_waited_for_from_the_explorer(tmp_path: Path) -> None:
    """With `mix` an explorer step that fills a batch's rollouts is one training step."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "response": "b"}\n' * 40)
    answers = {"path": str(path), "format": {"prompt_type": "plaintext"}}
    for args, rows in (({}, 32), ({"expert_data_ratio": 0.2}, 20)):
        plan = plan_of(
            tmp_path / str(rows),
            algorithm={"algorithm_type": "mix", "repeat_times": 4, "sample_strategy_args": args},
            buffer={
                "batch_size": 4,
                "train_batch_size": rows,
                "explorer_input": {
                    "taskset": {"path": str(path), "default_workflow_type": "simple_workflow"}
                },
                "trainer_input": {"auxiliary_buffers": {"sft_dataset": answers}},
            },
        )
        assert plan.schedule.trainer_steps == 1
        assert plan.schedule.version_due(7) == 7
        assert open_buffers(plan, lambda text: None).total_train_steps(plan.config) == 10


def test_steps_are_counted_of_tasksets_with_other_numbers_of_samples(tmp_path: Path) -> None:
    tasksets = []
    for size, repeats in ((10, 4), (30, 8)):
        path = tmp_path / f"{size}.jsonl"
        path.write_text('{"prompt": "a"}\n' * size)
        tasksets.append(
            {
                "path": str(path),
                "repeat_times": repeats,
                "default_workflow_type": "simple_workflow",
            }
        )
    buffer = {"batch_size": 4, "train_batch_size": 28, "explorer_input": {"tasksets": tasksets}}
    plan = plan_of(tmp_path, buffer=buffer)
    found = open_buffers(plan, lambda text: None)
    assert found.total_train_steps(plan.config) == (10 * 4 + 30 * 8) // 28


def test_an_explorer_waits_for_no_trainer_where_it_writes_a_file_to_look_at(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"prompt": "a"}\n' * 8)

    def due(kind: str) -> tuple[int | None, bool]:
        where = {"name": "seen", "storage_type": kind, "path": str(tmp_path / "seen")}
        taskset = {"path": str(tasks), "default_workflow_type": "simple_workflow"}
        buffer = {
            "total_steps": 4,
            "explorer_input": {"taskset": taskset},
            "trainer_input": {"experience_buffer": where},
        }
        root = tmp_path / kind
        grpo = {"algorithm_type": "grpo", "repeat_times": 2}
        plan = plan_of(root, mode="explore", algorithm=grpo, buffer=buffer)
        return plan.schedule.version_due(3), explorer_settings(plan).has_trainer

    assert due("queue") == (3, True)
    assert due("file") == (None, False)


def test_the_share_of_expert_rows_has_one_default() -> None:
    assert MixSampleStrategy.default_args()["expert_data_ratio"] == EXPERT_DATA_RATIO
