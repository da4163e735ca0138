"""What the explorer's parts are told of a file."""

import pytest

from tests.common.config.files import with_edits
from trinity.common.config import Config, derive
from trinity.launcher.build_explorer import scheduling


@pytest.mark.parametrize(
    ("algorithm", "needed"),
    [
        ({"algorithm_type": "grpo"}, 2),
        ({"algorithm_type": "ppo", "repeat_times": 4}, 1),
        ({"algorithm_type": "on_policy_distill"}, 1),
        ({"algorithm_type": "raft", "repeat_times": 4}, 1),
        ({"algorithm_type": "ppo", "advantage_fn": "grpo", "repeat_times": 4}, 2),
    ],
)
def test_a_lone_sample_is_kept_where_no_group_is_needed(algorithm, needed):
    file = with_edits({f"algorithm.{name}": value for name, value in algorithm.items()})
    config = derive(Config.model_validate(file)).config
    assert scheduling(config).min_group_size == needed
