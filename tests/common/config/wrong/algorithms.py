"""Settings that an algorithm cannot work with, and those that it lacks."""

from tests.common.config.files import DROP
from tests.common.config.wrong.case import EXPERIENCES, SFT, TASKSET, Wrong, at

MIX = {
    "algorithm": {"algorithm_type": "mix"},
    "buffer.trainer_input.auxiliary_buffers": {"sft_dataset": {"path": "/sft"}},
}

CASES = [
    at("one sample with GRPO", "algorithm.repeat_times", 1, "8", 8),
    *(
        at(f"a text for {key}", f"algorithm.{key}", value, "Write a number", right)
        for key, value, right in (
            ("policy_loss_fn_args.clip_range", "abc", 0.2),
            ("policy_loss_fn_args.clip_range_low", "0.2", 0.2),
            ("kl_loss_fn_args.kl_coef", "small", 1),
            ("kl_penalty_fn_args.kl_coef", [0.1], 0.1),
            ("entropy_loss_fn_args.entropy_coef", "tiny", 1e-6),
            ("advantage_fn_args.std_threshold", "none", None),
            ("rollout_correction.rollout_is_threshold", "two", 2),
        )
    ),
    at("a word for true", "algorithm.kl_loss_fn_args.adaptive", "yes", "`true` or `false`", True),
    at(
        "a word that no method knows",
        "algorithm.advantage_fn_args.std_cal_level",
        "grop",
        "Did you mean `group`?",
        "group",
    ),
    at(
        "a KL penalty after the advantage",
        "algorithm.kl_penalty_fn",
        "k2",
        "Set `advantage_fn: grpo_verl`",
        "none",
    ),
    Wrong(
        "a KL penalty of an advantage by steps",
        {"algorithm": {"algorithm_type": "multi_step_grpo", "kl_penalty_fn": "k2"}},
        "algorithm.kl_penalty_fn",
        "Set `kl_penalty_fn: none`",
        {"algorithm.kl_penalty_fn": "none", "algorithm.kl_loss_fn": "k2"},
    ),
    Wrong(
        "a KL penalty without an advantage",
        {"algorithm": {"algorithm_type": "raft", "kl_penalty_fn": "k2"}},
        "algorithm.kl_penalty_fn",
        "Set `kl_penalty_fn: none`",
        {"algorithm.kl_penalty_fn": "none"},
    ),
    Wrong(
        "half a row",
        {"algorithm": {"algorithm_type": "jsd", "advantage_fn_args": {"chunk_size": 1.5}}},
        "algorithm.advantage_fn_args.chunk_size",
        "digits only",
        {
            "algorithm.advantage_fn_args": {"chunk_size": 8.0},
            "explorer.auxiliary_models": [{"model_path": "/teacher"}],
        },
    ),
    Wrong(
        "three samples with DPO",
        {**SFT, "algorithm": {"algorithm_type": "dpo", "repeat_times": 3}},
        "algorithm.repeat_times",
        "`repeat_times: 2`",
        {"algorithm.repeat_times": 2},
    ),
    Wrong(
        "pairs for SFT",
        {**SFT, EXPERIENCES: {"path": "/data/pairs", "schema_type": "dpo"}},
        f"{EXPERIENCES}.schema_type",
        "`schema_type: sft`",
        {f"{EXPERIENCES}.schema_type": "sft"},
    ),
    Wrong(
        "single answers for DPO",
        {
            **SFT,
            "algorithm": {"algorithm_type": "dpo"},
            EXPERIENCES: {"path": "/data/answers", "schema_type": "sft"},
        },
        f"{EXPERIENCES}.schema_type",
        "`schema_type: dpo`",
        {f"{EXPERIENCES}.schema_type": DROP},
    ),
    Wrong(
        "a kind of rows that there is not",
        {**SFT, EXPERIENCES: {"path": "/data/sft", "schema_type": "sftt"}},
        f"{EXPERIENCES}.schema_type",
        "`sft`",
        {f"{EXPERIENCES}.schema_type": "sft"},
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
        "expert data missing",
        {"algorithm": {"algorithm_type": "mix"}},
        "buffer.trainer_input.auxiliary_buffers.sft_dataset",
        "`sft_dataset`",
        {"buffer.trainer_input.auxiliary_buffers": {"sft_dataset": {"path": "/sft"}}},
    ),
    Wrong(
        "a share of expert data that is none",
        {**MIX, "algorithm.sample_strategy_args": {"expert_data_ratio": "half"}},
        "algorithm.sample_strategy_args.expert_data_ratio",
        "such as `0.1`",
        {"algorithm.sample_strategy_args": {"expert_data_ratio": 0.5}},
    ),
    Wrong(
        "more expert data than a batch has",
        {**MIX, "algorithm.sample_strategy_args": {"expert_data_ratio": 1.5}},
        "algorithm.sample_strategy_args.expert_data_ratio",
        "such as `0.5`",
        {"algorithm.sample_strategy_args": {"expert_data_ratio": 0.5}},
    ),
    Wrong(
        "a list as the name of the expert data",
        {**MIX, "algorithm.sample_strategy_args": {"sft_dataset_name": ["sft_dataset"]}},
        "buffer.trainer_input.auxiliary_buffers.['sft_dataset']",
        "auxiliary_buffers",
        {"algorithm.sample_strategy_args": {"sft_dataset_name": "sft_dataset"}},
    ),
    Wrong(
        "an unknown way to add up losses among the arguments of the loss",
        {"algorithm.policy_loss_fn_args": {"loss_agg_mode": "token_mean"}},
        "algorithm.policy_loss_fn_args.loss_agg_mode",
        "token-mean",
        {"algorithm.policy_loss_fn_args": {"loss_agg_mode": "token-mean"}},
    ),
    Wrong(
        "a list of ways to add up losses",
        {"algorithm.policy_loss_fn_args": {"loss_agg_mode": ["token-mean"]}},
        "algorithm.policy_loss_fn_args.loss_agg_mode",
        "token-mean",
        {"algorithm.policy_loss_fn_args": {"loss_agg_mode": "token-mean"}},
    ),
    Wrong(
        "teacher missing",
        {"algorithm": {"algorithm_type": "jsd"}},
        "explorer.auxiliary_models",
        "`- model_path: ...`",
        {"explorer.auxiliary_models": [{"model_path": "/teacher"}]},
    ),
    at("critic warm-up without a critic", "trainer.critic_warmup", 5, "Set it to 0", 0),
    Wrong(
        "warm-up twice",
        {"algorithm.optimizer": {"lr_warmup_steps": 5, "lr_warmup_steps_ratio": 0.1}},
        "algorithm.optimizer.lr_warmup_steps_ratio",
        "Remove one",
        {"algorithm.optimizer.lr_warmup_steps_ratio": DROP},
    ),
    at("one sample of a set", f"{TASKSET}.repeat_times", 1, "2 or more", 2),
    Wrong(
        "one sample of a set for a trainer in another command",
        {"mode": "explore", f"{TASKSET}.repeat_times": 1},
        f"{TASKSET}.repeat_times",
        "2 or more",
        {f"{TASKSET}.repeat_times": 2},
    ),
]
