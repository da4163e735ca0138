"""Settings of the explorer, its model and the way weights come to it."""

from trinity.common.config.explorer import ExplorerConfig
from trinity.common.config.inference_model import InferenceModelConfig
from trinity.common.config.synchronizer import SynchronizerConfig
from trinity.manager.config_registry.fields import add_fields

EXPLORER = (
    "runner_per_model",
    "max_timeout",
    "max_retry_times",
    "eval_interval",
    "eval_on_startup",
)
ROLLOUT = (
    "engine_type",
    "engine_num",
    "tensor_parallel_size",
    "gpu_memory_utilization",
    "dtype",
    "enable_openai_api",
    "enable_history",
)
SYNCHRONIZER = ("sync_method", "sync_style", "sync_interval", "sync_offset", "sync_timeout")

add_fields("explorer", ExplorerConfig, EXPLORER)
add_fields("explorer.rollout_model", InferenceModelConfig, ROLLOUT, "rollout_")
add_fields("synchronizer", SynchronizerConfig, SYNCHRONIZER)
