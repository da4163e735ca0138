"""Numbers in sentences."""


def counted(number: float, noun: str) -> str:
    """``1 step``, ``2 steps``, ``1,000 steps``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
