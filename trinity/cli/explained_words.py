"""Words and numbers as `trinity explain` shows them."""

from trinity.common.config import Config
from trinity.common.constants import TrainerType

Row = tuple[str, ...]


def number(value: float) -> str:
    """With commas, and two digits behind the point if it is no whole number."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.2f}"


def is_at_service(config: Config) -> bool:
    """Whether the Tinker service trains the model."""
    return config.trainer.trainer_type is TrainerType.TINKER
