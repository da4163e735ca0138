"""Rows of `reasoning_gym`: generated, verifiable tasks, the same for the same arguments."""

from typing import Any
from urllib.parse import parse_qsl

from trinity.buffer.rows.base import DataError, Row
from trinity.common.extras import needed


def reasoning_rows(spec: str) -> "ReasoningRows":
    """The data set that ``spec`` names, as `name` or `name?size=500&seed=1&max_terms=3`.

    Raises:
        DataError: No such data set, or it refuses an argument.
    """
    gym = needed("reasoning_gym", "gym", "storage_type: reasoning_gym")
    name, _, query = spec.partition("?")
    arguments = {key: number(value) for key, value in parse_qsl(query)}
    try:
        return ReasoningRows(name, gym.create_dataset(name, **arguments))
    except (ValueError, TypeError, AssertionError) as error:
        raise DataError(f"reasoning_gym can't make {spec!r}: {error}") from error


class ReasoningRows:
    """Tasks with `question`, `answer`, `metadata` and `dataset_name`, made when asked for."""

    columns = ["question", "answer", "metadata", "dataset_name"]  # noqa: RUF012  # Rows' attribute

    def __init__(self, name: str, dataset: Any) -> None:
        self._name = name
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Row:
        return {**self._dataset[index], "dataset_name": self._name}

    def where(self, index: int) -> str:
        return f"{self._name}, task {index + 1}"


def number(text: str) -> object:
    """A value of a query: a number, a truth value, or the text itself."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)
