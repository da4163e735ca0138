"""The Tinker service, and what it does not offer."""

from tests.common.config.files import DROP
from tests.common.config.wrong.case import LORA, TASKSET, Wrong, at

NOT_WITH_TINKER = [
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
CASES = [
    *(
        Wrong(
            f"Tinker and {key}",
            {"model.tinker": {"enable": True}, key: value},
            key,
            says,
            {key: DROP},
        )
        for key, value, says in NOT_WITH_TINKER
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
    at(
        "Tinker's adapter on nothing",
        "model.tinker",
        {"train_mlp": False, "train_attn": False, "train_unembed": False},
        "Set one of them to `true`",
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
]
