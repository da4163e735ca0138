"""Wrong files: each is refused fast, by a message that names the key and a fix that works."""

import time
from dataclasses import dataclass, field
from typing import Any

import pytest
import yaml

from tests.common.config.files import BASE, DROP, with_edits, write
from trinity.common.config.validate import validate_file

TASKSET = "buffer.explorer_input.taskset"
EXPERIENCES = "buffer.trainer_input.experience_buffer"
ROLLOUT = "explorer.rollout_model"
VERL = "trainer.trainer_config.actor_rollout_ref"
BASE_TEXT = yaml.safe_dump(BASE, sort_keys=False)
SFT = {
    "mode": "train",
    "algorithm": {"algorithm_type": "sft"},
    "buffer.train_batch_size": 8,
    EXPERIENCES: {"path": "/data/sft"},
}
LORA = [{"lora_rank": 8}]
TINKER = [
    ("model.lora_configs", LORA, "`model.tinker.rank`"),
    ("model.temperature", 0.7, "Set it to 1"),
    ("explorer.rollout_model.temperature", 0.7, "Set it to 1"),
    (f"{TASKSET}.rollout_args.temperature", 0.7, "Set it to 1"),
    ("model.min_response_tokens", 4, "Remove it"),
    ("model.repetition_penalty", 1.1, "Remove it"),
    ("algorithm.entropy_loss_fn", "default", "`none`"),
    ("explorer.rollout_model.update_mode", "keep", "`pause`"),
    ("explorer.rollout_model.dtype", "float32", "Remove it"),
    ("explorer.rollout_model.engine_type", "vllm", "Remove one"),
    ("trainer.trainer_type", "verl", "Remove one"),
    ("trainer.max_token_len_per_gpu", 4096, "Remove it"),
    ("synchronizer.sync_method", "nccl", "Remove `sync_method`"),
]
NAMED = [{"name": "one", "path": "/adapters/one"}]
WITH_API = {f"{ROLLOUT}.enable_openai_api": True}


@dataclass(frozen=True)
class Wrong:
    """A wrong file.

    Args:
        edits: Changes to the valid base file that break it, or the text of the whole file.
        key: The key that the message has to name.
        says: Words of the fix.
        repair: Changes (or text) that do what the fix says; the file then validates.
    """

    name: str
    edits: dict[str, Any] | str
    key: str
    says: str
    repair: dict[str, Any] | str = field(default_factory=dict)


def lines(*extra: str) -> str:
    return BASE_TEXT + "\n".join(extra) + "\n"


WRONG = [
    Wrong(
        "images in an engine that sees none",
        {f"{ROLLOUT}.enable_multimodal": True, f"{ROLLOUT}.engine_type": "vllm"},
        f"{ROLLOUT}.enable_multimodal",
        "`engine_type: torch`",
        {f"{ROLLOUT}.enable_multimodal": DROP},
    ),
    Wrong(
        "adapters that nobody could name",
        {f"{ROLLOUT}.lora_modules": NAMED},
        f"{ROLLOUT}.lora_modules",
        f"`{ROLLOUT}.enable_openai_api: true`",
        WITH_API,
    ),
    Wrong(
        "adapters that nobody could load",
        {f"{ROLLOUT}.enable_runtime_lora_updating": True},
        f"{ROLLOUT}.enable_runtime_lora_updating",
        f"`{ROLLOUT}.enable_openai_api: true`",
        WITH_API,
    ),
    Wrong(
        "adapter without a folder",
        {f"{ROLLOUT}.lora_modules": [{"name": "one"}], **WITH_API},
        f"{ROLLOUT}.lora_modules.0.path",
        "`path: ...`",
        {f"{ROLLOUT}.lora_modules.0.path": "/adapters/one"},
    ),
    Wrong(
        "adapter without a name",
        {f"{ROLLOUT}.lora_modules": [{"path": "/adapters/one"}], **WITH_API},
        f"{ROLLOUT}.lora_modules.0.name",
        "`name: ...`",
        {f"{ROLLOUT}.lora_modules.0.name": "one"},
    ),
    Wrong(
        "two adapters of one name",
        {f"{ROLLOUT}.lora_modules": [*NAMED, dict(NAMED[0])], **WITH_API},
        f"{ROLLOUT}.lora_modules.1.name",
        "another one",
        {f"{ROLLOUT}.lora_modules.1.name": "two"},
    ),
    Wrong(
        "adapter called like the one that is trained",
        {
            f"{ROLLOUT}.lora_modules": NAMED,
            "model.lora_configs": [{"name": "one"}],
            **WITH_API,
        },
        f"{ROLLOUT}.lora_modules.0.name",
        "another one",
        {f"{ROLLOUT}.lora_modules.0.name": "two"},
    ),
    Wrong(
        "adapters of a service",
        {
            "explorer.auxiliary_models": [
                {"model_path": "judge", "engine_type": "openai", "lora_modules": NAMED}
            ]
        },
        "explorer.auxiliary_models.0.lora_modules",
        "`vllm` or `torch`",
        {"explorer.auxiliary_models.0.lora_modules": DROP},
    ),
    Wrong(
        "setting of vLLM for adapters",
        {f"{ROLLOUT}.lora_kwargs": {"max_lora": 2}, "model.lora_configs": LORA},
        f"{ROLLOUT}.lora_kwargs.max_lora",
        "`max_loras`",
        {f"{ROLLOUT}.lora_kwargs": {"max_loras": 2}},
    ),
    Wrong(
        "settings of vLLM for another engine",
        {
            f"{ROLLOUT}.lora_kwargs": {"max_loras": 2},
            "model.lora_configs": LORA,
            f"{ROLLOUT}.engine_type": "torch",
        },
        f"{ROLLOUT}.lora_kwargs",
        "Remove it",
        {f"{ROLLOUT}.lora_kwargs": DROP},
    ),
    Wrong(
        "settings of vLLM for adapters that are not there",
        {f"{ROLLOUT}.lora_kwargs": {"max_loras": 2}},
        f"{ROLLOUT}.lora_kwargs",
        "`model.lora_configs`",
        {"model.lora_configs": LORA},
    ),
    Wrong(
        "images for a critic",
        {
            f"{ROLLOUT}.enable_multimodal": True,
            "algorithm": {"algorithm_type": "ppo"},
            f"{ROLLOUT}.engine_type": "torch",
        },
        f"{ROLLOUT}.enable_multimodal",
        "without a critic",
        {f"{ROLLOUT}.enable_multimodal": DROP},
    ),
    Wrong(
        "images in a data set of answers",
        {**SFT, EXPERIENCES: {"path": "/data/sft", "format": {"image_key": "picture"}}},
        f"{EXPERIENCES}.format.image_key",
        "Remove it",
        SFT,
    ),
    Wrong(
        "an engine of another number format than the trainer's",
        {f"{ROLLOUT}.dtype": "float32"},
        f"{ROLLOUT}.dtype",
        "`trainer.dtype: float32`",
        {"trainer.dtype": "float32"},
    ),
    # Typos
    Wrong("section", {"trainr": {"save_interval": 5}}, "trainr", "`trainer`", {"trainr": DROP}),
    Wrong(
        "key",
        {"buffer.batch_sise": 8},
        "buffer.batch_sise",
        "`batch_size`",
        {"buffer.batch_sise": DROP, "buffer.batch_size": 8},
    ),
    Wrong(
        "key in a list",
        {"buffer.explorer_input.eval_tasksets": [{"pth": "/d", "path": "/e"}]},
        "buffer.explorer_input.eval_tasksets.0.pth",
        "`path`",
        {"buffer.explorer_input.eval_tasksets.0.pth": DROP},
    ),
    Wrong(
        "key in a mapping of buffers",
        {"buffer.trainer_input.auxiliary_buffers": {"a": {"path": "/d", "splt": "x"}}},
        "buffer.trainer_input.auxiliary_buffers.a.splt",
        "`split`",
        {"buffer.trainer_input.auxiliary_buffers.a.splt": DROP},
    ),
    Wrong(
        "key in a stage",
        {"stages": [{"stage_name": "a", "algoritm": {}}]},
        "stages.0.algoritm",
        "`algorithm`",
        {"stages.0.algoritm": DROP},
    ),
    Wrong(
        "key of another section",
        {"model.engine_num": 2},
        "model.engine_num",
        f"`{ROLLOUT}.engine_num`",
        {"model.engine_num": DROP, f"{ROLLOUT}.engine_num": 2},
    ),
    Wrong("mode", {"mode": "boht"}, "mode", "`both`", {"mode": "both"}),
    Wrong(
        "sync style",
        {"synchronizer.sync_style": "fixd"},
        "synchronizer.sync_style",
        "`fixed`",
        {"synchronizer.sync_style": "fixed"},
    ),
    Wrong(
        "engine",
        {f"{ROLLOUT}.engine_type": "sglang"},
        f"{ROLLOUT}.engine_type",
        "vllm",
        {f"{ROLLOUT}.engine_type": "vllm"},
    ),
    Wrong("log level", {"log.level": "verbose"}, "log.level", "debug", {"log.level": "DEBUG"}),
    # Types and ranges
    Wrong(
        "text for a number",
        {"buffer.batch_size": "many"},
        "buffer.batch_size",
        "such as `8`",
        {"buffer.batch_size": 8},
    ),
    Wrong(
        "fraction for a count",
        {"algorithm.repeat_times": 2.5},
        "algorithm.repeat_times",
        "such as `8`",
        {"algorithm.repeat_times": 2},
    ),
    Wrong(
        "number for a section",
        {"model": 7},
        "model",
        "Write its keys below it",
        {"model": BASE["model"]},
    ),
    Wrong(
        "mapping for a list",
        {"explorer.auxiliary_models": {"model_path": "/m"}},
        "explorer.auxiliary_models",
        "after `- `",
        {"explorer.auxiliary_models": [{"model_path": "/m"}], "cluster.gpu_per_node": 8},
    ),
    Wrong(
        "word for a switch",
        {"explorer.eval_on_startup": "maybe"},
        "explorer.eval_on_startup",
        "`true` or `false`",
        {"explorer.eval_on_startup": True},
    ),
    Wrong(
        "negative",
        {"trainer.save_interval": -1},
        "trainer.save_interval",
        "at least 0",
        {"trainer.save_interval": 0},
    ),
    Wrong(
        "zero batch",
        {"buffer.batch_size": 0},
        "buffer.batch_size",
        "at least 1",
        {"buffer.batch_size": 1},
    ),
    Wrong(
        "share above one",
        {f"{ROLLOUT}.gpu_memory_utilization": 1.5},
        f"{ROLLOUT}.gpu_memory_utilization",
        "at most 1",
        {f"{ROLLOUT}.gpu_memory_utilization": 1},
    ),
    Wrong(
        "port",
        {"explorer.proxy_port": 99999},
        "explorer.proxy_port",
        "at most 65535",
        {"explorer.proxy_port": 8010},
    ),
    Wrong(
        "stage without a name",
        {"stages": [{"mode": "both"}]},
        "stages.0.stage_name",
        "Add `stage_name",
        {"stages.0.stage_name": "first"},
    ),
    Wrong(
        "beta",
        {"algorithm.optimizer.betas": [0.9, 1.5]},
        "algorithm.optimizer.betas.1",
        "`betas: [0.9, 0.999]`",
        {"algorithm.optimizer.betas": [0.9, 0.999]},
    ),
    # YAML
    Wrong(
        "tab",
        BASE_TEXT.replace("  batch_size", "\tbatch_size"),
        "batch_size",
        "Indent with spaces",
        BASE_TEXT,
    ),
    Wrong("duplicate key", lines("name: again"), "name", "Remove one of the two", BASE_TEXT),
    Wrong(
        "duplicate key inside",
        BASE_TEXT.replace("  batch_size: 4", "  batch_size: 4\n  batch_size: 5"),
        "buffer.batch_size",
        "Remove one of the two",
        BASE_TEXT,
    ),
    Wrong("colon in a value", lines("group: a: b"), "group", "quotes", lines("group: 'a: b'")),
    Wrong("open bracket", lines("group: [a"), "", "Close open quotes and brackets", BASE_TEXT),
    Wrong("list at the top", "- mode: both\n", "", "`mode: both`", BASE_TEXT),
    Wrong(
        "wrong indent",
        BASE_TEXT.replace("  batch_size", "   batch_size"),
        "explorer_input",
        "Align this key",
        BASE_TEXT,
    ),
    # References
    Wrong(
        "unset variable",
        {"model.model_path": "${oc.env:NO_SUCH_VARIABLE}"},
        "model.model_path",
        "export NO_SUCH_VARIABLE",
        {"model.model_path": "${oc.env:NO_SUCH_VARIABLE,/models/tiny}"},
    ),
    Wrong(
        "reference to nothing",
        {"buffer.train_batch_size": "${buffer.batch_sise}"},
        "buffer.train_batch_size",
        "${buffer.batch_size}",
        {"buffer.train_batch_size": "${buffer.batch_size}"},
    ),
    Wrong("circle", {"name": "${group}", "group": "${name}"}, "name", "plain value", {"name": "a"}),
    Wrong(
        "circle to itself", {"project": "${project}"}, "project", "plain value", {"project": "a"}
    ),
    Wrong(
        "unknown resolver",
        {"name": "${env:HOME}"},
        "name",
        "${oc.env:NAME",
        {"name": "${oc.env:HOME}"},
    ),
    Wrong(
        "open reference",
        {"name": "${oc.env:HOME"},
        "name",
        "${oc.env:NAME,default}",
        {"name": "run"},
    ),
    # Names of registries
    Wrong(
        "algorithm",
        {"algorithm.algorithm_type": "gpro"},
        "algorithm.algorithm_type",
        "`grpo`",
        {"algorithm.algorithm_type": "grpo"},
    ),
    Wrong(
        "KL function",
        {"algorithm.kl_loss_fn": "k9"},
        "algorithm.kl_loss_fn",
        "low_var_kl",
        {"algorithm.kl_loss_fn": "low_var_kl"},
    ),
    Wrong(
        "policy loss",
        {"algorithm.policy_loss_fn": "pppo"},
        "algorithm.policy_loss_fn",
        "`ppo`",
        {"algorithm.policy_loss_fn": "ppo"},
    ),
    Wrong(
        "workflow",
        {f"{TASKSET}.default_workflow_type": "math_workflo"},
        f"{TASKSET}.default_workflow_type",
        "`math_workflow`",
        {f"{TASKSET}.default_workflow_type": "math_workflow"},
    ),
    Wrong(
        "reward for all",
        {"buffer.explorer_input.default_reward_fn_type": "math_rewrd"},
        "buffer.explorer_input.default_reward_fn_type",
        "`math_reward`",
        {"buffer.explorer_input.default_reward_fn_type": "math_reward"},
    ),
    Wrong(
        "selector",
        {f"{TASKSET}.data_selector": {"selector_type": "shufle"}},
        f"{TASKSET}.data_selector.selector_type",
        "`shuffle`",
        {f"{TASKSET}.data_selector.selector_type": "shuffle"},
    ),
    Wrong(
        "monitor",
        {"monitor.monitor_type": "wandbb"},
        "monitor.monitor_type",
        "`wandb`",
        {"monitor.monitor_type": "wandb"},
    ),
    Wrong(
        "operator",
        {"data_processor.experience_pipeline": {"operators": [{"name": "reward_filtr"}]}},
        "data_processor.experience_pipeline.operators.0.name",
        "`reward_filter`",
        {"data_processor.experience_pipeline": {"operators": [{"name": "reward_filter"}]}},
    ),
    Wrong(
        "priority function",
        {EXPERIENCES: {"replay_buffer": {"enable": True, "priority_fn": "linear_decai"}}},
        f"{EXPERIENCES}.replay_buffer.priority_fn",
        "`linear_decay`",
        {f"{EXPERIENCES}.replay_buffer.priority_fn": "linear_decay"},
    ),
    # Old and computed keys
    Wrong(
        "removed file",
        {"trainer.trainer_config_path": "x.yaml"},
        "trainer.trainer_config_path",
        "`trainer.trainer_config`",
        {"trainer.trainer_config_path": DROP},
    ),
    Wrong(
        "removed number",
        {"explorer.runner_num": 4},
        "explorer.runner_num",
        "`explorer.runner_per_model`",
        {"explorer.runner_num": DROP, "explorer.runner_per_model": 4},
    ),
    Wrong(
        "computed key",
        {"cluster.trainer_gpu_num": 2},
        "cluster.trainer_gpu_num",
        "Remove",
        {"cluster.trainer_gpu_num": DROP},
    ),
    Wrong(
        "computed key of a model",
        {f"{ROLLOUT}.engine_id": 0},
        f"{ROLLOUT}.engine_id",
        "Remove",
        {f"{ROLLOUT}.engine_id": DROP},
    ),
    Wrong(
        "old and new spelling",
        {"algorithm.optimizer": {"warmup_style": "cosine", "lr_scheduler_type": "constant"}},
        "algorithm.optimizer.warmup_style",
        "Remove `warmup_style`",
        {"algorithm.optimizer.warmup_style": DROP},
    ),
    Wrong(
        "V0 engine",
        {f"{ROLLOUT}.use_v1": False},
        f"{ROLLOUT}.use_v1",
        "Remove it",
        {f"{ROLLOUT}.use_v1": DROP},
    ),
    # Lengths
    Wrong(
        "no length",
        {"model.max_response_tokens": DROP},
        "model.max_model_len",
        "`max_response_tokens`",
        {"model.max_model_len": 128},
    ),
    Wrong(
        "parts longer than the whole",
        {"model.max_model_len": 100},
        "model.max_model_len",
        "128",
        {"model.max_model_len": 128},
    ),
    Wrong(
        "least above most",
        {"model.min_response_tokens": 64},
        "model.min_response_tokens",
        "63",
        {"model.min_response_tokens": 63},
    ),
    Wrong(
        "judge without length",
        {
            "cluster.gpu_per_node": 8,
            "explorer.auxiliary_models": [
                {
                    "model_path": "/j",
                    "max_prompt_tokens": 99,
                    "max_response_tokens": 9,
                    "max_model_len": 100,
                }
            ],
        },
        "explorer.auxiliary_models.0.max_model_len",
        "108",
        {"explorer.auxiliary_models.0.max_model_len": 108},
    ),
    # GPUs and batches
    Wrong(
        "more engines than GPUs",
        {f"{ROLLOUT}.engine_num": 8},
        "cluster.gpu_per_node",
        "at least 9",
        {"cluster.gpu_per_node": 9, "trainer.trainer_type": "torch"},
    ),
    Wrong(
        "no GPU for the trainer",
        {f"{ROLLOUT}.tensor_parallel_size": 5},
        "cluster.gpu_per_node",
        "engine_num",
        {f"{ROLLOUT}.tensor_parallel_size": 1},
    ),
    Wrong(
        "engine over part of a machine",
        {"cluster": {"node_num": 4, "gpu_per_node": 4}, f"{ROLLOUT}.tensor_parallel_size": 6},
        f"{ROLLOUT}.tensor_parallel_size",
        "multiple of 4",
        {f"{ROLLOUT}.tensor_parallel_size": 4},
    ),
    Wrong(
        "sequence parallel",
        {"trainer.ulysses_sequence_parallel_size": 3},
        "trainer.ulysses_sequence_parallel_size",
        "1, 2, 4",
        {"trainer.ulysses_sequence_parallel_size": 2},
    ),
    Wrong(
        "batch that does not divide",
        {"trainer.trainer_type": "verl", "buffer.train_batch_size": 30},
        "buffer.train_batch_size",
        "32",
        {"buffer.train_batch_size": 32},
    ),
    Wrong(
        "embedded engine on two GPUs",
        {f"{ROLLOUT}.engine_type": "torch", f"{ROLLOUT}.tensor_parallel_size": 2},
        f"{ROLLOUT}.tensor_parallel_size",
        "`engine_num`",
        {f"{ROLLOUT}.tensor_parallel_size": 1},
    ),
    # Contradictions
    Wrong(
        "one sample with GRPO",
        {"algorithm.repeat_times": 1},
        "algorithm.repeat_times",
        "8",
        {"algorithm.repeat_times": 8},
    ),
    Wrong(
        "three samples with DPO",
        {**SFT, "algorithm": {"algorithm_type": "dpo", "repeat_times": 3}},
        "algorithm.repeat_times",
        "`repeat_times: 2`",
        {"algorithm.repeat_times": 2},
    ),
    Wrong(
        "SFT with an explorer",
        {**SFT, "mode": "both"},
        "algorithm.algorithm_type",
        "`mode: train`",
        {"mode": "train"},
    ),
    Wrong(
        "SFT without data",
        {**SFT, EXPERIENCES: {}},
        f"{EXPERIENCES}.path",
        "`path`",
        {f"{EXPERIENCES}.path": "/data/sft"},
    ),
    Wrong(
        "SFT without a batch",
        {**SFT, "buffer.train_batch_size": 0},
        "buffer.train_batch_size",
        "`train_batch_size: 32`",
        {"buffer.train_batch_size": 32},
    ),
    Wrong(
        "NCCL with one side",
        {"mode": "explore", "synchronizer.sync_method": "nccl"},
        "synchronizer.sync_method",
        "`mode: both`",
        {"mode": "both"},
    ),
    Wrong(
        "NCCL with adapters",
        {"model.lora_configs": LORA, "synchronizer.sync_method": "nccl"},
        "synchronizer.sync_method",
        "checkpoint",
        {"synchronizer.sync_method": "checkpoint"},
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
    Wrong(
        "taskset without a path",
        {f"{TASKSET}.path": DROP},
        f"{TASKSET}.path",
        "`path: ...`",
        {f"{TASKSET}.path": "/data"},
    ),
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
        "no model",
        {"model.model_path": ""},
        "model.model_path",
        "`model_path:",
        {"model.model_path": "/models/tiny"},
    ),
    *(
        Wrong(
            f"Tinker and {key}",
            {"model.tinker": {"enable": True}, key: value},
            key,
            says,
            {key: DROP},
        )
        for key, value, says in TINKER
    ),
    Wrong(
        "Tinker and a critic",
        {"model.tinker": {"enable": True}, "algorithm": {"algorithm_type": "ppo"}},
        "algorithm.algorithm_type",
        "`grpo`",
        {"algorithm": {"algorithm_type": "grpo"}},
    ),
    Wrong(
        "Tinker's trainer without its model",
        {"trainer": {"trainer_type": "tinker"}},
        "trainer.trainer_type",
        "`model.tinker.enable: true`",
        {"model.tinker": {"enable": True}},
    ),
    Wrong(
        "Tinker's adapter on nothing",
        {"model.tinker": {"train_mlp": False, "train_attn": False, "train_unembed": False}},
        "model.tinker",
        "",
        {"model.tinker": DROP},
    ),
    Wrong(
        "Tinker in stages",
        {
            "model.tinker": {"enable": True},
            "stages": [{"stage_name": "one"}, {"stage_name": "two"}],
        },
        "stages",
        "Keep one stage",
        {"stages": [{"stage_name": "one"}]},
    ),
    Wrong(
        "two adapters",
        {"model.lora_configs": LORA * 2},
        "model.lora_configs",
        "Keep one",
        {"model.lora_configs": LORA},
    ),
    Wrong(
        "an adapter too large for vLLM",
        {
            "model.lora_configs": [{"lora_rank": 1024}],
            "explorer.rollout_model.engine_type": "vllm",
        },
        "model.lora_configs.0.lora_rank",
        "Lower it",
        {"model.lora_configs": LORA},
    ),
    Wrong(
        "expert data missing",
        {"algorithm": {"algorithm_type": "mix"}},
        "buffer.trainer_input.auxiliary_buffers.sft_dataset",
        "`sft_dataset`",
        {"buffer.trainer_input.auxiliary_buffers": {"sft_dataset": {"path": "/sft"}}},
    ),
    Wrong(
        "teacher missing",
        {"algorithm": {"algorithm_type": "jsd"}},
        "explorer.auxiliary_models",
        "`- model_path: ...`",
        {"explorer.auxiliary_models": [{"model_path": "/teacher"}]},
    ),
    Wrong(
        "service that trains",
        {f"{ROLLOUT}.engine_type": "openai"},
        f"{ROLLOUT}.engine_type",
        "`vllm`",
        {f"{ROLLOUT}.engine_type": "vllm"},
    ),
    Wrong(
        "service without bench",
        {"model.external_model": {"enable": True, "model_name": "m"}, "mode": "explore"},
        "model.external_model.enable",
        "`mode: bench`",
        {"mode": "bench", "buffer.explorer_input.eval_tasksets": [{"path": "/e"}]},
    ),
    Wrong(
        "tool calls without a parser",
        {f"{ROLLOUT}.enable_auto_tool_choice": True},
        f"{ROLLOUT}.tool_call_parser",
        "`tool_call_parser: hermes`",
        {f"{ROLLOUT}.tool_call_parser": "hermes"},
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
        "no such buffer",
        {EXPERIENCES: {"storage_type": "queu"}},
        f"{EXPERIENCES}.storage_type",
        "Did you mean `queue`?",
        {f"{EXPERIENCES}.storage_type": "queue"},
    ),
    Wrong(
        "Megatron without veRL",
        {"trainer.trainer_strategy": "megatron"},
        "trainer.trainer_strategy",
        "`trainer_strategy: fsdp2`",
        {"trainer.trainer_strategy": "fsdp2"},
    ),
    Wrong(
        "critic warm-up without a critic",
        {"trainer.critic_warmup": 5},
        "trainer.critic_warmup",
        "Set it to 0",
        {"trainer.critic_warmup": 0},
    ),
    Wrong(
        "warm-up twice",
        {"algorithm.optimizer": {"lr_warmup_steps": 5, "lr_warmup_steps_ratio": 0.1}},
        "algorithm.optimizer.lr_warmup_steps_ratio",
        "Remove one",
        {"algorithm.optimizer.lr_warmup_steps_ratio": DROP},
    ),
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
    Wrong(
        "one sample of a set",
        {f"{TASKSET}.repeat_times": 1},
        f"{TASKSET}.repeat_times",
        "2 or more",
        {f"{TASKSET}.repeat_times": 2},
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
    # veRL's keys
    Wrong(
        "two gradient norms",
        {"trainer.grad_clip": 1.0, f"{VERL}.actor.grad_clip": 0.5},
        f"{VERL}.actor.grad_clip",
        "Remove one",
        {f"{VERL}.actor.grad_clip": 1.0},
    ),
    Wrong(
        "kernels of veRL",
        {f"{VERL}.model.use_fused_kernels": True},
        f"{VERL}.model.use_fused_kernels",
        "`trainer_type: verl`",
        {"trainer.trainer_type": "verl"},
    ),
    Wrong(
        "typo in veRL's keys",
        {f"{VERL}.actor.grad_clipp": 1.0},
        f"{VERL}.actor.grad_clipp",
        "actor.grad_clip`",
        {f"{VERL}.actor": {"grad_clip": 1.0}},
    ),
    Wrong(
        "mini-batch of veRL",
        {f"{VERL}.actor.ppo_mini_batch_size": 8},
        f"{VERL}.actor.ppo_mini_batch_size",
        "`buffer.train_batch_size`",
        {f"{VERL}.actor": {}, "buffer.train_batch_size": 8},
    ),
    Wrong(
        "mini-batches that do not fill a step",
        {"trainer.mini_batch_size": 12, "buffer.train_batch_size": 64},
        "trainer.mini_batch_size",
        "one of 4, 8, 16, or `buffer.train_batch_size` to 60",
        {"trainer.mini_batch_size": 16},
    ),
    Wrong(
        "rollout of veRL",
        {f"{VERL}.rollout.temperature": 0.7},
        f"{VERL}.rollout.temperature",
        "`model.temperature`",
        {f"{VERL}.rollout": {}, "model.temperature": 0.7},
    ),
    Wrong(
        "block of veRL at the top",
        {"actor_rollout_ref": {"actor": {"grad_clip": 1.0}}},
        "actor_rollout_ref",
        "`trainer.trainer_config`",
        {"actor_rollout_ref": DROP, f"{VERL}.actor.grad_clip": 1.0},
    ),
]


def _broken(wrong: Wrong) -> dict[str, Any] | str:
    return wrong.edits if isinstance(wrong.edits, str) else with_edits(wrong.edits)


def _repaired(wrong: Wrong) -> dict[str, Any] | str:
    if isinstance(wrong.repair, str):
        return wrong.repair
    assert isinstance(wrong.edits, dict)
    return with_edits(wrong.repair, with_edits(wrong.edits))


def test_there_are_enough():
    assert len({wrong.name for wrong in WRONG}) == len(WRONG) >= 60


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.name)
def test_wrong_file_is_refused_with_a_fix(wrong, tmp_path):
    path = write(tmp_path, _broken(wrong))
    started = time.process_time()
    problems = validate_file(path).problems
    seconds = time.process_time() - started
    told = [problem for problem in problems if problem.key == wrong.key]
    assert told, [str(problem) for problem in problems]
    assert any(wrong.says in problem.fix for problem in told), [problem.fix for problem in told]
    assert told[0].line is not None
    assert seconds < 1


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.name)
def test_the_fix_works(wrong, tmp_path):
    problems = validate_file(write(tmp_path, _repaired(wrong))).problems
    assert [str(problem) for problem in problems] == []


def test_all_problems_are_told_at_once(tmp_path):
    edits = {
        "buffer.batch_sise": 8,
        "mode": "boht",
        "algorithm.repeat_times": 1,
        "model.model_path": "${oc.env:NO_SUCH_VARIABLE}",
        "algorithm.kl_loss_fn": "k9",
    }
    problems = validate_file(write(tmp_path, with_edits(edits))).problems
    assert {problem.key for problem in problems} == set(edits)
    assert [problem.line for problem in problems] == sorted(problem.line for problem in problems)


def test_a_missing_file_is_a_problem(tmp_path):
    [problem] = validate_file(tmp_path / "none.yaml").problems
    assert "There is no file" in problem.message
    [problem] = validate_file(tmp_path).problems
    assert "is a folder" in problem.message
