"""`READER`: what a buffer's `storage_type` names, on the side where experiences come out.

An entry is called with the section of the config and `ReaderSettings`, and gives a `BufferReader`.
"""

from collections.abc import Callable

from trinity.buffer.reader.base import BufferReader, ReaderSettings
from trinity.common.config.buffer import ExperienceBufferConfig
from trinity.utils.registry import Registry

READER: Registry[Callable[[ExperienceBufferConfig, ReaderSettings], BufferReader]] = Registry(
    "buffer reader",
    {
        "file": "trinity.buffer.factory.dataset_reader",
        "queue": "trinity.buffer.factory.storage_reader",
        "sql": "trinity.buffer.factory.storage_reader",
    },
)

__all__ = ["READER", "BufferReader", "ReaderSettings"]
