"""The reader of a data set of experiences: SFT, preference pairs, plain text, saved ones."""

import logging
from collections.abc import Mapping
from typing import Any

from trinity.buffer.rows import BadRow, BadRowError, DataError, Rows
from trinity.buffer.rows.check import RowFault
from trinity.buffer.schema.base import ExperienceFormatter
from trinity.buffer.selector import BaseSelector
from trinity.common.constants import OnBadRow
from trinity.common.experience import EID, Experience

_log = logging.getLogger(__name__)


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
        self.rows = rows
        self.formatter = formatter
        self.selector = selector
        self.name = name
        self.batch_size = batch_size
        self.total = total
        self.on_bad_row = on_bad_row
        self.num_read = 0
        self.num_bad = 0

    def __len__(self) -> int:
        return len(self.rows)

    async def read(self, batch_size: int | None = None, **_: Any) -> list[Experience]:
        """The next full batch.

        Raises:
            StopAsyncIteration: Fewer rows are left than a batch.
            BadRowError: A row can't be used, and `on_bad_row` is `error`.
        """
        size = batch_size or self.batch_size
        if self.total is not None and self.num_read + size > self.total:
            raise StopAsyncIteration
        return self._read(size)  # not in a thread: a cancelled read must not use up rows

    def _read(self, size: int) -> list[Experience]:
        found: list[Experience] = []
        misses = 0
        while len(found) < size:
            wanted = size - len(found)
            indices = self.selector.get_indices(wanted)
            assert isinstance(indices, list)
            found += self._formatted(indices)
            misses = 0 if found else misses + wanted
            if misses > len(self):
                raise DataError(f"No row of {self.name!r} can be used.")
        return found

    def _formatted(self, indices: list[int]) -> list[Experience]:
        found, bad = [], []
        for index in indices:
            try:
                experience = self.formatter.format(self.rows[index])
            except RowFault as fault:
                bad.append(BadRow(self.rows.where(index), fault.key, fault.reason))
                continue
            except BadRowError as error:
                bad += error.bad_rows
                continue
            epoch = self.num_read // len(self)
            if experience.eid.task == "":
                experience.eid = EID(self.name, index, epoch, 0, f"{self.num_read:06x}")
            experience.info.setdefault("index", index)
            found.append(experience)
            self.num_read += 1
        if bad and self.on_bad_row is OnBadRow.ERROR:
            raise BadRowError(bad)
        for row in bad:
            _log.warning("Left out: %s", row)
        self.num_bad += len(bad)
        return found

    def state_dict(self) -> dict[str, Any]:
        return {
            "num_read": self.num_read,
            "size": len(self),
            "selector": self.selector.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not state:
            return
        if state["size"] != len(self):
            raise DataError(
                f"The data set {self.name!r} has {len(self)} rows, but had {state['size']} when "
                "the checkpoint was saved: a resume would skip or repeat rows. Restore the data, "
                "or start under a new name."
            )
        self.num_read = int(state["num_read"])
        self.selector.load_state_dict(state["selector"])
