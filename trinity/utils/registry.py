"""Names in a YAML file -> Python objects. The one registry class of the project."""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import Generic, TypeVar, cast, overload

T = TypeVar("T")


class UnknownNameError(LookupError):
    """A name in the config matches nothing registered."""


class Registry(Generic[T]):
    """Objects of one kind, by name.

    Built-ins are dotted paths, imported on first use, so that reading a config never imports
    an engine. Plugins use the decorator; a config may also name any object by its path.

    Args:
        kind: What an entry is, in the singular, for error messages: "policy loss".
        builtins: Name -> "package.module.Object" of what ships with trinity.
    """

    def __init__(self, kind: str, builtins: Mapping[str, str] | None = None) -> None:
        self.kind = kind
        self._builtins = dict(builtins or {})
        self._loaded: dict[str, T] = {}

    @overload
    def register_module(
        self, name: str, module_cls: None = None, force: bool = False
    ) -> Callable[[T], T]: ...

    @overload
    def register_module(self, name: str, module_cls: T, force: bool = False) -> T: ...

    def register_module(
        self, name: str, module_cls: T | None = None, force: bool = False
    ) -> Callable[[T], T] | T:
        """Decorator, or a call with ``module_cls``: make an object known as ``name``.

        A name among the built-ins may be registered by the very object it points to.

        Args:
            force: Take the place of what has the name by now; else that is a `ValueError`.
        """

        def register(entry: T) -> T:
            self._register(name, entry, force)
            return entry

        return register if module_cls is None else register(module_cls)

    def _register(self, name: str, entry: T, force: bool) -> None:
        path = f"{getattr(entry, '__module__', '')}.{getattr(entry, '__qualname__', '')}"
        if not force and name in self.names() and self._builtins.get(name) != path:
            raise ValueError(f"The {self.kind} name {name!r} is taken; pick another.")
        self._loaded[name] = entry

    def get(self, name: str) -> T:
        """The object called ``name``, or found at the dotted path ``name``.

        Raises:
            UnknownNameError: Nothing has that name; the message names the nearest one.
            ImportError: The module of a dotted path or of a built-in cannot be imported.
        """
        if name not in self._loaded:
            module_name, _, attribute = self._builtins.get(name, name).rpartition(".")
            if not module_name:
                raise UnknownNameError(self._unknown(name))
            module = import_module(module_name)
            if not hasattr(module, attribute):
                raise UnknownNameError(
                    f"{module_name} has no {attribute!r} ({self.kind} {name!r})."
                )
            self._loaded[name] = cast(T, getattr(module, attribute))
        return self._loaded[name]

    def names(self) -> list[str]:
        """All names, built-in and registered, sorted."""
        return sorted({*self._builtins, *self._loaded})

    def shipped(self) -> list[str]:
        """Names of what ships with trinity, sorted."""
        return sorted(self._builtins)

    def __contains__(self, name: str) -> bool:
        return name in self._loaded or name in self._builtins

    def _unknown(self, name: str) -> str:
        close = get_close_matches(name, self.names(), n=1)
        return (
            f"No {self.kind} is called {name!r}."
            + (f" Did you mean {close[0]!r}?" if close else "")
            + f" Known: {', '.join(self.names())}. For one of your own, pass its folder with"
            f" --plugin-dir, or name it by path, e.g. 'my_package.my_module.{name}'."
        )
