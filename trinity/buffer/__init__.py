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
