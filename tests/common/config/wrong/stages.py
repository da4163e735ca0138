"""Runs of several stages."""

from tests.common.config.wrong.case import Wrong

CASES = [
    Wrong(
        "two stages of one name",
        {"stages": [{"stage_name": "a"}, {"stage_name": "a"}]},
        "stages.1.stage_name",
        "`a_2`",
        {"stages.1.stage_name": "a_2"},
    ),
    Wrong(
        "problem inside a stage",
        {"stages": [{"stage_name": "a", "algorithm": {"repeat_times": 1}}]},
        "stages.0.algorithm.repeat_times",
        "8",
        {"stages.0.algorithm.repeat_times": 8},
    ),
]
