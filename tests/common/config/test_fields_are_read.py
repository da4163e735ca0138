"""No key is accepted and then ignored: every leaf field is read by code outside the config."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import trinity
from tests.common.config.files import with_edits
from trinity.common.config import Config
from trinity.common.config.explain_errors import all_keys
from trinity.common.config.unread import UNREAD, find_unread

PACKAGE = Path(trinity.__file__).parent
CONFIG = PACKAGE / "common" / "config"

WORKED_OUT = {
    "derive.py": ["group", "checkpoint_root_dir", "synchronizer.sync_interval"],
    "derive_model.py": [
        "model.external_model.*",
        "explorer.*.external_model_config.enable",
        "model.temperature",
        "model.top_p",
        "model.top_k",
        "model.logprobs",
        "model.repetition_penalty",
    ],
    "derive_data.py": [
        "buffer.explorer_input.taskset",
        "buffer.explorer_input.default_workflow_type",
        "buffer.explorer_input.default_eval_workflow_type",
        "buffer.explorer_input.default_reward_fn_type",
    ],
    "derive_trainer.py": ["algorithm.optimizer.clip_grad"],
    "training.py": [
        "trainer.use_dynamic_bsz",
        "trainer.max_token_len_per_gpu",
        "trainer.enable_gradient_checkpointing",
        "trainer.param_offload",
        "trainer.optimizer_offload",
        "trainer.grad_clip",
        "trainer.ppo_epochs",
        "trainer.trainer_config",
    ],
    "advice.py": ["ignore_validator_suggestions"],
    "check_model.py": ["*.use_v1"],
    "check_adapters.py": ["model.lora_configs.*.lora_dtype"],
    "check_trainer.py": [
        "trainer.fix_actor_microbatch_loss_scale",
        "trainer.use_remove_padding",
    ],
    "algorithm.py": ["algorithm.optimizer.optimizer_type"],
}
"""File of the config -> keys whose whole effect is there: copied to other keys, brought together
for the trainer's backends, or refused but for the one value that is so anyway."""

FEATURES = {
    "engine/vllm": [
        "explorer.*.enable_expert_parallel",
        "explorer.*.nnodes",
        "explorer.*.extra_engine_args",
        "explorer.*.enforce_eager",
        "explorer.*.enable_chunked_prefill",
        "explorer.*.gpu_memory_utilization",
        "explorer.*.enable_log_requests",
        "explorer.*.weight_sync_buffer_size",
        "explorer.*.enable_lora",
        "explorer.*.enable_runtime_lora_updating",
        "explorer.*.lora_modules",
        "explorer.*.lora_kwargs",
        "explorer.*.enable_multimodal",
        "model.fully_sharded_loras",
        "model.max_cpu_loras",
    ],
    "engine/openai": ["explorer.*.external_model_config.*"],
    "trainer/backends/tinker": ["model.tinker.*"],
    "explorer/proxy": [
        "explorer.listen_address",
        "explorer.proxy_port",
        "explorer.service_status_check_interval",
        "explorer.min_running_model_num",
        "explorer.db_url",
    ],
}
"""Folder below `trinity/` -> keys that it reads. While the folder does not exist, nothing can, and
whoever asks for the feature is refused at start."""


@cache
def names_read() -> frozenset[str]:
    """Attributes that are read, and texts, anywhere outside `trinity/common/config`."""
    found: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        if CONFIG in path.parents:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return frozenset(found)


def is_read(key: str) -> bool:
    """Whether the field's own name and those of the sections around it are read somewhere."""
    parts = [part for part in key.split(".") if part not in ("*", "<name>")]
    own, around = parts[-1], [part for part in parts[1:-1] if part not in MOVED]
    return own in names_read() and all(part in names_read() for part in around)


MOVED = {"taskset", "output", "inputs"}
"""Sections that are read under another name: as a list, or by the pipeline that owns them."""


def matches(key: str, patterns: list[str]) -> bool:
    expressions = [re.escape(pattern).replace(r"\*", ".*") for pattern in patterns]
    return any(re.fullmatch(expression, key) for expression in expressions)


def unread() -> list[str]:
    """Keys that nothing reads, but for those that are worked out or have no feature yet."""
    worked_out = [pattern for patterns in WORKED_OUT.values() for pattern in patterns]
    missing = [
        pattern
        for folder, patterns in FEATURES.items()
        if not (PACKAGE / folder).exists()
        for pattern in patterns
    ]
    keys = list(all_keys())
    sections = {key for key in keys if any(other.startswith(f"{key}.") for other in keys)}
    return [
        key
        for key in keys
        if key not in sections
        and not is_read(key)
        and not matches(key, worked_out)
        and not matches(key, missing)
    ]


def test_every_field_is_read_or_refused():
    assert [key for key in unread() if not matches(key, list(UNREAD))] == []


@pytest.mark.parametrize("pattern", UNREAD)
def test_what_is_refused_is_not_read(pattern):
    assert any(matches(key, [pattern]) for key in unread()), "this key is read now: take it out"


def test_a_run_that_sets_an_unread_key_is_refused():
    for pattern, (harmless, _) in UNREAD.items():
        place = "rollout_model" if pattern.startswith("explorer.") else TASKSET
        key = pattern.removesuffix("*").replace("*", place)
        value = [{"lora_rank": 4}] if key == "model.lora_configs" else OTHER[type(harmless)]
        value = not harmless if isinstance(harmless, bool) else value
        value = "single_node" if key == "trainer.save_strategy" else value
        config = Config.model_validate(with_edits({key: value}))
        assert [problem.key for problem in find_unread(config)] == [key]
    assert find_unread(Config.model_validate(with_edits({}))) == []


OTHER = {bool: True, int: 5, str: "other", type(None): "column", dict: {"r": 1}}
TASKSET = "buffer.explorer_input.taskset"


@pytest.mark.parametrize("file", sorted(WORKED_OUT))
def test_fields_worked_out_by_the_config_are(file):
    text = (CONFIG / file).read_text(encoding="utf-8")
    for pattern in WORKED_OUT[file]:
        name = pattern.rpartition(".")[2] if not pattern.endswith("*") else pattern.split(".")[-2]
        assert name in text, pattern
    keys = list(all_keys())
    for pattern in WORKED_OUT[file]:
        assert any(matches(key, [pattern]) for key in keys), pattern


if __name__ == "__main__":
    print("\n".join(unread()))
