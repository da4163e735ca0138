"""Where experience waits. Each name loads its module when it is first used: tasks need no torch."""

from typing import TYPE_CHECKING

from trinity.utils.lazy import lazy_names

if TYPE_CHECKING:
    from trinity.buffer.check import check_experience_buffer, check_taskset
    from trinity.buffer.factory import get_buffer_reader, get_buffer_writer, make_storage
    from trinity.buffer.pipelines.experience import ExperiencePipeline
    from trinity.buffer.task_scheduler import TaskScheduler, open_tasksets, read_all

__all__ = [
    "ExperiencePipeline",
    "TaskScheduler",
    "check_experience_buffer",
    "check_taskset",
    "get_buffer_reader",
    "get_buffer_writer",
    "make_storage",
    "open_tasksets",
    "read_all",
]

__getattr__ = lazy_names(
    __name__,
    {
        "ExperiencePipeline": "pipelines.experience",
        "TaskScheduler": "task_scheduler",
        "check_experience_buffer": "check",
        "check_taskset": "check",
        "get_buffer_reader": "factory",
        "get_buffer_writer": "factory",
        "make_storage": "factory",
        "open_tasksets": "task_scheduler",
        "read_all": "task_scheduler",
    },
)
