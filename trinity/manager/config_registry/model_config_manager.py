"""Settings of the run as a whole, of the algorithm and of the model."""

from trinity.common.config import Config
from trinity.common.config.algorithm import AlgorithmConfig, OptimizerConfig
from trinity.common.config.algorithm_table import ALGORITHMS
from trinity.common.config.cluster import ClusterConfig
from trinity.common.config.model import ModelConfig
from trinity.common.config.names import builtin_names
from trinity.manager.config_registry.fields import add_fields

GLOBAL = ("mode", "project", "group", "name", "checkpoint_root_dir", "continue_from_checkpoint")
CLUSTER = ("node_num", "gpu_per_node")
ALGORITHM = ("algorithm_type", "repeat_times", "kl_loss_fn", "kl_loss_fn_args", "loss_agg_mode")
OPTIMIZER = ("lr", "lr_scheduler_type", "lr_warmup_steps", "weight_decay")
MODEL = (
    "model_path",
    "critic_model_path",
    "max_model_len",
    "max_prompt_tokens",
    "max_response_tokens",
    "temperature",
    "top_p",
    "top_k",
    "enable_prompt_truncation",
    "enable_thinking",
    "custom_chat_template",
)

add_fields("", Config, GLOBAL)
add_fields("cluster", ClusterConfig, CLUSTER)
add_fields(
    "algorithm",
    AlgorithmConfig,
    ALGORITHM,
    choices={"algorithm_type": sorted(ALGORITHMS), "kl_loss_fn": sorted(builtin_names()["KL_FN"])},
)
add_fields("algorithm.optimizer", OptimizerConfig, OPTIMIZER)
add_fields("model", ModelConfig, MODEL)
