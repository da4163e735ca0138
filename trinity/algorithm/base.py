"""What every kind of method has in common: settings with one home, read off the signatures."""

import inspect
from typing import Any


class Method:
    """A method of an algorithm, built from its ``*_args`` in the configuration.

    `__init__` takes the settings and holds their only defaults. Where `__call__` takes tensors by
    name, the trainer passes exactly those that are named; its keyword-only parameters are not
    tensors of the batch.
    """

    @classmethod
    def default_args(cls) -> dict[str, object]:
        """Settings that may stand in the configuration, with their defaults."""
        parameters = inspect.signature(cls).parameters.values()
        return {p.name: p.default for p in parameters if p.default is not p.empty}

    @classmethod
    def inputs(cls) -> list[str]:
        """Tensors that `__call__` names, in order."""
        return [p.name for p in cls._call_parameters()]

    @classmethod
    def optional_inputs(cls) -> list[str]:
        """Those of `inputs` that have a default, and may be left out if the batch lacks them."""
        return [p.name for p in cls._call_parameters() if p.default is not p.empty]

    @classmethod
    def _call_parameters(cls) -> list[inspect.Parameter]:
        call: Any = cls.__call__
        parameters = list(inspect.signature(call).parameters.values())[1:]
        return [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
