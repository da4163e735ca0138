from trinity.buffer.selector.base import BaseSelector, DataSource
from trinity.utils.registry import Registry

_HOME = "trinity.buffer.selector"
SELECTORS: Registry[type[BaseSelector]] = Registry(
    "data selector",
    {
        "sequential": f"{_HOME}.basic.SequentialSelector",
        "shuffle": f"{_HOME}.basic.ShuffleSelector",
        "random": f"{_HOME}.basic.RandomSelector",
        "offline_easy2hard": f"{_HOME}.offline.OfflineEasy2HardSelector",
        "difficulty_based": f"{_HOME}.difficulty.DifficultyBasedSelector",
    },
)

__all__ = ["SELECTORS", "BaseSelector", "DataSource"]
