"""Doubtful settings are told, and only those."""

import json

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
    ({"mode": "explore", "model.temperature": 0}, "teach nothing"),
    ({"model.top_p": 0.9}, "(top_p 0.9)"),
    ({"model.top_p": 0.9, "model.top_k": 20}, "top_p 0.9 and top_k 20"),
    ({"explorer.rollout_model.top_p": 0.9}, "(top_p 0.9)"),
    ({"mode": "explore", "model.top_p": 0.9}, "(top_p 0.9)"),
    ({"model.repetition_penalty": 1.1}, "repetition_penalty is 1.1"),
    ({"mode": "explore", "explorer.rollout_model.repetition_penalty": 1.1}, "penalty is 1.1"),
    (
        {"buffer.trainer_input.experience_buffer": {"replay_buffer": {"enable": True}}},
        "reuse_cooldown_time",
    ),
    ({"explorer.eval_interval": 5}, "no eval_tasksets"),
    ({"algorithm.advantage_fn": "ppo"}, "critic"),
    ({"model.logprobs": 3}, "model.logprobs has no effect"),
    ({"buffer.explorer_input.taskset.rollout_args": {"n": 4}}, "taskset.rollout_args.n has no"),
    (
        {"buffer.explorer_input.taskset.workflow_args": {"max_turn": 2}},
        "taskset.workflow_args.max_turn has no effect on math_workflow. It reads: none.",
    ),
    (
        {
            "buffer.explorer_input.taskset.default_workflow_type": "math_hint_workflow",
            "buffer.explorer_input.taskset.workflow_args": {"max_turn": 2},
        },
        "Did you mean max_turns?",
    ),
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


def test_what_a_workflow_reads_is_not_told_of():
    edits = {
        "buffer.explorer_input.taskset.default_workflow_type": "frozen_lake_workflow",
        "buffer.explorer_input.taskset.workflow_args": {"max_turns": 2, "desc": ["SF", "FG"]},
    }
    assert find_advice(Config.model_validate(with_edits(edits))) == []


def test_rows_with_workflows_of_their_own_may_need_any_argument():
    edits = {
        "buffer.explorer_input.taskset.format": {"workflow_key": "workflow"},
        "buffer.explorer_input.taskset.workflow_args": {"max_turn": 2},
    }
    assert find_advice(Config.model_validate(with_edits(edits))) == []


def test_a_sound_file_gets_none():
    assert find_advice(Config.model_validate(with_edits({}))) == []


def model_folder(folder, **config):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 100, **config}))
    return str(folder)


YARN = {"rope_type": "yarn", "factor": 2.0}


@pytest.mark.parametrize(
    ("config", "edits", "says"),
    [
        ({}, {}, "model.max_model_len is 128, but"),
        ({"text_config": {"max_position_embeddings": 127}}, {}, "for up to 127 tokens"),
        ({"max_position_embeddings": 128}, {}, None),
        ({"max_position_embeddings": None}, {}, None),
        ({"rope_scaling": YARN}, {}, None),
        ({"rope_parameters": YARN | {"original_max_position_embeddings": 50}}, {}, "up to 100"),
        ({"rope_parameters": YARN | {"original_max_position_embeddings": 64}}, {}, None),
        ({}, {"model.rope_scaling": YARN}, None),
        ({}, {"model.rope_scaling": YARN | {"factor": 1.2}}, "for up to 120 tokens"),
        ({"text_config": None, "rope_scaling": "none"}, {}, "for up to 100 tokens"),
        ({}, {"model.rope_scaling": YARN | {"factor": "two"}}, "for up to 100 tokens"),
        ({"rope_parameters": {"full": {"rope_type": "default"}}}, {}, "for up to 100 tokens"),
    ],
)
def test_sequences_beyond_what_a_model_is_for_are_told(tmp_path, config, edits, says):
    edits = {"model.model_path": model_folder(tmp_path, **config), **edits}
    found = find_advice(Config.model_validate(with_edits(edits)))
    assert len(found) == (says is not None)
    assert all(says in advice for advice in found)


def test_of_models_beside_the_trained_one_each_is_told_by_its_key(tmp_path):
    judge, other = model_folder(tmp_path / "judge"), model_folder(tmp_path / "other")
    models = [
        {"model_path": judge, "max_model_len": 200, "engine_type": "torch"},
        {"model_path": other, "max_model_len": 200, "engine_type": "openai"},
    ]
    edits = {"explorer.auxiliary_models": models}
    [advice] = find_advice(Config.model_validate(with_edits(edits)))
    assert advice.startswith(f"explorer.auxiliary_models.0.max_model_len is 200, but {judge} is")
    assert "set explorer.auxiliary_models.0.rope_scaling" in advice
