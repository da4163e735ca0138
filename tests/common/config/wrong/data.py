"""Sets of tasks and buffers of experience."""

from tests.common.config.files import DROP
from tests.common.config.wrong.case import EXPERIENCES, TASKSET, Wrong, at

CASES = [
    Wrong(
        "experiences that are to go to two places",
        {
            EXPERIENCES: {"capacity": 64},
            "data_processor.experience_pipeline": {"output": {"path": "/data/out.db"}},
        },
        "data_processor.experience_pipeline.output",
        "Remove one of the two",
        {"data_processor.experience_pipeline": {}},
    ),
    Wrong(
        "taskset twice",
        {"buffer.explorer_input.tasksets": [{"path": "/b"}]},
        TASKSET,
        "`tasksets`",
        {TASKSET: DROP, "buffer.explorer_input.tasksets": [{"path": "/a"}, {"path": "/b"}]},
    ),
    Wrong(
        "no tasks",
        {"buffer.explorer_input": {}},
        TASKSET,
        "`taskset:`",
        {TASKSET: {"path": "/data"}},
    ),
    at("taskset without a path", f"{TASKSET}.path", DROP, "`path: ...`", "/data"),
    Wrong(
        "two sets of one name",
        {"buffer.explorer_input.eval_tasksets": [{"name": "train", "path": "/e"}]},
        "buffer.explorer_input.eval_tasksets.0.name",
        "another name",
        {"buffer.explorer_input.eval_tasksets.0.name": "eval"},
    ),
    Wrong(
        "bench without tasks",
        {"mode": "bench"},
        "buffer.explorer_input.eval_tasksets",
        "`eval_tasksets:`",
        {"buffer.explorer_input.eval_tasksets": [{"path": "/e"}]},
    ),
    Wrong(
        "queue smaller than a step",
        {EXPERIENCES: {"capacity": 8}},
        f"{EXPERIENCES}.capacity",
        "64",
        {f"{EXPERIENCES}.capacity": 64},
    ),
    Wrong(
        "file read while written",
        {EXPERIENCES: {"storage_type": "file", "path": "/x"}},
        f"{EXPERIENCES}.storage_type",
        "`queue`",
        {f"{EXPERIENCES}.storage_type": "queue"},
    ),
    Wrong(
        "two buffers of one name",
        {
            EXPERIENCES: {"name": "rows"},
            "buffer.trainer_input.auxiliary_buffers": {"a": {"name": "rows", "path": "/d"}},
        },
        "buffer.trainer_input.auxiliary_buffers.a.name",
        "another name",
        {"buffer.trainer_input.auxiliary_buffers.a.name": "more"},
    ),
]
