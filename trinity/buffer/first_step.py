"""Whether there are data for one step at all: a run that has less would end at once."""

from collections.abc import Iterator, Sequence

from trinity.buffer.data_set import is_data_set
from trinity.buffer.rows import DataError
from trinity.buffer.rows.count import count_rows
from trinity.common.config import Config
from trinity.common.config.buffer import ExperienceBufferConfig, TasksetConfig
from trinity.common.constants import Mode, StorageType
from trinity.common.errors import Problem
from trinity.utils.words import counted


def refuse_few_tasks(config: Config, count: int) -> None:
    """`DataError` if ``count`` tasks do not fill a step of the explorer."""
    buffer = config.buffer
    if buffer.total_steps is None:
        _refuse_few(count, "task", buffer.total_epochs, buffer.batch_size, "batch_size")


def refuse_few_rows(config: Config, count: int) -> None:
    """`DataError` if a data set of ``count`` rows does not fill a step of the trainer."""
    source = config.buffer.trainer_input.experience_buffer
    if (config.trainer.total_steps or config.buffer.total_steps) is None and source is not None:
        size = config.buffer.train_batch_size
        _refuse_few(count, "row", source.total_epochs or 1, size, "train_batch_size")


def _refuse_few(count: int, what: str, epochs: int, size: int, key: str) -> None:
    if epochs * count < size:
        raise DataError(
            f"{counted(epochs, 'epoch')} of {counted(count, what)} are less than one step of "
            f"{size} (buffer.{key}). Lower it, or set buffer.total_steps to go over them again.",
            key=f"buffer.{key}",
        )


def first_step_problems(config: Config) -> Iterator[Problem]:
    """The same of a (derived) configuration, as far as its data can be counted at once."""
    try:
        if config.mode.explores and config.mode is not Mode.BENCH:
            tasks = _count(_given(config, config.buffer.explorer_input.tasksets))
            if tasks:
                refuse_few_tasks(config, tasks)
        elif config.mode.trains:
            source = config.buffer.trainer_input.experience_buffer
            rows = _count([source]) if source is not None and _is_given(source) else None
            if rows:
                refuse_few_rows(config, rows)
    except DataError as error:
        message, _, fix = str(error).partition(". ")
        yield Problem(error.key, f"{message}.", fix, line=config.source.line(error.key))


def _given(config: Config, tasksets: Sequence[TasksetConfig]) -> Sequence[TasksetConfig]:
    """The tasksets; none if a pipeline makes them first."""
    return tasksets if config.data_processor.task_pipeline is None else ()


def _is_given(source: ExperienceBufferConfig) -> bool:
    """Whether it is there before the run, and not what an explorer writes."""
    return is_data_set(source) and source.schema_type != "experience"


def _count(sources: Sequence[TasksetConfig | ExperienceBufferConfig]) -> int | None:
    """Rows of all; None where one of them does not tell, 0 where there are none."""
    total = 0
    for source in sources:
        kind = source.storage_type or StorageType.FILE
        count = count_rows(source.path or "", source.split, source.subset_name, kind)
        if count is None:
            return None
        total += count
    return total
