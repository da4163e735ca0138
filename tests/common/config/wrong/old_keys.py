"""Keys of other times and tools, and keys that are worked out at start."""

from tests.common.config.files import DROP
from tests.common.config.wrong.case import ROLLOUT, VERL, Wrong, at

CASES = [
    at("removed file", "trainer.trainer_config_path", "x.yaml", "`trainer.trainer_config`"),
    Wrong(
        "removed number",
        {"explorer.runner_num": 4},
        "explorer.runner_num",
        "`explorer.runner_per_model`",
        {"explorer.runner_num": DROP, "explorer.runner_per_model": 4},
    ),
    at("computed key", "cluster.trainer_gpu_num", 2, "Remove"),
    at("computed key of a model", f"{ROLLOUT}.engine_id", 0, "Remove"),
    Wrong(
        "old and new spelling",
        {"algorithm.optimizer": {"warmup_style": "cosine", "lr_scheduler_type": "constant"}},
        "algorithm.optimizer.warmup_style",
        "Remove `warmup_style`",
        {"algorithm.optimizer.warmup_style": DROP},
    ),
    at("V0 engine", f"{ROLLOUT}.use_v1", False, "Remove it"),
    Wrong(
        "mini-batch of veRL",
        {f"{VERL}.actor.ppo_mini_batch_size": 8},
        f"{VERL}.actor.ppo_mini_batch_size",
        "`buffer.train_batch_size`",
        {f"{VERL}.actor": {}, "buffer.train_batch_size": 8},
    ),
    Wrong(
        "rollout of veRL",
        {f"{VERL}.rollout.temperature": 0.7},
        f"{VERL}.rollout.temperature",
        "`model.temperature`",
        {f"{VERL}.rollout": {}, "model.temperature": 0.7},
    ),
    at("veRL's name for a key of ours", "trainer.save_freq", 20, "Write `trainer.save_interval`"),
    at("veRL's resume_mode", "trainer.resume_mode", "auto", "Write `continue_from_checkpoint`"),
    at("veRL's own folder", "trainer.default_hdfs_dir", None, "trainer.trainer_config.trainer"),
    at("veRL's resume_from_path", "trainer.resume_from_path", "", "start from another by"),
    Wrong(
        "block of veRL at the top",
        {"actor_rollout_ref": {"actor": {"grad_clip": 1.0}}},
        "actor_rollout_ref",
        "`trainer.trainer_config`",
        {"actor_rollout_ref": DROP, f"{VERL}.actor.grad_clip": 1.0},
    ),
]
