"""Words and numbers as `trinity explain` shows them."""

from trinity.common.config import Config
from trinity.common.constants import TrainerType

Row = tuple[str, ...]


def is_at_service(config: Config) -> bool:
    """Whether the Tinker service trains the model."""
    return config.trainer.trainer_type is TrainerType.TINKER
