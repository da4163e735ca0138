"""A file, in full: how it is written, what its keys are, and what contradicts what."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from trinity.common.config.case import Case, cases_of
from trinity.common.config.check import problems_of
from trinity.common.config.loader import read_config
from trinity.common.config.names import known_names
from trinity.common.config.root import Config
from trinity.common.errors import Problem
from trinity.utils.plugins import plugin_dirs_from_env


class Verdict(NamedTuple):
    """The configuration of a file, as far as it could be read, and all that is wrong with it.

    ``cases`` are its stages, each as given and as filled in; none if nothing could be read.
    """

    config: Config | None
    problems: list[Problem]
    cases: list[Case]


def validate_file(
    path: str | Path,
    overrides: Sequence[str] = (),
    plugin_dirs: Iterable[str | Path] = (),
    adapt: Callable[[Config], Config] | None = None,
) -> Verdict:
    """Check a file without Ray, network, GPUs, or a folder being made.

    Args:
        path: The YAML file.
        overrides: ``a.b.c=value`` each.
        plugin_dirs: Folders whose files register names that the file may use; where there are
            none, those in ``TRINITY_PLUGIN_DIRS``.
        adapt: Applied to what was read, before contradictions are looked for.
    """
    config, problems = read_config(path, overrides)
    cases: list[Case] = []
    if config is not None:
        config = adapt(config) if adapt else config
        broken = [problem.key for problem in problems]
        folders = [str(folder) for folder in plugin_dirs] or plugin_dirs_from_env()
        cases = cases_of(config, known_names(folders), folders)
        for problem in problems_of(config, cases):
            if not any(_is_at(problem.key, key) for key in broken if key):
                problems.append(problem)
    return Verdict(config, sorted(problems, key=lambda problem: problem.line or 0), cases)


def _is_at(key: str, broken: str) -> bool:
    """Whether ``key`` is what was left out as broken, or lies in it."""
    return key == broken or key.startswith(f"{broken}.")
