"""`SelectedRows`: rows in the order of a selector, as what a formatter makes of them."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from trinity.buffer.rows import BadRow, BadRowError, DataError, Row, Rows
from trinity.buffer.rows.check import RowFault
from trinity.buffer.selector import BaseSelector
from trinity.common.constants import OnBadRow

T = TypeVar("T")

_log = logging.getLogger(__name__)


class SelectedRows(Generic[T]):
    """Rows that were found good at start; later ones may turn out bad when they are read.

    Args:
        form: Makes something of a row and its number; raises `RowFault` if it can't.
        selector: Says which rows come next.
        name: Of the data set, for messages: "the taskset 'train'".
        on_bad_row: What bad rows do: `error` raises, `skip` takes another row and counts it.
        num_bad: Rows left out so far.
    """

    def __init__(
        self,
        rows: Rows,
        form: Callable[[Row, int], T],
        selector: BaseSelector,
        *,
        name: str,
        on_bad_row: OnBadRow = OnBadRow.ERROR,
        num_bad: int = 0,
    ) -> None:
        self.selector = selector
        self.num_bad = num_bad
        self._rows = rows
        self._form = form
        self._name = name
        self._on_bad_row = on_bad_row

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, count: int) -> list[T]:
        """What the next ``count`` usable rows give.

        Raises:
            BadRowError: A row can't be used, and ``on_bad_row`` is `error`.
            DataError: None can.
        """
        found: list[T] = []
        misses = 0
        while len(found) < count:
            indices = self.selector.get_indices(count - len(found))
            assert isinstance(indices, list)
            usable = self.at(indices)
            found += usable
            misses = 0 if usable else misses + len(indices)
            if misses > len(self):
                raise DataError(f"No row that data_selector takes from {self._name} can be used.")
        return found

    def one(self, index: int) -> T:
        """What row ``index`` gives; `RowFault` or `BadRowError` if it can't be used."""
        return self._form(self._rows[index], index)

    def at(self, indices: Sequence[int]) -> list[T]:
        """What these rows give, without those that can't be used."""
        found, bad = [], []
        for index in indices:
            try:
                found.append(self.one(index))
            except RowFault as fault:
                bad.append(BadRow(self._rows.where(index), fault.key, fault.reason))
            except BadRowError as error:
                bad += error.bad_rows
        if bad and self._on_bad_row is OnBadRow.ERROR:
            raise BadRowError(bad)
        for row in bad:
            _log.warning("Left out: %s", row)
        self.num_bad += len(bad)
        return found

    def state_dict(self) -> dict[str, Any]:
        return {"size": len(self), "selector": self.selector.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where ``state`` was saved; `DataError` if there are other rows now."""
        if state.get("size", len(self)) != len(self):
            raise DataError(
                f"{self._name[0].upper()}{self._name[1:]} has {len(self)} rows, but had "
                f"{state['size']} when the checkpoint was saved: a resume would skip or repeat "
                "some. Restore the data, or start under a new name."
            )
        self.selector.load_state_dict(state["selector"])
