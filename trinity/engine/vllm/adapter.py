"""The adapter that vLLM samples with: a folder that its workers read at every update."""

import tempfile
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from vllm.lora.request import LoRARequest

from trinity.common.models.adapter_files import read_adapter
from trinity.common.models.adapters import (
    AdapterFolder,
    AdapterSettings,
    adapter_on_empty_model,
)
from trinity.engine.vllm.shipping import Check

NUMBER = 1
"""By which vLLM knows it."""


class ServedAdapter:
    """The adapter that weight updates are for: every request that names no other goes through it.

    Lifecycle: ``prepare`` -> ``write`` before each update -> ``cleanup``.

    Args:
        model_path: Of the model below it.
    """

    def __init__(
        self, settings: AdapterSettings, model_path: str, trust_remote_code: bool = False
    ) -> None:
        self.name = settings.name
        self._settings = settings
        self._model = (model_path, trust_remote_code)
        self._place: tempfile.TemporaryDirectory[str] | None = None

    @property
    def rank(self) -> int:
        """Of its update matrices."""
        return int(str(self._blank.config["r"]))

    def prepare(self, dtype: torch.dtype) -> None:
        """Write what is sampled with first: the adapter to start from, or one of zeros."""
        if self._place is None:
            self._place = tempfile.TemporaryDirectory(prefix="trinity_adapter_")
        path = self._settings.path
        if path is not None:
            found = read_adapter(Path(path), self.name)
            self.write(((name, tensor.to(dtype)) for name, tensor in found), dtype)
            return
        empty = self._blank.weights.items()
        self.write(((name, torch.zeros(w.shape, dtype=dtype)) for name, w in empty), dtype)

    def write(self, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> None:
        """Replace the files by ``weights``, named as in the model.

        Raises:
            ValueError: A name, shape or dtype is not the adapter's, or a weight is missing.
        """
        shapes = {name: tuple(weight.shape) for name, weight in self._blank.weights.items()}
        check = Check(shapes, dtype)
        taken: dict[str, Tensor] = {}
        for name, tensor in weights:
            check.take(name, tuple(tensor.shape), tensor.dtype)
            taken[name] = tensor
        check.finish()
        AdapterFolder(taken, self._blank.config).write(self.folder)

    @property
    def folder(self) -> Path:
        assert self._place is not None, "prepare() comes first"
        return Path(self._place.name)

    @property
    def request(self) -> LoRARequest:
        """What a request is sent with."""
        return LoRARequest(self.name, NUMBER, str(self.folder))

    @property
    def update(self) -> LoRARequest:
        """What has the workers read the files anew."""
        return LoRARequest(self.name, NUMBER, str(self.folder), load_inplace=True)

    def cleanup(self) -> None:
        """Remove the files."""
        if self._place is not None:
            self._place.cleanup()

    @cached_property
    def _blank(self) -> AdapterFolder:
        """Names, shapes and PEFT's settings; the weights have no values."""
        return adapter_on_empty_model(self._settings, *self._model)
