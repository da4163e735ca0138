"""Whether the value of an argument is of the type that its annotation names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from trinity.common.config.explain_errors import problems_of
from trinity.common.config.signatures import Parameters
from trinity.common.errors import Problem


def parameters_of_callable(entry: Callable[..., object]) -> Parameters | None:
    """As `trinity.common.config.signatures` reads them, of what is imported."""
    try:
        taken = inspect.signature(entry, eval_str=True).parameters.values()
    except NameError:  # annotated with what only a type checker imports
        taken = inspect.signature(entry).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in taken):
        return None
    return {p.name: Any if p.annotation is p.empty else p.annotation for p in taken}


def type_problems(
    key: str, value: object, annotation: Any, reads_numbers: bool = False
) -> Iterator[Problem]:
    """What is wrong with ``value`` at ``key``, for an argument annotated with ``annotation``.

    Numbers of another kind that mean the same are right (1 for 1.0). A text is no number, unless
    whoever takes it reads one from it. An annotation that pydantic can't check is not judged.
    """
    section, _, name = key.rpartition(".")
    given = {name: value}
    try:
        adapter = TypeAdapter(dict[str, annotation])
    except (PydanticUserError, NameError, TypeError):
        return
    try:
        taken = adapter.validate_python(given)[name]
        is_read = reads_numbers and not isinstance(taken, bool)
        if isinstance(value, str) and isinstance(taken, int | float) and not is_read:
            adapter.validate_python(given, strict=True)
    except ValidationError as error:
        for problem in problems_of(error, given):
            yield replace(problem, key=f"{section}.{problem.key}")
