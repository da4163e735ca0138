"""Adapters that the embedded engine has beside the weights that updates bring."""

from copy import deepcopy

from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel

from trinity.common.models.adapters import AdapterSettings, add_adapter_inplace
from trinity.common.models.lean import make_lean_inplace
from trinity.common.models.loading import cast_parameters
from trinity.common.models.protocol import NamedAdapter
from trinity.engine.torch.batcher import Batcher
from trinity.engine.torch.limits import Limits

_MAX_ADAPTERS = 8  # unless there are more from the start: they share the memory for keys and values
_OWN_NAME = "named"  # within a model, where a name may have no dots


class NamedAdapters:
    """Each is a model of its own with a batcher of its own, whose base weights are the engine's.

    So an update of these reaches all of them, and requests of several adapters never mix.

    Args:
        model: Before anything else is done to it: adapters are put on copies of its modules.
        limits: Of all of them together.
        num_at_start: Adapters that there will be in any case.
    """

    def __init__(
        self, model: PreTrainedModel, limits: Limits, eos_ids: tuple[int, ...], num_at_start: int
    ) -> None:
        self._bare = _sharing_weights(model)
        self._most = max(num_at_start, _MAX_ADAPTERS)
        self._limits = limits.share(1 / self._most)
        self._eos_ids = eos_ids
        self._adapters: dict[str, NamedAdapter] = {}
        self.batchers: dict[str, Batcher] = {}

    @property
    def adapters(self) -> list[NamedAdapter]:
        return list(self._adapters.values())

    def load(self, adapter: NamedAdapter, version: int) -> None:
        """Have ``adapter``, on base weights of ``version``.

        Raises:
            ValueError: The name is taken, there are too many, or the files don't fit the model.
        """
        if adapter.name in self._adapters:
            raise ValueError(f"The adapter {adapter.name!r} is loaded already.")
        if len(self._adapters) == self._most:
            raise ValueError(f"The engine has {self._most} adapters, the most: unload one first.")
        model = _sharing_weights(self._bare)
        try:
            add_adapter_inplace(model, AdapterSettings(name=_OWN_NAME, path=adapter.path))
        except (OSError, SafetensorError, ValueError) as error:
            raise ValueError(f"The adapter {adapter.name!r} can't be loaded: {error}") from error
        cast_parameters(model, self._bare.dtype)
        if model.device.type == "cpu":
            make_lean_inplace(model)
        batcher = Batcher(model, self._limits, self._eos_ids)
        batcher.version = version
        batcher.probe()
        self._adapters[adapter.name], self.batchers[adapter.name] = adapter, batcher

    def unload(self, name: str) -> None:
        """Have it no longer; what runs on it fails."""
        if name not in self._adapters:
            raise LookupError(f"The engine has no adapter {name!r}.")
        self.batchers[name].fail_all(ValueError(f"The adapter {name!r} was unloaded."))
        del self._adapters[name], self.batchers[name]


def _sharing_weights(model: PreTrainedModel) -> PreTrainedModel:
    """The same modules once more, with the very parameters and buffers of ``model``."""
    shared: list[nn.Parameter] = [*model.parameters()]
    kept = {id(tensor): tensor for tensor in [*shared, *model.buffers()]}
    return deepcopy(model, kept)  # type: ignore[arg-type]  # a memo of tensors
