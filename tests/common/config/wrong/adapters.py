"""Adapters: those that are trained, and those that requests name."""

from tests.common.config.files import DROP
from tests.common.config.wrong.case import LORA, ROLLOUT, Wrong, at

NAMED = [{"name": "one", "path": "/adapters/one"}]
WITH_API = {f"{ROLLOUT}.enable_openai_api": True}
CASES = [
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
        {f"{ROLLOUT}.lora_modules": NAMED, "model.lora_configs": [{"name": "one"}], **WITH_API},
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
        "NCCL with adapters",
        {"model.lora_configs": LORA, "synchronizer.sync_method": "nccl"},
        "synchronizer.sync_method",
        "checkpoint",
        {"synchronizer.sync_method": "checkpoint"},
    ),
    at("two adapters", "model.lora_configs", LORA * 2, "Keep one", LORA),
    Wrong(
        "an adapter too large for vLLM",
        {"model.lora_configs": [{"lora_rank": 1024}], "explorer.rollout_model.engine_type": "vllm"},
        "model.lora_configs.0.lora_rank",
        "Lower it",
        {"model.lora_configs": LORA},
    ),
]
