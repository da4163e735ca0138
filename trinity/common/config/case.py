"""What a check looks at: a configuration as given and as filled in."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from trinity.common.config.algorithm_table import AlgorithmSpec
from trinity.common.config.derive import derive, spec_of
from trinity.common.config.fill import is_set, value_at
from trinity.common.config.names import KINDS, Names, builtin_names
from trinity.common.config.nearest import nearest
from trinity.common.config.root import Config
from trinity.common.config.stages import iterate_stages
from trinity.common.constants import Mode, StorageType
from trinity.common.errors import Problem

_MAX_LISTED = 12
"""Names of a registry that are all shown beside the nearest one."""


@dataclass(frozen=True)
class Case:
    """One run to be checked.

    Args:
        given: The configuration of the user.
        config: The same, filled in.
        spec: Its algorithm.
        known: Names a file may use; a registry without names is not judged.
        plugin_dirs: Folders whose names are among them.
    """

    given: Config
    config: Config
    spec: AlgorithmSpec
    known: Names
    plugin_dirs: Sequence[str] = ()

    @property
    def feeds_a_trainer(self) -> bool:
        """Whether a trainer learns from what is sampled, of this command or of another."""
        buffer = self.config.buffer.trainer_input.experience_buffer
        is_to_look_at = buffer is not None and buffer.storage_type is StorageType.FILE
        return self.config.mode.pairs or (self.config.mode is Mode.EXPLORE and not is_to_look_at)

    def is_set(self, key: str) -> bool:
        """Whether the user gave ``key``."""
        return is_set(self.given, key)

    def is_changed(self, key: str) -> bool:
        """Whether the user gave ``key`` a value other than its default."""
        default = value_at(Config(), key.split("."))
        return self.is_set(key) and value_at(self.given, key.split(".")) != default

    def problem(self, key: str, message: str, fix: str) -> Problem:
        """A problem at ``key``, with the value that stands there."""
        return Problem(key, message, fix, _shown(self.config, key))

    def unknown(self, key: str, registry: str, also: Collection[str] = ()) -> Iterator[Problem]:
        """A problem if the name at ``key`` is in no registry; dotted paths are not judged."""
        name = value_at(self.config, key.split("."))
        names = self.known.get(registry, frozenset())
        if not name or not names or "." in name or name in names or name in also:
            return
        close = nearest(name, names)
        parts = [f"Did you mean `{close}`?"] if close else []
        if not close or len(names) <= _MAX_LISTED:
            parts.append(f"Known: {', '.join(sorted(names))}.")
        parts.append(self._of_your_own(registry))
        fix = " ".join(parts)
        yield self.problem(key, f"No {KINDS[registry]} is called {name!r}.", fix)

    def _of_your_own(self, registry: str) -> str:
        """Where a name would come from that does not ship with trinity."""
        by_path = "name it by path: `my_package.my_module.Name`."
        if not self.plugin_dirs:
            return f"For one of your own, pass its folder with --plugin-dir, or {by_path}"
        own = self.known[registry] - builtin_names()[registry]
        found = f"only {', '.join(sorted(own))}" if own else f"no {KINDS[registry]}"
        where = ", ".join(self.plugin_dirs)
        return f"The plugins in {where} register {found}: correct the folder, or {by_path}"


def cases_of(
    config: Config, known: Names | None = None, plugin_dirs: Sequence[str] = ()
) -> list[Case]:
    """One for each stage of ``config``, in order; a file without stages has one."""
    names = builtin_names() if known is None else known
    return [
        Case(stage, derive(stage).config, spec_of(stage), names, plugin_dirs)
        for _, stage in iterate_stages(config)
    ]


Check = Callable[[Case], Iterator[Problem]]


def _shown(config: Config, key: str) -> object:
    try:
        value = value_at(config, key.split("."))
    except (AttributeError, KeyError, IndexError, ValueError):
        return None
    return value if isinstance(value, str | int | float | bool) and value != "" else None
