"""Settings of the trainer, and of what is watched and written."""

from trinity.common.config.log import LogConfig
from trinity.common.config.monitor import MonitorConfig
from trinity.common.config.trainer import TrainerConfig
from trinity.manager.config_registry.fields import add_fields

TRAINER = (
    "trainer_type",
    "trainer_strategy",
    "dtype",
    "save_interval",
    "save_hf_checkpoint",
    "max_checkpoints_to_keep",
    "grad_clip",
    "use_dynamic_bsz",
    "max_token_len_per_gpu",
    "ulysses_sequence_parallel_size",
    "enable_gradient_checkpointing",
    "param_offload",
    "optimizer_offload",
)

add_fields("trainer", TrainerConfig, TRAINER, "trainer_")
add_fields("monitor", MonitorConfig, ("monitor_type", "monitor_args"))
add_fields("log", LogConfig, ("level",), "log_")
