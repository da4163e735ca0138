from trinity.buffer.operators.base import (
    EXPERIENCE_OPERATORS,
    ExperienceOperator,
    ExperienceOperatorV1,
    create_operators,
)

__all__ = [
    "EXPERIENCE_OPERATORS",
    "ExperienceOperator",
    "ExperienceOperatorV1",
    "create_operators",
]
