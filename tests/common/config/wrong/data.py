"""Sets of tasks and buffers of experience."""

from tests.common.config.files import DROP
from tests.common.config.wrong.case import EXPERIENCES, TASKSET, Wrong, at

OPERATORS = "data_processor.experience_pipeline.operators"

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
    *(
        Wrong(
            f"a reward with {argument}: {value}",
            {
                f"{TASKSET}.default_reward_fn_type": "math_reward",
                f"{TASKSET}.reward_fn_args": {argument: value},
            },
            f"{TASKSET}.reward_fn_args.{argument}",
            says,
            {f"{TASKSET}.reward_fn_args": {argument: right}},
        )
        for argument, value, says, right in (
            ("format_score_coef", "abc", "Write a number", 1),
            ("timeout_s", "a minute", "Write a number", 60),
            ("on_error", "rase", "Did you mean `raise`?", "raise"),
        )
    ),
    Wrong(
        "an argument that no reward takes",
        {
            f"{TASKSET}.default_reward_fn_type": "math_reward",
            f"{TASKSET}.reward_fn_args": {"format_scor_coef": 1},
        },
        f"{TASKSET}.reward_fn_args.format_scor_coef",
        "Did you mean `format_score_coef`?",
        {f"{TASKSET}.reward_fn_args": {"format_score_coef": 1}},
    ),
    Wrong(
        "how a reward that is no part of trinity is called",
        {
            f"{TASKSET}.default_reward_fn_type": "mine.Reward",
            f"{TASKSET}.reward_fn_args": {"max_retries": "often", "own": "anything"},
        },
        f"{TASKSET}.reward_fn_args.max_retries",
        "digits only",
        {f"{TASKSET}.reward_fn_args.max_retries": 3},
    ),
    *(
        Wrong(
            f"a workflow with {argument}: {value}",
            {
                f"{TASKSET}.default_workflow_type": workflow,
                f"{TASKSET}.workflow_args": {argument: value, "own": "anything"},
            },
            f"{TASKSET}.workflow_args.{argument}",
            says,
            {f"{TASKSET}.workflow_args.{argument}": right},
        )
        for workflow, argument, value, says, right in (
            ("react_workflow", "max_turns", "abc", "digits only", "5"),
            ("sudoku_workflow", "max_turns", None, "digits only", 5.0),
            ("frozen_lake_workflow", "max_turns", 0, "more than 0", 1),
            ("alfworld_workflow", "reflect", "false", "`true` or `false`", False),
            ("react_workflow", "tools", "python", "one item a line", ["python"]),
        )
    ),
    Wrong(
        "operators that take other arguments",
        {OPERATORS: [{"name": "reward_shaping_mapper", "args": {"reward_shaping_configs": 3}}]},
        f"{OPERATORS}.0.args.reward_shaping_configs",
        "one item a line",
        {f"{OPERATORS}.0.args": {"reward_shaping_configs": []}},
    ),
    Wrong(
        "a decay that is no number",
        {f"{EXPERIENCES}.replay_buffer": {"enable": True, "priority_fn_args": {"decay": "slow"}}},
        f"{EXPERIENCES}.replay_buffer.priority_fn_args.decay",
        "Write a number",
        {f"{EXPERIENCES}.replay_buffer.priority_fn_args": {"decay": 2}},
    ),
]
