"""Numbers in sentences."""


def counted(number: float, noun: str) -> str:
    """``1 step``, ``2 steps``, ``1,000 steps``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def every(steps: int) -> str:
    """How often something is done."""
    return "every step" if steps == 1 else f"every {steps} steps"
