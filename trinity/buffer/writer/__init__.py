"""`WRITER`: what a buffer's `storage_type` names, on the side where experiences go in.

An entry is called with the section of the config and the storage that readers and writers share
(None: there is none), and gives a `BufferWriter`.
"""

from collections.abc import Callable

from trinity.buffer.writer.base import BufferWriter
from trinity.common.config.buffer import ExperienceBufferConfig
from trinity.utils.registry import Registry

WRITER: Registry[Callable[[ExperienceBufferConfig, object | None], BufferWriter]] = Registry(
    "buffer writer",
    {
        "file": "trinity.buffer.factory.file_writer",
        "queue": "trinity.buffer.factory.storage_writer",
        "sql": "trinity.buffer.factory.storage_writer",
    },
)

__all__ = ["WRITER", "BufferWriter"]
