"""Config sections -> storages, readers and writers."""

import os
from typing import TYPE_CHECKING, Any, cast

from trinity.buffer.data_set import is_data_set, rows_of_data_set
from trinity.buffer.reader import READER, ReaderSettings
from trinity.buffer.reader.dataset import DatasetReader
from trinity.buffer.reader.queue import QueueReader
from trinity.buffer.rows import DataError
from trinity.buffer.rows.check import refuse_missing_columns, usable_rows
from trinity.buffer.schema import FORMATTER
from trinity.buffer.selector import SELECTORS, DataSource
from trinity.buffer.storage.journal import Journal, JsonlJournal
from trinity.buffer.storage.queue import QueueStorage
from trinity.buffer.writer import WRITER, BufferWriter
from trinity.buffer.writer.file import FileWriter
from trinity.buffer.writer.queue import QueueWriter
from trinity.common.config.buffer import ExperienceBufferConfig
from trinity.common.constants import StorageType

if TYPE_CHECKING:
    from trinity.buffer.storage.sql import SQLStorage


def make_storage(
    config: ExperienceBufferConfig, owner: str | None = None, *, is_paced: bool = False
) -> "QueueStorage | SQLStorage":
    """The storage that readers and writers of a `queue` or `sql` buffer share.

    Nothing is opened before its `prepare`.

    Args:
        owner: For `sql`: who this process is, the same after a restart; see `SQLStorage`.
        is_paced: For `queue`: see `QueueStorage`.
    """
    if config.storage_type is StorageType.SQL:
        from trinity.buffer.storage.sql import SQLStorage

        return SQLStorage.from_config(config, owner)
    return QueueStorage(
        config.name or "experience_buffer",
        capacity=config.capacity,
        journal=make_journal(config),
        replay=config.replay_buffer,
        is_paced=is_paced,
    )


def make_journal(config: ExperienceBufferConfig) -> Journal | None:
    """Where a queue keeps its experiences and its ledger: by `path`; None keeps them in memory."""
    if not config.path:
        return None
    if is_json_path(config.path):
        return JsonlJournal(config.path)
    from trinity.buffer.storage.sql_ledger import SQLJournal

    return SQLJournal(
        config.path,
        config.name or "experience_buffer",
        max_retry_times=config.max_retry_times,
        retry_interval_s=config.max_retry_interval,
    )


def get_buffer_reader(
    config: ExperienceBufferConfig, storage: object | None = None, **settings: Any
) -> Any:
    """The reader of a buffer: `await reader.read()`, `state_dict`, `load_state_dict`.

    Args:
        storage, settings: Fields of `ReaderSettings`.

    Raises:
        UnknownNameError: No reader has the name `storage_type`.
    """
    entry = READER.get(config.storage_type or StorageType.QUEUE)
    return entry(config, ReaderSettings(storage, **settings))


def get_buffer_writer(
    config: ExperienceBufferConfig, storage: object | None = None
) -> BufferWriter:
    """The writer of a buffer. For `queue` and `sql` ``storage`` is what the readers read from.

    Without a ``storage`` it opens one of its own while it has work to do.

    Raises:
        UnknownNameError: No writer has the name `storage_type`.
    """
    return WRITER.get(config.storage_type or StorageType.QUEUE)(config, storage)


def storage_reader(
    config: ExperienceBufferConfig, settings: ReaderSettings
) -> QueueReader | DatasetReader:
    """The reader of a `queue` or `sql` buffer; a table of another schema is a data set."""
    if is_data_set(config):
        return dataset_reader(config, settings)
    shared = make_storage(config) if settings.storage is None else settings.storage
    return QueueReader(cast(QueueStorage, shared), settings.batch_size, config.max_read_timeout)


def storage_writer(config: ExperienceBufferConfig, storage: object | None) -> QueueWriter:
    """The writer of a `queue` or `sql` buffer."""
    shared = make_storage(config) if storage is None else storage
    return QueueWriter(cast(QueueStorage, shared), owns_storage=storage is None)


def file_writer(config: ExperienceBufferConfig, storage: object | None) -> FileWriter:
    """The writer of a `file` buffer; its path is a .jsonl file, or the folder of one."""
    if not config.path:
        raise DataError(f"The buffer {config.name!r} has no path. Name its .jsonl file.")
    path, name = config.path, config.name or "experience_buffer"
    return FileWriter(path if is_json_path(path) else os.path.join(path, f"{name}.jsonl"))


def dataset_reader(config: ExperienceBufferConfig, settings: ReaderSettings) -> DatasetReader:
    """The reader of a data set: files, or a table of rows in a database."""
    rows = rows_of_data_set(config)
    kind = FORMATTER.get(config.schema_type or "sft")
    refuse_missing_columns(rows, kind.required_keys(config.format), config.path or "")
    label = (config.name or config.path) if config.enable_progress_bar else None
    rows, _ = usable_rows(
        rows, lambda row: kind.check(row, config.format), config.on_bad_row, label=label
    )
    path, size, steps = settings.tokenizer_path, settings.batch_size, settings.total_steps
    tokenizer = _tokenizer(path, settings.trust_remote_code) if path else None
    return DatasetReader(
        rows,
        kind(config.format, cast(Any, tokenizer), settings.max_tokens),
        SELECTORS.get(config.data_selector.selector_type)(DataSource(rows), config.data_selector),
        name=config.name or "dataset",
        batch_size=size,
        total=len(rows) * (config.total_epochs or 1) if steps is None else size * steps,
        on_bad_row=config.on_bad_row,
    )


def _tokenizer(path: str, trust_remote_code: bool) -> object:
    from trinity.common.models.loading import load_tokenizer

    return load_tokenizer(path, trust_remote_code)


def is_json_path(path: str) -> bool:
    """Whether a path means JSON lines, and not a database."""
    return path.endswith((".json", ".jsonl"))
