"""The settings that the Studio knows: each a function that draws it, perhaps one that checks it.

Nothing here needs Streamlit: its session state is handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., object])


class ConfigRegistry:
    """Settings by name. A function `set_batch_size` draws the setting `batch_size`."""

    def __init__(self) -> None:
        self.defaults: dict[str, Any] = {}
        self._draw: dict[str, Callable[..., object]] = {}
        self._is_visible: dict[str, Callable[[], bool]] = {}
        self._checks: dict[str, Callable[..., object]] = {}

    def register_config(
        self,
        default_value: object = None,
        visible: Callable[[], bool] | None = None,
        other_configs: Mapping[str, object] | None = None,
    ) -> Callable[[F], F]:
        """Register `set_<name>`; it is called with ``key=<name>`` and draws a widget of that key.

        Args:
            default_value: Value of the setting before anybody changes it.
            visible: Whether it is drawn now. None: always.
            other_configs: Further entries of the session state and their first values.
        """

        def register(function: F) -> F:
            name = _name_of(function, "set_")
            if name in self._draw:
                raise KeyError(f"The Studio has a setting {name!r} already.")
            self._draw[name] = function
            self.defaults[name] = default_value
            self.defaults.update(other_configs or {})
            if visible is not None:
                self._is_visible[name] = visible
            return function

        return register

    def register_check(self) -> Callable[[F], F]:
        """Register `check_<name>`, called with ``unfinished_fields`` (a set) and ``key=<name>``.

        It adds ``key`` to the set, and says why on the page, if the setting can't stay as it is.
        """

        def register(function: F) -> F:
            self._checks[_name_of(function, "check_")] = function
            return function

        return register

    def names(self) -> list[str]:
        """All settings, in the order they were registered."""
        return list(self._draw)

    def is_visible(self, name: str) -> bool:
        """Whether the setting ``name`` is drawn now."""
        return self._is_visible.get(name, lambda: True)()

    def fill(self, state: MutableMapping[str, Any]) -> None:
        """Give ``state`` the defaults it lacks, and keep what is not drawn this time.

        Streamlit forgets entries of widgets that are not on the page, unless they are set anew.
        """
        for name, default in self.defaults.items():
            state[name] = state.get(name, default)

    def draw(self, name: str, unfinished_fields: set[str]) -> None:
        """Draw a setting and check it; one that is not visible is neither drawn nor checked."""
        if name not in self._draw:
            raise KeyError(f"The Studio has no setting {name!r}; it has {', '.join(self._draw)}.")
        if not self.is_visible(name):
            return
        self._draw[name](key=name)
        if name in self._checks:
            self._checks[name](unfinished_fields=unfinished_fields, key=name)

    def visible(self, names: Iterable[str]) -> list[str]:
        """Those of ``names`` that are drawn now."""
        return [name for name in names if name not in self._draw or self.is_visible(name)]


def _name_of(function: Callable[..., object], prefix: str) -> str:
    name = getattr(function, "__name__", "")
    if not name.startswith(prefix) or name == prefix:
        raise ValueError(f"{name!r} is no name here: it has to be {prefix}<setting>.")
    return name.removeprefix(prefix)


CONFIG_GENERATORS = ConfigRegistry()
"""The settings of the Studio."""
