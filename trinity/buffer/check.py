"""What is wrong with the data a config names, found before anything starts."""

from collections.abc import Callable

from trinity.buffer.data_set import is_data_set, rows_of_data_set
from trinity.buffer.rows import DataError
from trinity.buffer.rows.check import refuse_missing_columns, usable_rows
from trinity.buffer.schema import FORMATTER
from trinity.buffer.schema.task import TaskFormatter
from trinity.buffer.selector import SELECTORS
from trinity.buffer.storage.priority import PRIORITY_FUNC
from trinity.buffer.taskset import rows_of
from trinity.common.config.buffer import ExperienceBufferConfig, TasksetConfig
from trinity.common.errors import Problem
from trinity.utils.registry import Registry, UnknownNameError

_QUICK_ROWS = 1000


def check_taskset(config: TasksetConfig) -> list[Problem]:
    """Problems of a taskset, their keys relative to its section. Reads the first rows only."""

    def check() -> None:
        rows = rows_of(config)
        formatter = TaskFormatter(config)
        keys = formatter.required_keys(config.format)
        refuse_missing_columns(rows, keys, config.path or "")
        usable_rows(rows, formatter.check, config.on_bad_row, _QUICK_ROWS)

    selector = config.data_selector.selector_type
    named = _check_name(SELECTORS, selector, "data_selector.selector_type")
    return [*named, *_problems(check, config)]


def check_experience_buffer(config: ExperienceBufferConfig) -> list[Problem]:
    """Problems of a buffer of experiences, their keys relative to its section."""
    if is_data_set(config) and config.schema_type != "experience":
        selector = config.data_selector.selector_type
        named = _check_name(SELECTORS, selector, "data_selector.selector_type")
        return [*named, *_problems(lambda: _check_dataset(config), config)]
    replay = config.replay_buffer
    if replay.enable:
        return _check_name(PRIORITY_FUNC, replay.priority_fn, "replay_buffer.priority_fn")
    return []


def _check_dataset(config: ExperienceBufferConfig) -> None:
    rows = rows_of_data_set(config)
    kind = FORMATTER.get(config.schema_type or "sft")
    refuse_missing_columns(rows, kind.required_keys(config.format), config.path or "")
    usable_rows(rows, lambda row: kind.check(row, config.format), config.on_bad_row, _QUICK_ROWS)


def _problems(
    check: Callable[[], None], config: TasksetConfig | ExperienceBufferConfig
) -> list[Problem]:
    try:
        check()
    except DataError as error:
        value: object = config
        for part in error.key.split("."):
            value = getattr(value, part, None)
        return [Problem(error.key, str(error), value=value)]
    return []


def _check_name(registry: Registry, name: str, key: str) -> list[Problem]:
    try:
        registry.get(name)
    except (UnknownNameError, ImportError) as error:
        return [Problem(key, str(error), value=name)]
    return []
