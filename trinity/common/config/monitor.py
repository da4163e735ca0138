"""The `monitor:` section: where metrics go."""

from typing import Any

from trinity.common.config.base import ConfigModel


class MonitorConfig(ConfigModel):
    """Where metrics go."""

    monitor_type: str = "tensorboard"
    """Registered monitor: `tensorboard`, `wandb`, `mlflow`, `swanlab`, or one of a plugin."""

    monitor_args: dict[str, Any] | None = None
    """Arguments of the monitor, merged over its defaults (wandb: `base_url`, `api_key`;
    mlflow: `uri`, `username`, `password`)."""

    detailed_stats: bool = False
    """Log mean, max, min and std of every eval metric, not only its mean."""

    enable_ray_timeline: bool = False
    """Write `<job>/monitor/timeline.json` at the end, for chrome://tracing."""

    cache_dir: str = ""
    """Folder of the monitor's files. Empty: `<job>/monitor`."""
