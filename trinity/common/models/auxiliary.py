"""`AuxiliaryClients`: judges and teachers for code that is no workflow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from trinity.common.models.wrapper import ModelWrapper


class AuxiliaryClients(Mapping[str | int, "list[AsyncOpenAI]"]):
    """Async OpenAI clients of auxiliary models, by name and by position.

    Each is made when it is first asked for, so that who asks for none needs no `openai`. The list
    of a model has one client, which spreads its requests over all engines of the model.

    Args:
        models: In the order of `explorer.auxiliary_models`. Of equal names the first counts.
    """

    def __init__(self, models: Sequence[ModelWrapper]) -> None:
        self._models: dict[str | int, ModelWrapper] = dict(enumerate(models))
        for model in models:
            self._models.setdefault(model.model_name, model)
        self._clients: dict[str | int, list[AsyncOpenAI]] = {}

    def __getitem__(self, key: str | int) -> list[AsyncOpenAI]:
        if key not in self._models:
            known = ", ".join(map(repr, self._models)) or "none"
            raise KeyError(
                f"explorer.auxiliary_models has no {key!r}. By name and position there are: {known}"
            )
        if key not in self._clients:
            self._clients[key] = [self._models[key].get_openai_async_client()]
        return self._clients[key]

    def __iter__(self) -> Iterator[str | int]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)
