"""Numbers and addresses in sentences."""

from typing import NamedTuple


class Span(NamedTuple):
    """The least and the most that a number can be: ``8``, or ``4 to 8``."""

    least: float
    most: float

    def times(self, factor: float) -> "Span":
        """Both ends times ``factor``."""
        return Span(self.least * factor, self.most * factor)

    def __str__(self) -> str:
        ends = dict.fromkeys(map(number, self))
        return " to ".join(ends)


def number(value: float) -> str:
    """With commas, and two digits behind the point if it is no whole number."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.2f}"


def counted(number: float, noun: str) -> str:
    """``1 step``, ``2 steps``, ``1,000 steps``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def every(steps: int) -> str:
    """How often something is done."""
    return "every step" if steps == 1 else f"every {steps} steps"


def without_password(address: str) -> str:
    """``address`` as it may be shown and logged: ``sql://me:***@host/name``."""
    head, sign, place = address.rpartition("@")
    scheme, mark, login = head.partition("://")
    if not (sign and mark) or " " in head:
        return address
    user, colon, _ = login.partition(":")
    return f"{scheme}{mark}{user}{':***' if colon else ''}@{place}"
