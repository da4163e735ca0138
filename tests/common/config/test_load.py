"""Reading a file: references, overrides, numbers, null, old spellings."""

import pytest
import yaml

from tests.common.config.files import BASE, with_edits, write
from trinity.common.config import Config, derive, iterate_stages, load_config
from trinity.common.config.validate import validate_file
from trinity.common.errors import ConfigError


def load(folder, edits, overrides=()):
    return load_config(write(folder, with_edits(edits)), overrides)


def test_references_and_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("RUN_BATCH", "16")
    config = load(
        tmp_path,
        {
            "buffer.batch_size": "${oc.env:RUN_BATCH}",
            "buffer.train_batch_size": "${buffer.batch_size}",
            "group": "${oc.env:RUN_NO_SUCH,plain}",
            "name": "run-${algorithm.repeat_times}",
        },
    )
    assert (config.buffer.batch_size, config.buffer.train_batch_size) == (16, 16)
    assert (config.group, config.name) == ("plain", "run-8")


def test_overrides_come_before_references(tmp_path):
    edits = {"buffer.train_batch_size": "${buffer.batch_size}"}
    config = load(tmp_path, edits, ["buffer.batch_size=2", "model.lora_configs=[{lora_rank: 4}]"])
    assert config.buffer.train_batch_size == 2
    assert config.model.lora_configs[0].lora_rank == 4


def test_overrides_reach_into_lists(tmp_path):
    edits = {"buffer.explorer_input.eval_tasksets": [{"path": "/a"}, {"path": "/b"}]}
    where = "buffer.explorer_input.eval_tasksets"
    overrides = [f"{where}[0].name=first", f"{where}.1.name=second"]
    config = load(tmp_path, edits, overrides)
    names = [taskset.name for taskset in config.buffer.explorer_input.eval_tasksets]
    assert names == ["first", "second"]


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("buffer.batch_size", "buffer.batch_size"),
        ("=4", "=4"),
        ("buffer.batch_size.x=4", "buffer.batch_size.x"),
        ("buffer.explorer_input.eval_tasksets[7].name=x", "eval_tasksets.7"),
        ("buffer.batch_sise=4", "buffer.batch_sise"),
    ],
)
def test_bad_overrides_are_named(tmp_path, override, key):
    edits = {"buffer.explorer_input.eval_tasksets": [{"path": "/a"}]}
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, edits, [override])
    assert key in str(caught.value)
    assert caught.value.exit_code == 2


def test_numbers_written_with_an_exponent_are_numbers_everywhere(tmp_path):
    text = yaml.safe_dump(BASE) + "trainer: {trainer_config: {critic: {optim: {lr: 1e-6}}}}\n"
    text = text.replace("repeat_times: 8", "repeat_times: 8\n  kl_loss_fn_args: {kl_coef: 1e-3}")
    text = text.replace("algorithm:", "algorithm:\n  optimizer: {lr: 1e-6}")
    config = load_config(write(tmp_path, text))
    assert config.algorithm.optimizer.lr == 1e-6
    assert config.algorithm.kl_loss_fn_args == {"kl_coef": 1e-3}
    assert config.trainer.trainer_config["critic"]["optim"]["lr"] == 1e-6


@pytest.mark.parametrize("text", ["5e-7", "'5e-7'", "5E-7", "+5e-7"])
def test_every_way_to_write_a_small_number(tmp_path, text):
    config = load(tmp_path, {}, [f"algorithm.policy_loss_fn_args.a={text}"])
    assert config.algorithm.policy_loss_fn_args == {"a": 5e-7}


def test_a_name_that_looks_like_a_number_stays_a_name(tmp_path):
    edits = {"name": "12e4", "buffer.batch_size": "1e1", "model.lora_configs": [{"name": "1e5"}]}
    config = load(tmp_path, edits)
    assert (config.name, config.buffer.batch_size) == ("12e4", 10)
    assert config.model.lora_configs[0].name == "1e5"


def test_the_word_none_is_null(tmp_path):
    config = load(
        tmp_path,
        {
            "model.custom_chat_template": "None",
            "trainer.total_steps": "None",
            "trainer.trainer_config": "None",
            "algorithm.kl_loss_fn": "none",
            "algorithm.advantage_fn_args": {"std_threshold": "None"},
        },
    )
    assert config.model.custom_chat_template is None
    assert config.trainer.total_steps is None
    assert config.trainer.trainer_config == {}
    assert config.algorithm.kl_loss_fn == "none"
    assert config.algorithm.advantage_fn_args == {"std_threshold": None}


def test_null_means_unset(tmp_path):
    edits = {"trainer": None, "buffer.train_batch_size": None, "data_processor": {}}
    config = load(tmp_path, edits)
    assert config.trainer == Config().trainer
    assert config.buffer.train_batch_size == 0


def test_choices_are_read_in_any_case(tmp_path):
    config = load(
        tmp_path,
        {
            "mode": "BOTH",
            "synchronizer": {"sync_method": "NCCL", "sync_style": "Fixed"},
            "buffer.explorer_input.taskset.format": {"prompt_type": "PLAINTEXT"},
            "log.level": "DEBUG",
            "trainer.save_strategy": "SINGLE_NODE",
        },
    )
    assert (config.mode, config.synchronizer.sync_method) == ("both", "nccl")
    assert config.buffer.explorer_input.taskset.format.prompt_type == "plaintext"
    assert (config.log.level, config.trainer.save_strategy) == ("debug", "single_node")


OLD = [
    ("synchronizer.sync_method", "online", "synchronizer.sync_method", "nccl"),
    ("synchronizer.sync_method", "OFFLINE", "synchronizer.sync_method", "checkpoint"),
    ("synchronizer.sync_style", "dynamic_by_explorer", None, "explorer_driven"),
    ("synchronizer.sync_style", "dynamic_by_trainer", None, "trainer_driven"),
    ("algorithm.optimizer.warmup_style", "cosine", "algorithm.optimizer.lr_scheduler_type", None),
    ("explorer.rollout_model.engine_type", "vllm_async", None, "vllm"),
    ("explorer.rollout_model.engine_type", "external", None, "openai"),
    ("algorithm.sample_strategy", "warmup", None, "default"),
    ("trainer.ppo_max_token_len_per_gpu", 4096, "trainer.max_token_len_per_gpu", None),
    *(
        (f"buffer.{name}", value, f"buffer.explorer_input.{name}", None)
        for name, value in (
            ("default_workflow_type", "math_workflow"),
            ("default_eval_workflow_type", "math_workflow"),
            ("default_reward_fn_type", "math_reward"),
        )
    ),
]


@pytest.mark.parametrize(("key", "value", "new_key", "new_value"), OLD)
def test_old_spellings_work_with_one_warning(tmp_path, key, value, new_key, new_value):
    config = load(tmp_path, {key: value})
    assert config.flatten()[new_key or key] == (new_value or value)
    [warning] = config.source.warnings
    assert str(new_value or new_key) in warning


@pytest.mark.parametrize(
    ("key", "unset"), [("trainer.trainer_config_path", ""), ("explorer.runner_num", None)]
)
def test_a_removed_key_that_says_nothing_is_left_out(tmp_path, key, unset):
    config = load(tmp_path, {key: unset})
    assert key not in config.flatten()
    assert not config.source.warnings


def test_task_selector_is_an_old_name(tmp_path):
    taskset = "buffer.explorer_input.taskset"
    config = load(tmp_path, {f"{taskset}.task_selector": {"selector_type": "shuffle"}})
    assert config.buffer.explorer_input.taskset.data_selector.selector_type == "shuffle"
    assert "data_selector" in config.source.warnings[0]


def test_explorer_output_is_an_old_name(tmp_path):
    config = load(tmp_path, {"buffer.explorer_output": {"storage_type": "sql", "name": "out"}})
    assert config.buffer.trainer_input.experience_buffer.name == "out"


def test_old_spellings_in_stages(tmp_path):
    stage = {"stage_name": "a", "algorithm": {"optimizer": {"warmup_style": "cosine"}}}
    config = load(tmp_path, {"stages": [stage]})
    assert config.stages[0].algorithm.optimizer.lr_scheduler_type == "cosine"


def test_a_problem_under_an_old_name_is_told_by_that_name(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, {"algorithm.optimizer": {"warmup_style": "linear"}})
    [problem] = caught.value.problems
    assert problem.key == "algorithm.optimizer.warmup_style"
    assert problem.line is not None


def test_save_and_load_again(tmp_path):
    config = load(tmp_path, {"stages": [{"stage_name": "a"}], "trainer.trainer_config": {"x": 1}})
    config.save(tmp_path / "again.yaml")
    assert load_config(tmp_path / "again.yaml") == config


def test_lines_of_keys(tmp_path):
    config = load_config(write(tmp_path, "name: a\nmodel:\n  model_path: b\n"))
    assert config.source.line("model.model_path") == 3
    assert config.source.line("model.temperature") == 2
    assert config.source.line("trainer.name") is None


def test_an_empty_file_is_all_defaults(tmp_path):
    assert load_config(write(tmp_path, "")) == Config()


def test_dates_and_names_stay_text(tmp_path):
    config = load_config(write(tmp_path, "name: 2024-01-02\nproject: 12\n"))
    assert (config.name, config.project) == ("2024-01-02", "12")


@pytest.mark.parametrize(
    ("override", "shown"),
    [
        ("buffer.batch_size=eight", "argument buffer.batch_size = 'eight'"),
        ("buffer.batch_sise=8", "argument buffer.batch_sise"),
        ("buffer.batch_size=-1", "argument buffer.batch_size = -1"),
        ("explorer={runner_per_model: 0}", "argument explorer.runner_per_model = 0"),
    ],
)
def test_what_an_argument_says_is_not_looked_for_in_the_file(tmp_path, override, shown):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, {"buffer.batch_size": 3, "explorer.runner_per_model": 2}, [override])
    assert str(caught.value).splitlines()[1] == shown


def test_what_contradicts_an_argument_names_it(tmp_path):
    path = write(tmp_path, with_edits({"synchronizer.sync_interval": 2}))
    problems = validate_file(path, ["explorer.over_rollout.ratio=0.5"]).problems
    [found] = [str(problem) for problem in problems if "over_rollout" in problem.key]
    assert found.startswith("argument explorer.over_rollout.ratio = 0.5")


@pytest.mark.parametrize("text", ["2024-01-01", "2024-01-01 10:00:00", "'on'", "1_000", "1e-6"])
def test_an_argument_is_read_as_the_same_text_in_a_file_is(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(f"{yaml.safe_dump(with_edits({}))}\ngroup: {text}\n")
    in_file = load_config(path).group
    assert load(tmp_path, {}, [f"group={text}"]).group == in_file != ""


def test_an_argument_that_holds_itself_is_told(tmp_path):
    with pytest.raises(ConfigError, match="alias stands inside"):
        load(tmp_path, {}, ["buffer.explorer_input.taskset.workflow_args=&a {b: *a}"])


def test_a_verdict_has_each_stage_filled_in(tmp_path):
    stages = [{"stage_name": "a", "mode": "explore"}, {"stage_name": "b"}]
    path = write(tmp_path, with_edits({"stages": stages}))
    config, _, cases = validate_file(path)
    expected = [derive(stage) for _, stage in iterate_stages(config)]
    assert [case.config for case in cases] == [filled for filled, _ in expected]
    assert [case.given.mode for case in cases] == ["explore", "both"]


def test_a_verdict_of_a_file_that_is_none_has_no_stages(tmp_path):
    assert validate_file(tmp_path / "none.yaml").cases == []
