"""Buffers that are data sets: rows somebody made before the run, in files or in a database."""

from trinity.buffer.rows import DataError, Rows, open_rows
from trinity.common.config.buffer import ExperienceBufferConfig
from trinity.common.constants import StorageType


def is_data_set(config: ExperienceBufferConfig) -> bool:
    """Whether a buffer is rows to be formatted, and not experiences that somebody writes."""
    is_table = config.storage_type is StorageType.SQL
    is_raw = config.schema_type not in (None, "experience")
    return config.storage_type is StorageType.FILE or (is_table and is_raw)


def rows_of_data_set(config: ExperienceBufferConfig) -> Rows:
    """The raw rows of a data set.

    Raises:
        DataError: They can't be read.
    """
    if not config.path:
        raise DataError(
            "The data set has no path. Give a file, a folder, a database or a hub name."
        )
    return open_rows(
        config.path,
        split=config.split,
        subset=config.subset_name,
        storage_type=StorageType(config.storage_type or StorageType.FILE),
        table=config.name,
        max_retry_times=config.max_retry_times,
        retry_interval_s=config.max_retry_interval,
        shows_progress=config.enable_progress_bar,
    )
