"""How weights travel, against the mode and the evals."""

from tests.common.config.wrong.case import Wrong

CASES = [
    Wrong(
        "NCCL with one side",
        {"mode": "explore", "synchronizer.sync_method": "nccl"},
        "synchronizer.sync_method",
        "`mode: both`",
        {"mode": "both"},
    ),
    Wrong(
        "two intervals",
        {"synchronizer": {"explorer_sync_interval": 2, "trainer_sync_interval": 4}},
        "synchronizer.trainer_sync_interval",
        "`sync_interval`",
        {"synchronizer": {"sync_interval": 2}},
    ),
    Wrong(
        "over-rollout in lock-step",
        {"explorer.over_rollout": {"ratio": 0.2}},
        "explorer.over_rollout.ratio",
        "explorer_driven",
        {"synchronizer.sync_style": "explorer_driven"},
    ),
    Wrong(
        "eval while weights change",
        {
            "synchronizer.sync_style": "fully_async",
            "buffer.explorer_input.eval_tasksets": [{"path": "/e"}],
        },
        "synchronizer.sync_style",
        "`eval_tasksets`",
        {"buffer.explorer_input.eval_tasksets": []},
    ),
]
