"""RunPlan -> the buffers of a stage: tasks, experiences between explorer and trainer, data sets."""

import json
import logging
import operator
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, cast

from trinity.algorithm import ADVANTAGE_FN
from trinity.buffer import (
    ExperiencePipeline,
    TaskScheduler,
    get_buffer_reader,
    get_buffer_writer,
    make_storage,
    open_tasksets,
    read_all,
)
from trinity.buffer.data_set import is_data_set
from trinity.buffer.factory import make_journal
from trinity.buffer.first_step import refuse_few_rows, refuse_few_tasks
from trinity.buffer.operators import create_operators
from trinity.buffer.reader.dataset import DatasetReader
from trinity.buffer.reader.queue import QueueReader
from trinity.buffer.storage.queue import QueueStorage
from trinity.buffer.writer.record import RecordWriter
from trinity.checkpoint.atomic import Content
from trinity.common.config import Config, ExperienceBufferConfig
from trinity.common.config.arithmetic import rollouts_per_step
from trinity.common.config.data_processor import OperatorConfig
from trinity.common.constants import Mode, StorageType, SyncStyle
from trinity.explorer.explorer import EvalTaskset
from trinity.launcher.job import ResumePoint
from trinity.launcher.plan import RunPlan
from trinity.utils import actor
from trinity.utils.log import get_logger

_STATE_FILE = "buffer_state.json"
_UNREAD_FILE = "unread_{index}.trxp"


@dataclass
class Buffers:
    """What tasks and experiences wait in. ``prepare`` -> used by explorer and trainer -> ``close``.

    Args:
        tasks: Training tasks, if there is an explorer that trains.
        evals: Evaluation tasks.
        pipeline: Where the explorer writes, if there is one.
        storage: Between pipeline and reader: a plain object in one command, a stand-in if explorer
            and trainer run in two.
        reader: Where the trainer reads, if there is one.
        auxiliary: Readers of further data sets by name.
    """

    tasks: TaskScheduler | None = None
    evals: list[EvalTaskset] = field(default_factory=list)
    pipeline: ExperiencePipeline | None = None
    storage: Any = None
    reader: Any = None
    auxiliary: dict[str, Any] = field(default_factory=dict)

    async def prepare(self) -> None:
        """Open the storage, and take part in it as a writer."""
        if self.storage is not None:
            await self.storage.prepare()
        if self.pipeline is not None:
            await self.pipeline.prepare()

    async def stop_writing(self) -> None:
        """Nothing more will come; readers get what is left."""
        if self.pipeline is not None:
            await self.pipeline.close()

    async def stop_reading(self) -> None:
        """Nothing more will be read: who writes need not wait for room."""
        if self._holds_storage():
            await self.storage.stop_reading()

    async def close(self) -> None:
        """Close pipeline and storage; what waits stays where the storage keeps it."""
        await self.stop_writing()
        if self.storage is not None:
            await self.storage.close()

    def snapshot(self) -> dict[str, Content]:
        """Files of a checkpoint with which unread experiences come back."""
        if not self._holds_storage():
            return {}
        state, unread = self.storage.snapshot()
        files: dict[str, Content] = {}
        if unread is not None:
            state["num_unread"] = len(unread)
            files = {_UNREAD_FILE.format(index=i): write for i, write in enumerate(unread)}
        return {_STATE_FILE: json.dumps(state), **files}

    def restore(self, resume: ResumePoint) -> None:
        """Put the storage back to where it stood at a checkpoint."""
        data = resume.file(_STATE_FILE)
        if data is None or not self._holds_storage():
            return
        state = json.loads(data)
        if "num_unread" in state:
            names = [_UNREAD_FILE.format(index=i) for i in range(state.pop("num_unread"))]
            state["unread"] = [resume.file(name) for name in names]
        self.storage.load_state_dict(state)

    def _holds_storage(self) -> bool:
        """Whether the storage is an object of this process, and not a stand-in for one."""
        return getattr(self.storage, "is_local", None) is True

    def total_explore_steps(self, config: Config) -> int | None:
        """Steps of the explorer, if the tasks say."""
        return self.tasks.total_steps if self.tasks is not None else None

    def total_train_steps(self, config: Config) -> int | None:
        """Steps of the trainer, as far as it can be told before the run."""
        if config.trainer.total_steps is not None:
            return config.trainer.total_steps
        size = config.buffer.train_batch_size
        if self.tasks is None:
            total = getattr(self.reader, "total", None)
            return total // size if total is not None and size else None
        tasks = self.tasks.total_steps * config.buffer.batch_size
        return int(tasks * self._samples_of_a_task(config)) // (rollouts_per_step(config) or size)

    def _samples_of_a_task(self, config: Config) -> Fraction:
        """On average: tasksets may say other numbers, and are mixed by size."""
        assert self.tasks is not None
        sizes = list(map(len, self.tasks.tasksets))
        repeats = [taskset.repeat_times or 1 for taskset in config.buffer.explorer_input.tasksets]
        return Fraction(sum(map(operator.mul, sizes, repeats)), sum(sizes))


def open_buffers(plan: RunPlan, say: Callable[[str], None]) -> Buffers:
    """The buffers of a stage; data sets are read here, storages open in ``prepare``.

    Raises:
        DataError: A data set can't be used.
    """
    config = plan.config
    buffers = Buffers()
    if config.mode.explores:
        _open_tasks(buffers, config)
    output = config.buffer.trainer_input.experience_buffer
    if config.mode is Mode.BENCH or output is None:
        return buffers
    if output.storage_type in (StorageType.QUEUE, StorageType.SQL) and not is_data_set(output):
        buffers.storage = _storage(plan, output)
    if config.mode.explores:
        buffers.pipeline = _pipeline(config, buffers.storage, output)
    if config.mode.trains:
        steps = config.trainer.total_steps or config.buffer.total_steps
        buffers.reader = _reader(config, output, buffers.storage, steps)
        auxiliary = config.buffer.trainer_input.auxiliary_buffers
        buffers.auxiliary = {
            name: _reader(config, buffer, None, steps) for name, buffer in auxiliary.items()
        }
    _refuse_no_step(buffers, config)
    return buffers


def _refuse_no_step(buffers: Buffers, config: Config) -> None:
    """`DataError` if the data do not fill a single step."""
    if buffers.tasks is not None:
        refuse_few_tasks(config, sum(map(len, buffers.tasks.tasksets)))
    elif isinstance(buffers.reader, DatasetReader):
        refuse_few_rows(config, len(buffers.reader))


def _open_tasks(buffers: Buffers, config: Config) -> None:
    tasks = config.buffer.explorer_input
    if config.mode is not Mode.BENCH and tasks.tasksets:
        buffers.tasks = TaskScheduler(
            open_tasksets(tasks.tasksets),
            config.buffer.batch_size,
            total_steps=config.buffer.total_steps,
            total_epochs=config.buffer.total_epochs,
        )
    buffers.evals = [
        EvalTaskset(taskset.name, read_all(taskset, index))
        for index, taskset in enumerate(tasks.eval_tasksets)
    ]


def _storage(plan: RunPlan, output: ExperienceBufferConfig) -> object:
    """The storage itself where one command does both sides, else a named process for it."""
    config = plan.config
    is_paced = config.mode.pairs and config.synchronizer.sync_style is SyncStyle.FIXED
    storage = make_storage(output, owner=f"{plan.job.path}:{config.mode}", is_paced=is_paced)
    if config.mode.pairs or not isinstance(storage, QueueStorage):
        return storage
    return actor.spawn(
        QueueStorage,
        output.name or "experience_buffer",
        capacity=output.capacity,
        journal=make_journal(output),
        replay=output.replay_buffer,
        name=f"queue-{output.name}",
        namespace=plan.namespace,
        is_detached=True,
    )


def _pipeline(
    config: Config, storage: object, output: ExperienceBufferConfig
) -> ExperiencePipeline:
    settings = config.data_processor.experience_pipeline
    operators: list[Any] = list(create_operators(_with_service(config, settings.operators)))
    advantage = _group_advantage(config)
    if advantage is not None:
        operators.append(advantage)
    input_log = None
    if settings.save_input and settings.input_save_path:
        kind = (
            StorageType.FILE
            if settings.input_save_path.endswith((".json", ".jsonl"))
            else StorageType.SQL
        )
        input_log = get_buffer_writer(
            ExperienceBufferConfig(
                name="pipeline_input", storage_type=kind, path=settings.input_save_path
            )
        )
    inputs = {name: _further_input(config, buffer) for name, buffer in settings.inputs.items()}
    logger = get_logger(f"{config.explorer.name}_experience_pipeline")
    writer = get_buffer_writer(output, storage)
    record = _record(config, output, logger)
    limit_s = config.synchronizer.sync_timeout
    return ExperiencePipeline(operators, writer, input_log, inputs, logger, record, limit_s)


def _record(
    config: Config, output: ExperienceBufferConfig, logger: logging.Logger
) -> RecordWriter | None:
    """The readable copy of what goes into a queue that is in memory only."""
    if output.storage_type is not StorageType.QUEUE or output.path:
        return None
    path = os.path.join(config.checkpoint_job_dir, "buffer", f"{output.name}.jsonl")
    if path == config.data_processor.experience_pipeline.input_save_path:
        return None
    return RecordWriter(path, logger)


def _with_service(config: Config, operators: Sequence[OperatorConfig]) -> list[OperatorConfig]:
    """The operators; those of Data-Juicer know where its service is."""
    service = config.service.data_juicer
    if service is None:
        return list(operators)
    known = {"service_config": service.model_dump()}
    return [
        op.model_copy(update={"args": {**known, **op.args}}) if op.name == "data_juicer" else op
        for op in operators
    ]


def _further_input(config: Config, buffer: ExperienceBufferConfig) -> Any:
    """A reader that never waits; its storage is opened when it is first asked."""
    is_database = "://" in (buffer.path or "")
    kind = buffer.storage_type or (StorageType.SQL if is_database else StorageType.FILE)
    buffer = buffer.model_copy(update={"storage_type": kind})
    if kind not in (StorageType.QUEUE, StorageType.SQL):
        return _reader(config, buffer)
    storage = make_storage(buffer)
    return QueueReader(cast(QueueStorage, storage), timeout_s=0.0, owns_storage=True)


def _group_advantage(config: Config) -> object | None:
    """The advantage function, if it is one that works on groups of finished experiences."""
    name = config.algorithm.advantage_fn
    if not name or name == "none":
        return None
    advantage_class = ADVANTAGE_FN.get(name)
    if advantage_class.compute_in_trainer():
        return None
    return advantage_class(**(config.algorithm.advantage_fn_args or {}))


def _reader(
    config: Config,
    buffer: ExperienceBufferConfig,
    storage: object = None,
    total_steps: int | None = None,
) -> Any:
    return get_buffer_reader(
        buffer,
        storage,
        tokenizer_path=config.model.model_path,
        batch_size=config.buffer.train_batch_size,
        total_steps=total_steps,
        max_tokens=config.model.max_model_len,
        trust_remote_code=config.trainer.trust_remote_code,
    )
