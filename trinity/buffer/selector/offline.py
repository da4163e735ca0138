"""A curriculum that is known before the run: rows sorted by columns."""

from functools import cached_property

from trinity.buffer.rows import DataError
from trinity.buffer.selector.base import BaseSelector


class OfflineEasy2HardSelector(BaseSelector):
    """Rows with the highest features first (say, a pass rate), then over again.

    Rows are sorted by `feature_keys`, the first key counting most; of equal rows the later one in
    the data comes first.
    """

    @cached_property
    def _order(self) -> list[int]:
        keys = self.config.feature_keys
        if not keys:
            raise DataError(
                "data_selector.feature_keys is empty; offline_easy2hard sorts by it.",
                key="data_selector.feature_keys",
            )
        columns = [self.data_source.column(key) for key in keys]
        features = [(*values, index) for index, values in enumerate(zip(*columns, strict=True))]
        try:
            return [int(row[-1]) for row in sorted(features, reverse=True)]  # type: ignore[call-overload, type-var]  # the index
        except TypeError as error:
            raise DataError(
                f"The columns {', '.join(keys)} can't be sorted: {error}.",
                key="data_selector.feature_keys",
            ) from None

    def get_indices(
        self, batch_size: int, return_extra_info: bool = False
    ) -> list[int] | tuple[list[int], dict[str, object]]:
        start = self.current_index
        indices = [self._order[(start + i) % self.size] for i in range(batch_size)]
        self.current_index += batch_size
        return self._with_info(indices, return_extra_info)
