"""Open values: what they become, and what of the user's is left alone."""

import pytest

from tests.common.config.files import with_edits
from trinity.common.config import Config, derive, is_set, needs_critic, needs_reference
from trinity.common.config.algorithm_table import ALGORITHMS
from trinity.common.config.derive_model import fill_lengths

INPUT = "buffer.explorer_input"
EXPERIENCES = "buffer.trainer_input.experience_buffer"


def filled(edits=None, env=None):
    return derive(Config.model_validate(with_edits(edits or {})), env=env or {}).config


def why(edits, key):
    notes = derive(Config.model_validate(with_edits(edits))).notes
    return next((note.why for note in notes if note.key == key), None)


def test_an_evaluation_keeps_its_own_number_of_samples():
    sets = [{"path": "/c", "repeat_times": 3}, {"path": "/d"}]
    config = filled({"algorithm.repeat_times": 8, f"{INPUT}.eval_tasksets": sets})
    assert [taskset.repeat_times for taskset in config.buffer.explorer_input.eval_tasksets] == [
        3,
        1,
    ]


def test_further_data_sets_are_gone_through_as_often_as_the_tasks():
    buffers = {"a": {"path": "/a"}, "b": {"path": "/b", "total_epochs": 25}}
    config = filled({"buffer.total_epochs": 5, "buffer.trainer_input.auxiliary_buffers": buffers})
    found = config.buffer.trainer_input.auxiliary_buffers
    assert (found["a"].total_epochs, found["b"].total_epochs) == (5, 25)


def test_paths_and_names():
    config = filled({"project": "p", "group": "g", "checkpoint_root_dir": "/r"})
    assert config.checkpoint_job_dir == "/r/p/g/test"
    assert config.ray_namespace == "p/g/test"
    assert config.log.save_dir == "/r/p/g/test/log"
    assert config.monitor.cache_dir == "/r/p/g/test/monitor"


def test_an_empty_group_is_no_folder():
    assert filled({"checkpoint_root_dir": "/r"}).checkpoint_job_dir == "/r/Trinity-RFT/test"


def test_root_folder_from_the_environment():
    config = filled(env={"TRINITY_CHECKPOINT_ROOT_DIR": "/env"})
    assert config.checkpoint_root_dir == "/env"
    assert filled().checkpoint_root_dir.endswith("/checkpoints")


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_algorithm_defaults(name):
    spec = ALGORITHMS[name]
    algorithm = filled({"algorithm": {"algorithm_type": name}}).algorithm
    assert algorithm.repeat_times == spec.repeat_times
    assert algorithm.policy_loss_fn == spec.policy_loss_fn
    assert algorithm.kl_loss_fn == spec.kl_loss_fn
    assert algorithm.loss_agg_mode == spec.loss_agg_mode


def test_a_users_component_wins():
    own = {"algorithm_type": "grpo", "kl_loss_fn": "none", "policy_loss_fn": "gspo"}
    algorithm = filled({"algorithm": own}).algorithm
    assert (algorithm.kl_loss_fn, algorithm.policy_loss_fn) == ("none", "gspo")
    assert algorithm.loss_agg_mode == "seq-mean-token-mean"


def test_aggregation_named_among_the_arguments_of_the_loss():
    own = {"policy_loss_fn_args": {"loss_agg_mode": "seq-mean-token-sum"}}
    assert filled({"algorithm": own}).algorithm.loss_agg_mode == "seq-mean-token-sum"


def test_critic_and_reference():
    assert needs_critic(filled({"algorithm": {"algorithm_type": "ppo"}}))
    assert needs_critic(filled({"algorithm.advantage_fn": "ppo"}))
    assert not needs_critic(filled())
    assert needs_reference(filled())
    assert not needs_reference(filled({"algorithm.kl_loss_fn": "none"}))
    assert not needs_reference(filled({"algorithm": {"algorithm_type": "dapo"}}))
    dpo = {"algorithm": {"algorithm_type": "dpo"}, "mode": "train"}
    assert needs_reference(filled({**dpo, "algorithm.kl_loss_fn": "none"}))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((None, 100, 50), (150, 100, 50)),
        ((101, None, None), (101, 51, 50)),
        ((100, 30, None), (100, 30, 70)),
        ((100, None, 30), (100, 70, 30)),
        ((100, 100, None), (100, 100, 1)),
        ((None, 30, None), (None, 30, None)),
        ((200, 100, 50), (200, 100, 50)),
    ],
)
def test_lengths(given, expected):
    assert fill_lengths(*given) == expected


def test_batch_of_a_training_step():
    assert filled({"buffer.batch_size": 5}).buffer.train_batch_size == 40
    assert filled({"buffer.train_batch_size": 7}).buffer.train_batch_size == 7
    assert filled({"mode": "train"}).buffer.train_batch_size == 32
    assert why({}, "buffer.train_batch_size") == "batch_size 4 * repeat_times 8"


def test_a_single_taskset_becomes_a_list():
    tasks = filled().buffer.explorer_input
    assert tasks.taskset is None
    [taskset] = tasks.tasksets
    assert (taskset.name, taskset.repeat_times) == ("train", 8)


def test_a_step_has_the_samples_that_its_tasksets_ask_for():
    def step(*own, usual=8):
        tasksets = [{"path": f"/{i}", "repeat_times": count} for i, count in enumerate(own)]
        config = filled({f"{INPUT}.tasksets": tasksets, "algorithm.repeat_times": usual})
        return config.samples_per_step, config.buffer.train_batch_size

    assert step(None) == (4 * 8, 4 * 8)
    assert step(5) == step(5, 5) == (4 * 5, 4 * 8)
    assert step(5, 3) == step(5, None) == (4 * 8, 4 * 8)


def test_taskset_defaults():
    tasks = {
        "tasksets": [{"path": "/a"}, {"path": "/b", "repeat_times": 3}],
        "eval_tasksets": [{"path": "/c", "rollout_args": {"temperature": 0.1}}],
        "default_workflow_type": "w",
        "default_eval_workflow_type": "e",
        "default_reward_fn_type": "r",
    }
    edits = {INPUT: tasks, "model.temperature": 0.7, "model.top_k": 5}
    tasks = filled(edits).buffer.explorer_input
    first, second = tasks.tasksets
    [evaluation] = tasks.eval_tasksets
    assert (first.name, second.name, evaluation.name) == (
        "taskset_0",
        "taskset_1",
        "eval_taskset_0",
    )
    assert (first.repeat_times, second.repeat_times, evaluation.repeat_times) == (8, 3, 1)
    assert (first.rollout_args.temperature, evaluation.rollout_args.temperature) == (0.7, 0.1)
    assert (first.rollout_args.top_k, first.rollout_args.max_tokens) == (5, 64)
    assert (first.default_workflow_type, evaluation.default_workflow_type) == ("w", "e")
    assert first.default_reward_fn_type == "r"


def test_tasks_are_sampled_as_the_rollout_model_says():
    own = {"temperature": 0.7, "top_p": 0.8, "top_k": 5, "max_response_tokens": 9}
    edits = {f"explorer.rollout_model.{name}": value for name, value in own.items()}
    [taskset] = filled({f"{INPUT}.taskset": {"path": "/a"}, **edits}).buffer.explorer_input.tasksets
    args = taskset.rollout_args
    assert (args.temperature, args.top_p, args.top_k, args.max_tokens) == tuple(own.values())


def test_a_taskset_without_a_workflow():
    taskset = f"{INPUT}.taskset"

    def workflow(**fields):
        edits = {f"{taskset}.{name}": value for name, value in fields.items()}
        return filled(edits).buffer.explorer_input.tasksets[0].default_workflow_type

    assert workflow() == "math_workflow"
    assert workflow(default_reward_fn_type="format_reward") == "simple_workflow"
    assert workflow(format={"workflow_key": "kind"}) is None


def test_experience_buffer_of_a_run():
    buffer = filled().buffer.trainer_input.experience_buffer
    assert (buffer.name, buffer.storage_type) == ("experience_buffer", "queue")
    assert (buffer.schema_type, buffer.path) == ("experience", None)


def test_experience_buffer_of_sft():
    edits = {"mode": "train", "algorithm": {"algorithm_type": "sft"}, EXPERIENCES: {"path": "/d"}}
    buffer = filled(edits).buffer.trainer_input.experience_buffer
    assert (buffer.storage_type, buffer.schema_type) == ("file", "sft")
    edits[EXPERIENCES] = {"path": "sqlite:///x.db"}
    assert filled(edits).buffer.trainer_input.experience_buffer.storage_type == "sql"


def test_default_paths_of_buffers():
    edits = {EXPERIENCES: {"storage_type": "sql", "name": "rows"}, "checkpoint_job_dir": "/job"}
    assert (
        filled(edits).buffer.trainer_input.experience_buffer.path == "sqlite:////job/buffer/rows.db"
    )
    edits = {EXPERIENCES: {"storage_type": "file"}, "mode": "explore", "checkpoint_job_dir": "/job"}
    path = filled(edits).buffer.trainer_input.experience_buffer.path
    assert path == "/job/buffer/experience_buffer.jsonl"


def test_a_queue_holds_two_steps():
    config = filled({"buffer.train_batch_size": 9000})
    assert config.buffer.trainer_input.experience_buffer.capacity == 18000


def test_expert_data_of_mix():
    edits = {
        "algorithm": {"algorithm_type": "mix"},
        "buffer.trainer_input.auxiliary_buffers": {"sft_dataset": {"path": "/d"}},
    }
    buffer = filled(edits).buffer.trainer_input.auxiliary_buffers["sft_dataset"]
    assert (buffer.name, buffer.storage_type, buffer.schema_type) == ("sft_dataset", "file", "sft")


@pytest.mark.parametrize(
    ("edits", "method"),
    [
        ({}, "nccl"),
        ({"mode": "explore"}, "checkpoint"),
        ({"mode": "train"}, "checkpoint"),
        ({"mode": "bench"}, "checkpoint"),
        ({"mode": "colocate"}, "memory"),
        ({"model.lora_configs": [{}]}, "checkpoint"),
        ({"model.tinker": {"enable": True}}, "checkpoint"),
        ({"explorer.rollout_model": {"engine_type": "torch"}}, "memory"),
        ({"synchronizer": {"sync_method": "memory"}}, "memory"),
    ],
)
def test_sync_method(edits, method):
    assert filled(edits).synchronizer.sync_method == method


@pytest.mark.parametrize(
    ("wanted", "sync", "becomes"), [(5, 4, 4), (3, 4, 4), (8, 4, 8), (7, 1, 7)]
)
def test_eval_interval_is_a_multiple_of_the_sync_interval(wanted, sync, becomes):
    edits = {"explorer.eval_interval": wanted, "synchronizer.sync_interval": sync}
    assert filled(edits).explorer.eval_interval == becomes
    told = why(edits, "explorer.eval_interval")
    assert (told is None) == (wanted == becomes)


def test_rollout_model_follows_the_model():
    edits = {"model.temperature": 0.5, "model.rope_theta": 1e6, "model.trust_remote_code": True}
    rollout = filled({**edits, "explorer.rollout_model": {"top_p": 0.9}}).explorer.rollout_model
    assert rollout.model_path == "/models/tiny"
    assert (rollout.temperature, rollout.top_p, rollout.max_model_len) == (0.5, 0.9, 128)
    assert (rollout.rope_theta, rollout.trust_remote_code) == (1e6, True)


def test_auxiliary_models_take_lengths_but_no_rope():
    models = [{"model_path": "/judge"}, {"model_path": "/other", "max_model_len": 32}]
    edits = {"explorer.auxiliary_models": models, "model.rope_theta": 1e6}
    judge, other = filled(edits).explorer.auxiliary_models
    assert (judge.name, judge.max_model_len, judge.rope_theta) == ("/judge", 128, None)
    assert judge.enable_openai_api
    assert (other.max_prompt_tokens, other.max_response_tokens) == (16, 16)


def test_services():
    external = {"enable": True, "model_name": "m"}
    config = filled({"mode": "bench", "model.external_model": external})
    assert config.explorer.rollout_model.engine_type == "openai"
    assert config.explorer.rollout_model.external_model_config.model_name == "m"
    judge = {"external_model_config": {"enable": True, "model_name": "j"}}
    config = filled({"explorer.auxiliary_models": [judge]})
    assert config.explorer.auxiliary_models[0].engine_type == "openai"
    config = filled({"model.tinker": {"enable": True}})
    assert (config.trainer.trainer_type, config.explorer.rollout_model.engine_type) == (
        "tinker",
        "tinker",
    )
    assert (config.trainer.save_hf_checkpoint, config.algorithm.entropy_loss_fn) == (
        "never",
        "none",
    )


def test_token_limit_of_a_micro_batch():
    assert filled().trainer.max_token_len_per_gpu == 256
    edits = {"trainer.ulysses_sequence_parallel_size": 3}
    assert filled(edits).trainer.max_token_len_per_gpu == 86


def test_steps_of_training_on_a_data_set():
    edits = {"mode": "train", "algorithm": {"algorithm_type": "sft"}, "buffer.total_steps": 10}
    assert filled(edits).trainer.total_steps == 10
    assert filled({"buffer.total_steps": 10}).trainer.total_steps is None


def test_the_other_name_of_the_gradient_norm():
    edits = {"algorithm.optimizer": {"clip_grad": 0.3}}
    assert filled(edits).trainer.grad_clip == 0.3


def test_data_juicer_comes_with_its_operator():
    operators = {"operators": [{"name": "data_juicer", "args": {}}]}
    config = filled({"data_processor.experience_pipeline": operators})
    assert config.service.data_juicer.auto_start


def test_the_task_pipeline_writes_the_first_taskset_or_makes_one():
    pipeline = {"inputs": ["/raw"], "operators": []}
    config = filled({"data_processor.task_pipeline": pipeline})
    assert config.data_processor.task_pipeline.output.path == "/data/tasks"
    made = {**pipeline, "output": {"path": "/made"}}
    config = filled({INPUT: {}, "data_processor.task_pipeline": made})
    assert config.buffer.explorer_input.tasksets[0].path == "/made"


def test_the_users_own_values_stay():
    tree = with_edits({"trainer.save_interval": 3, "explorer.eval_interval": 6})
    given = Config.model_validate(tree)
    config = derive(given).config
    assert given == Config.model_validate(tree)
    for key in ("buffer.batch_size", "algorithm.repeat_times", "trainer.save_interval"):
        assert is_set(given, key)
        assert config.flatten()[key] == given.flatten()[key]
    assert not is_set(given, "buffer.train_batch_size")


def test_every_note_names_what_stands_there():
    config, notes = derive(Config.model_validate(with_edits({})))
    flat = config.flatten()
    for note in notes:
        if note.key in flat:
            assert flat[note.key] == note.value
        assert note.why


def test_the_output_of_the_pipeline_is_the_experience_buffer():
    output = {"storage_type": "file", "path": "/data/out.jsonl"}
    edits = {"mode": "explore", "data_processor": {"experience_pipeline": {"output": output}}}
    buffer = filled(edits).buffer.trainer_input.experience_buffer
    assert (buffer.storage_type, buffer.path) == ("file", "/data/out.jsonl")
    assert buffer.name == "experience_buffer"
