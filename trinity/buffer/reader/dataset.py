"""The reader of a data set of experiences: SFT, preference pairs, plain text, saved ones."""

from collections.abc import Mapping
from typing import Any

from trinity.buffer.rows import Row, Rows
from trinity.buffer.schema.base import ExperienceFormatter
from trinity.buffer.selected import SelectedRows
from trinity.buffer.selector import BaseSelector
from trinity.common.constants import OnBadRow
from trinity.common.experience import EID, Experience


class DatasetReader:
    """Reads batches of a data set by a selector. Its state is how many rows it gave out.

    Args:
        rows: The rows.
        formatter: Makes an experience of a row.
        selector: Says which rows come next.
        name: Name of the buffer; the experiences' ids start with it.
        batch_size: Experiences of a read that names no number.
        total: Experiences there are to read in all; None: no end.
    """

    def __init__(
        self,
        rows: Rows,
        formatter: ExperienceFormatter,
        selector: BaseSelector,
        *,
        name: str = "dataset",
        batch_size: int = 1,
        total: int | None = None,
        on_bad_row: OnBadRow = OnBadRow.ERROR,
    ) -> None:
        self.name = name
        self.batch_size = batch_size
        self.total = total
        self.num_read = 0
        self._formatter = formatter
        self._rows = SelectedRows(
            rows, self._experience, selector, name=f"the data set {name!r}", on_bad_row=on_bad_row
        )

    @property
    def num_bad(self) -> int:
        """Rows left out so far."""
        return self._rows.num_bad

    def __len__(self) -> int:
        return len(self._rows)

    async def read(self, batch_size: int | None = None, **_: Any) -> list[Experience]:
        """The next full batch.

        Raises:
            StopAsyncIteration: Fewer rows are left than a batch.
            BadRowError: A row can't be used, and `on_bad_row` is `error`.
        """
        size = batch_size or self.batch_size
        if self.total is not None and self.num_read + size > self.total:
            raise StopAsyncIteration
        return self._rows.take(size)  # not in a thread: a cancelled read must not use up rows

    def _experience(self, row: Row, index: int) -> Experience:
        experience = self._formatter.format(row)
        epoch = self.num_read // len(self)
        if experience.eid.task == "":
            experience.eid = EID(self.name, index, epoch, 0, f"{self.num_read:06x}")
        experience.info.setdefault("index", index)
        self.num_read += 1
        return experience

    def state_dict(self) -> dict[str, Any]:
        return {"num_read": self.num_read, **self._rows.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            self._rows.load_state_dict(state)
            self.num_read = int(state["num_read"])
