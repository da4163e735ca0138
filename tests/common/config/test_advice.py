"""Doubtful settings are told, and only those."""

import pytest

from tests.common.config.files import with_edits
from trinity.common.config import Config, find_advice

DOUBTFUL = [
    ({"buffer.train_batch_size": 64}, "waits for 2"),
    ({"buffer.train_batch_size": 24}, "no multiple"),
    (
        {"trainer.trainer_config": {"actor": {"ppo_micro_batch_size_per_gpu": 2}}},
        "no effect while trainer.use_dynamic_bsz",
    ),
    ({"trainer.max_token_len_per_gpu": 64}, "may not fit"),
    ({"model.temperature": 0}, "teach nothing"),
    ({"model.top_p": 0.9}, "(top_p 0.9)"),
    ({"model.top_p": 0.9, "model.top_k": 20}, "top_p 0.9 and top_k 20"),
    (
        {"buffer.trainer_input.experience_buffer": {"replay_buffer": {"enable": True}}},
        "reuse_cooldown_time",
    ),
    ({"explorer.eval_interval": 5}, "no eval_tasksets"),
    ({"algorithm.advantage_fn": "ppo"}, "critic"),
    ({"model.logprobs": 3}, "model.logprobs has no effect"),
    ({"buffer.explorer_input.taskset.rollout_args": {"n": 4}}, "taskset.rollout_args.n has no"),
    (
        {
            "algorithm": {"algorithm_type": "mix", "repeat_times": 2},
            "buffer.train_batch_size": 128,
            "buffer.trainer_input.auxiliary_buffers": {"sft_dataset": {"path": "/data/sft"}},
        },
        "128, 64 of it rollouts",
    ),
]


@pytest.mark.parametrize(("edits", "says"), DOUBTFUL)
def test_a_doubtful_setting_is_told(edits, says):
    [advice] = find_advice(Config.model_validate(with_edits(edits)))
    assert says in advice
    edits = {**edits, "ignore_validator_suggestions": True}
    assert find_advice(Config.model_validate(with_edits(edits))) == []


def test_a_sound_file_gets_none():
    assert find_advice(Config.model_validate(with_edits({}))) == []
