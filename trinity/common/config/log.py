"""The `log:` section: the log files of a run's parts."""

from trinity.common.config.base import ConfigModel
from trinity.common.constants import LogLevel


class LogConfig(ConfigModel):
    """The log files of a run's parts."""

    level: LogLevel = LogLevel.INFO
    """Least severe message that is kept: `DEBUG`, `INFO`, `WARNING` or `ERROR`."""

    group_by_node: bool = False
    """Keep the files of each machine in a folder of its own, named by its address."""

    save_dir: str = ""
    """Folder of the log files. Empty: `<job>/log`."""
