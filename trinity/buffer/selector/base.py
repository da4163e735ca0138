"""What a selector is: it says which rows of a data set come next."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import ClassVar

import numpy as np

from trinity.buffer.rows import BadRow, BadRowError, DataError, Row, Rows, iterate, lookup
from trinity.common.config.buffer import DataSelectorConfig


class DataSource:
    """What a selector may know of the data: its size and its columns."""

    def __init__(self, rows: Rows) -> None:
        self.dataset = rows

    @cached_property
    def dataset_size(self) -> int:
        return len(self.dataset)

    def column(self, key: str) -> list[object]:
        """Every value of a column; reads the whole data set."""
        return [_value(row, key) for _, row in iterate(self.dataset)]


def _value(row: Row | BadRow, key: str) -> object:
    if isinstance(row, BadRow):
        raise BadRowError([row])
    try:
        return lookup(row, key)
    except KeyError:
        raise DataError(
            f"data_selector.feature_keys names {key!r}, which a row lacks; it has: "
            f"{', '.join(row)}.",
            key="data_selector.feature_keys",
        ) from None


class BaseSelector(ABC):
    """Base of selectors. ``current_index`` counts the samples given out so far."""

    default_kwargs: ClassVar[Mapping[str, object]] = {}

    def __init__(self, data_source: DataSource, config: DataSelectorConfig) -> None:
        self.data_source = data_source
        self.config = config
        self.seed = config.seed
        self.current_index = 0
        unknown = [key for key in config.kwargs if key not in self.default_kwargs]
        if unknown:
            known = ", ".join(self.default_kwargs) or "none"
            raise DataError(
                f"data_selector.kwargs has {unknown[0]!r}, which {config.selector_type!r} "
                f"doesn't take. It takes: {known}.",
                key="data_selector.kwargs",
            )

    @property
    def size(self) -> int:
        """Rows there are to select from."""
        return self.data_source.dataset_size

    @abstractmethod
    def get_indices(
        self, batch_size: int, return_extra_info: bool = False
    ) -> list[int] | tuple[list[int], dict[str, object]]:
        """The next ``batch_size`` rows, by number; with ``return_extra_info`` also why these."""

    def feedback(self, indices: Sequence[int], values: Sequence[float]) -> None:  # noqa: B027
        """How the rows given out did (pass rates in [0, 1]). A curriculum learns from it."""

    def metrics(self) -> dict[str, float]:
        """Numbers about the selection, for the monitor."""
        return {}

    def state_dict(self) -> dict[str, object]:
        return {"current_index": self.current_index}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self.current_index = int(state.get("current_index", 0))  # type: ignore[call-overload]  # int

    def _with_info(
        self, indices: Sequence[int] | np.ndarray, return_extra_info: bool
    ) -> list[int] | tuple[list[int], dict[str, object]]:
        chosen = [int(index) for index in indices]
        return (chosen, {}) if return_extra_info else chosen
