"""The errors trinity raises on purpose. Whoever embeds it catches `TrinityError`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class TrinityError(Exception):
    """Something a user can act on; shown as its text, without a traceback.

    ``exit_code`` is what the command line returns.
    """

    exit_code = 1


ARGUMENT = 0
"""The line of a key that an argument of the command sets."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a configuration file.

    Args:
        key: Dotted key, e.g. ``buffer.explorer_input.eval_tasksets.0.path``; empty for the file.
        message: What is wrong, as a sentence.
        fix: What to do, as a sentence.
        value: What stands there, as the user wrote it; None where nothing does.
        line: Line in the file, from 1; `ARGUMENT`; None for a key that is in neither.
    """

    key: str
    message: str
    fix: str = ""
    value: object = None
    line: int | None = None

    def __str__(self) -> str:
        place = f"line {self.line}: " if self.line else ""
        if self.line == ARGUMENT:
            place = "argument "
        shown = "" if self.value is None else f" = {_short(self.value)}"
        parts = [f"{place}{self.key}{shown}" if self.key else place.rstrip(": ")]
        parts += [f"  {text}" for text in (self.message, self.fix) if text]
        return "\n".join(part for part in parts if part)


class ConfigError(TrinityError, ValueError):
    """A configuration that cannot run. ``problems`` are all that were found, not the first."""

    exit_code = 2

    def __init__(self, problems: Sequence[Problem], path: str = "") -> None:
        self.problems = list(problems)
        self.path = path
        super().__init__(self._text())

    def _text(self) -> str:
        count = len(self.problems)
        noun = "problem" if count == 1 else "problems"
        where = f" in {self.path}" if self.path else " in the configuration"
        return "\n".join([f"{count} {noun}{where}", *map(str, self.problems)])


class NotSetUpError(TrinityError):
    """What all runs of a workflow need is not there: a package, a database, a variable.

    The text says how to get it. Raised in a workflow, it ends the job at the first run.
    """

    exit_code = 2


class MissingExtraError(NotSetUpError, ImportError):
    """An optional package is asked for and not installed."""

    def __init__(self, package: str, extra: str, wanted_by: str = "") -> None:
        self.package, self.extra, self.wanted_by = package, extra, wanted_by
        needs = f"{wanted_by} needs" if wanted_by else "This needs"
        super().__init__(
            f"{needs} the package {package!r}, which is not installed. "
            f"Install it with: pip install 'trinity-rft[{extra}]'"
        )

    def __reduce__(self) -> tuple[type[MissingExtraError], tuple[str, str, str]]:
        return type(self), (self.package, self.extra, self.wanted_by)


class DeadlineError(TrinityError, TimeoutError):
    """Someone was waited for too long. The text says who, in which phase, and since when."""

    def __init__(self, waited_for: str, phase: str, seconds: float, hint: str = "") -> None:
        self.waited_for, self.phase, self.seconds, self.hint = waited_for, phase, seconds, hint
        text = f"Waited {seconds:.0f} s for {waited_for} during {phase}, in vain."
        super().__init__(f"{text} {hint}".rstrip())

    def __reduce__(self) -> tuple[type[DeadlineError], tuple[str, str, float, str]]:
        return type(self), (self.waited_for, self.phase, self.seconds, self.hint)


def _short(value: object) -> str:
    text = repr(str(value)) if isinstance(value, str) else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
