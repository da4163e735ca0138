"""veRL's keys in `trainer_config`, and launches of veRL taken over."""

from typing import Any

import pytest
import yaml

from tests.common.config.files import BLOCKS, with_edits, write
from trinity.common.config import Config, derive, load_config, training_settings
from trinity.common.config.commented_yaml import CommentedTree
from trinity.common.config.plain_values import clean
from trinity.common.config.source import parse_tree
from trinity.common.config.validate import validate_file
from trinity.common.config.verl.keys import VERL_KEYS, Use, for_verl, leaves, wrapped
from trinity.common.config.verl.launch import import_verl
from trinity.common.config.verl.script import read_script
from trinity.common.errors import ConfigError

ACTOR = "trainer.trainer_config.actor_rollout_ref.actor"


def filled(edits):
    return derive(Config.model_validate(with_edits(edits))).config


def settings(block: dict[str, Any], **edits: Any):
    return training_settings(filled({"trainer.trainer_config": block, **edits}))


def test_every_key_of_the_documented_block_is_listed():
    block = parse_tree((BLOCKS / "configuration_16.yaml").read_text()).data
    keys = leaves(block)
    assert len(keys) > 60
    assert [key for key in keys if key not in VERL_KEYS] == []


def test_our_keys_are_filled_from_verls():
    config = filled({f"{ACTOR}.grad_clip": 0.25, f"{ACTOR}.optim": {"lr": 3e-6}})
    assert config.trainer.grad_clip == 0.25
    assert config.algorithm.optimizer.lr == 3e-6


def test_resume_mode():
    trainer = {"trainer.trainer_config": {"trainer": {"resume_mode": "disable"}}}
    assert filled(trainer).continue_from_checkpoint is False


def test_flat_and_wrapped_settings_are_one():
    flat = {"actor": {"grad_clip": 0.5}, "critic": {"grad_clip": 2.0}}
    assert wrapped(flat) == {
        "actor_rollout_ref": {"actor": {"grad_clip": 0.5}},
        "critic": {"grad_clip": 2.0},
    }
    assert filled({"trainer.trainer_config": flat}).trainer.grad_clip == 0.5


def test_settings_of_the_trainers_models():
    block = {
        "actor_rollout_ref": {
            "actor": {"ppo_micro_batch_size_per_gpu": 3, "shuffle": True, "ppo_epochs": 2},
            "ref": {
                "log_prob_micro_batch_size_per_gpu": 5,
                "fsdp_config": {"param_offload": True},
            },
        },
        "critic": {
            "optim": {"lr": 2e-5, "warmup_style": "cosine"},
            "cliprange_value": 0.2,
            "grad_clip": 7.0,
            "use_dynamic_bsz": True,
            "ppo_max_token_len_per_gpu": 999,
        },
    }
    got = settings(block, **{"trainer.use_dynamic_bsz": False})
    assert (got.epochs, got.shuffle, got.critic_cliprange_value) == (2, True, 0.2)
    assert (got.actor.train.max_rows, got.actor.train.max_tokens) == (3, None)
    assert (got.reference.forward.max_rows, got.reference.param_offload) == (5, True)
    assert (got.critic.optimizer.lr, got.critic.optimizer.lr_scheduler_type) == (2e-5, "cosine")
    assert (got.critic.train.max_tokens, got.critic.grad_clip) == (999, 7.0)


def test_settings_without_verl():
    got = settings({})
    assert got.actor.train.max_tokens == got.reference.forward.max_tokens == 256
    assert (got.critic.optimizer.lr, got.critic_cliprange_value) == (1e-5, 0.5)


def test_what_is_handed_to_verl():
    block = {"actor": {"grad_clip": 0.5, "shuffle": True, "own_key": 1}, "trainer": {"nnodes": 1}}
    assert for_verl(block) == {
        "actor_rollout_ref.actor.shuffle": True,
        "actor_rollout_ref.actor.own_key": 1,
        "trainer.nnodes": 1,
    }


def test_verls_backend_takes_what_the_torch_backend_refuses(tmp_path):
    for key, entry in VERL_KEYS.items():
        if entry.use is not Use.VERL or None not in entry.allowed:
            continue
        edits = {f"trainer.trainer_config.{key}": "something"}
        problems = validate_file(write(tmp_path, with_edits(edits))).problems
        assert [problem.key for problem in problems] == [f"trainer.trainer_config.{key}"]
        edits["trainer.trainer_type"] = "verl"
        assert validate_file(write(tmp_path, with_edits(edits))).problems == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("critic.grad_clip", "much"),
        ("critic.cliprange_value", True),
        ("actor_rollout_ref.actor.shuffle", 3),
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", 1.5),
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", 0),
        ("critic.ppo_max_token_len_per_gpu", -1),
        ("actor_rollout_ref.actor.optim.lr", "fast"),
        ("critic.optim.lr", -1),
        ("critic.optim.lr", "fast"),
        ("critic.optim.lr_warmup_steps_ratio", 3),
        ("critic.optim.warmup_style", "cosin"),
        ("critic.optim.betas", [0.9]),
        ("critic.grad_clip", 0),
        ("trainer.resume_mode", "resume_path"),
        ("trainer.default_hdfs_dir", "hdfs://x"),
        ("critic.ppo_epochs", 4),
        ("critic.shuffle", True),
        ("critic.rollout_n", 2),
        ("something.else", 2),
    ],
)
def test_bad_values_are_named(tmp_path, key, value):
    edits = {f"trainer.trainer_config.{key}": value}
    problems = validate_file(write(tmp_path, with_edits(edits))).problems
    assert [problem.key for problem in problems] == [f"trainer.trainer_config.{key}"]
    assert problems[0].fix and "pydantic" not in str(problems[0])


@pytest.mark.parametrize(
    ("key", "value", "fix"),
    [
        ("actor_rollout_ref.actor.optim.optimizer", "SGD", None),
        ("actor_rollout_ref.actor.fsdp_config.use_orig_params", True, None),
        ("actor_rollout_ref.model.use_liger", True, None),
        ("actor_rollout_ref.actor.fsdp_config.fsdp_sise", 2, "fsdp_config.fsdp_size"),
        ("critic.ppo_epochs", 4, "make both alike"),
        ("critic.checkpoint.save_contents", ["model"], "Remove it"),
    ],
)
def test_verls_backend_takes_keys_of_verl_and_refuses_slips(tmp_path, key, value, fix):
    edits = {f"trainer.trainer_config.{key}": value, "trainer.trainer_type": "verl"}
    problems = validate_file(write(tmp_path, with_edits(edits))).problems
    assert [fix in problem.fix for problem in problems] == [True] * (fix is not None)


NOT_COMPARED = {"synchronizer.sync_timeout", "synchronizer.sync_offset"}
"""The page sets the offset to 1 in its files, and to 0 in its text on matching veRL."""


@pytest.mark.parametrize(("script", "page"), [("verl_ppo", 2), ("verl_grpo", 3)])
def test_worked_examples_come_out_as_the_page_has_them(script, page, tmp_path):
    imported = import_verl((BLOCKS / f"{script}.sh").read_text())
    path = write(tmp_path, imported.text())
    verdict = validate_file(path)
    assert verdict.problems == []
    ours = derive(verdict.config).config.flatten()
    theirs = derive(load_config(BLOCKS / f"align_with_verl_{page}.yaml")).config.flatten()
    different = {
        key: (ours.get(key), theirs.get(key))
        for key in sorted({*ours, *theirs} - NOT_COMPARED)
        if ours.get(key) != theirs.get(key)
    }
    assert different == {}
    assert verdict.config.synchronizer.sync_offset == 0


def test_each_line_names_the_key_it_came_from():
    text = import_verl((BLOCKS / "verl_grpo.sh").read_text()).text()
    assert (
        "max_token_len_per_gpu: 24000  # actor_rollout_ref.actor.ppo_max_token_len_per_gpu" in text
    )
    assert "# No counterpart: data.truncation=error" in text


def test_nothing_is_dropped_without_a_word():
    script = (BLOCKS / "verl_ppo.sh").read_text()
    imported = import_verl(script)
    text = imported.text()
    for key in read_script(script).arguments:
        assert key in text, key


def test_other_settings():
    script = """
    N=4  # samples
    export LEN=$((1024 * 2))
    python -m verl.trainer.main_ppo \\
      algorithm.adv_estimator=rloo algorithm.use_kl_in_reward=True algorithm.kl_penalty=kl \\
      algorithm.kl_ctrl.kl_coef=0.01 algorithm.kl_ctrl.type=adaptive \\
      data.train_files=/data/all.parquet data.shuffle=True data.train_batch_size=64 \\
      data.max_response_length=$LEN data.max_prompt_length=${PROMPT:-512} \\
      actor_rollout_ref.model.path=org/model-7b +actor_rollout_ref.model.lora_rank=16 \\
      actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.rollout.n=$N \\
      actor_rollout_ref.rollout.temperature=0.8 actor_rollout_ref.rollout.name=sglang \\
      actor_rollout_ref.rollout.val_kwargs.n=16 'data.val_files=["/data/test.jsonl"]' \\
      trainer.logger=console trainer.test_freq=-1 trainer.resume_mode=disable \\
      trainer.n_gpus_per_node=8 hydra.run.dir=/tmp "$@"
    """
    imported = import_verl(script)
    tree = yaml.safe_load(imported.text())
    assert tree["algorithm"]["algorithm_type"] == "rloo"
    assert tree["algorithm"]["kl_penalty_fn"] == "k1"
    assert tree["algorithm"]["kl_penalty_fn_args"] == {"kl_coef": 0.01, "adaptive": True}
    assert tree["algorithm"]["repeat_times"] == 4
    assert tree["algorithm"]["kl_loss_fn"] == "none"
    assert tree["model"]["max_response_tokens"] == 2048
    assert tree["model"]["max_prompt_tokens"] == "${oc.env:PROMPT,512}"
    assert tree["model"]["lora_configs"] == [{"lora_rank": 16}]
    assert tree["buffer"]["batch_size"] == 32
    assert tree["buffer"]["train_batch_size"] == 128
    assert tree["synchronizer"]["sync_interval"] == 2
    [taskset] = tree["buffer"]["explorer_input"]["tasksets"]
    assert (taskset["path"], taskset["split"]) == ("/data/all.parquet", "train")
    assert taskset["data_selector"] == {"selector_type": "shuffle"}
    [evaluation] = tree["buffer"]["explorer_input"]["eval_tasksets"]
    assert (evaluation["path"], evaluation["split"], evaluation["repeat_times"]) == (
        "/data",
        "test",
        16,
    )
    assert tree["continue_from_checkpoint"] is False
    left = {key for key, _, _ in imported.left_out}
    assert left == {"actor_rollout_ref.rollout.name", "hydra.run.dir", "trainer.test_freq"}


@pytest.mark.parametrize(("switch", "advantage"), [("True", "grpo_verl"), ("False", "grpo")])
def test_a_kl_in_the_reward_takes_the_advantage_that_sees_it(switch, advantage):
    script = f"""
    python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \\
      algorithm.use_kl_in_reward={switch} data.train_files=/data/all.parquet
    """
    tree = yaml.safe_load(import_verl(script).text())
    assert tree["algorithm"]["advantage_fn"] == advantage


def test_a_yaml_file_of_verl():
    text = """
    defaults: [ppo_trainer]
    data: {train_batch_size: 8, max_prompt_length: 16, train_files: [/d/train.parquet]}
    actor_rollout_ref:
      model: {path: org/m}
      actor: {ppo_mini_batch_size: "${data.train_batch_size}", optim: {lr: 1e-5}}
      rollout: {n: 2}
    trainer: {n_gpus_per_node: 4, nnodes: 1}
    """
    tree = yaml.safe_load(import_verl(text).text())
    assert tree["buffer"]["batch_size"] == 8
    assert tree["buffer"]["train_batch_size"] == 16
    assert tree["cluster"] == {"node_num": 1, "gpu_per_node": 4}


MINI = "actor_rollout_ref.actor.ppo_mini_batch_size"


def launch(*arguments, before=""):
    command = " ".join(("python3 -m verl.trainer.main_ppo data.train_files=a.parquet", *arguments))
    return import_verl(f"{before}\n{command}\n")


@pytest.mark.parametrize(
    ("value", "number", "whose"),
    [("$MINI", 256, "veRL's"), ("${MINI:-48}", 48, "its"), ("0", 256, "veRL's")],
)
def test_where_only_a_shell_knows_a_number_a_default_stands_in(value, number, whose):
    imported = launch(f"{MINI}={value}", "data.train_batch_size=96", "trainer.nnodes=$NODES")
    tree = yaml.safe_load(imported.text())
    assert tree["buffer"]["batch_size"] == tree["buffer"]["train_batch_size"] == number
    assert tree["cluster"]["node_num"] == 1
    [told] = [note for note in imported.to_check if note.startswith(f"{MINI} is")]
    assert told.endswith(f"no whole number above 0: {whose} default {number} stands in")


@pytest.mark.parametrize(
    ("argument", "left"),
    [
        ("trainer.save_freq=$SAVE", "trainer.save_freq"),
        ("'algorithm.adv_estimator=[a,b]'", "algorithm.adv_estimator"),
        ("'actor_rollout_ref.actor.policy_loss.loss_mode=[a]'", "loss_mode"),
        ("trainer.logger=5", "trainer.logger"),
    ],
)
def test_values_of_another_kind_are_left_out(argument, left):
    assert any(left in key for key, _, _ in launch(argument).left_out)


@pytest.mark.parametrize("open_", ["X=${HOME", "X=$(cat <<EOF", "X=$((1 +", "${", "$(", "$(("])
def test_a_bracket_that_a_line_leaves_open_ends_with_the_line(open_):
    imported = launch("trainer.nnodes=2", before=open_)
    assert yaml.safe_load(imported.text())["cluster"]["node_num"] == 2


def test_brackets_in_brackets():
    script = read_script(
        "A=$(dirname $(pwd))/x\nB=${C:-${D:-5}}\nE=$(( (1 + 2) * (3 + 1) ))\n"
        "python3 -m verl.trainer.main_ppo a=$A b=$B e=$E"
    )
    assert script.arguments == {
        "a": "$(dirname $(pwd))/x",
        "b": "${oc.env:C,${oc.env:D,5}}",
        "e": "12",
    }


def test_texts_of_several_lines_stay_comments():
    imported = import_verl("data: {prompt: 'a\n\n  b: c', train_files: [x]}\ntrainer: {}\n")
    assert "# No counterpart: data.prompt=a b: c (" in imported.text()
    assert set(yaml.safe_load(imported.text())) == set(yaml.safe_load(launch().text()))


@pytest.mark.parametrize("lr", [1.2345678e-5, 1e-6, 2.5e6, 1e7, 4e-320, -3e-4, 0.5, 0.0])
def test_numbers_keep_all_their_digits(lr):
    tree = CommentedTree({"lr": lr})
    assert clean(yaml.safe_load(tree.text()))["lr"] == lr


@pytest.mark.parametrize("text", ["echo hello", "a: [", "name: run\nmode: both\n", ""])
def test_something_else_is_refused(text):
    with pytest.raises(ConfigError, match="veRL"):
        import_verl(text)


def test_quotes_and_variables_of_a_shell():
    script = read_script(
        "A='$X'\nB=\"$A y\"\nC=$HOME/data\n"
        'python3 -m verl.trainer.main_ppo a.b="$B" c.d=\'["x","y"]\' e.f=$C g.h=$(date) > log'
    )
    assert script.arguments["a.b"] == "$X y"
    assert script.arguments["c.d"] == '["x","y"]'
    assert script.arguments["e.f"] == "${oc.env:HOME}/data"
    assert script.unread[0] == "$(date)"
