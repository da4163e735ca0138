"""What is in a data set: rows as the model will see them, lengths, repetitions, broken rows."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from trinity.buffer.rows import BadRow, BadRowError, Row, Rows, lookup
from trinity.buffer.rows.check import RowFault, checked
from trinity.buffer.schema.task import TaskFormatter
from trinity.common.config.buffer import TasksetConfig
from trinity.common.workflows import Task

if TYPE_CHECKING:
    from trinity.buffer.schema.base import ExperienceFormatter
    from trinity.common.models.chat import ChatFormat

_SEED = 0
_NUM_BINS = 10


@dataclass(frozen=True)
class Seen:
    """One row as the model will see it.

    Args:
        parts: (what it is, text): the rendered prompt, the response or truth, the answers of a
            pair; trained text of a multi-turn dialogue stands between ⟦ and ⟧.
        num_tokens: What it is -> its tokens; characters where there is no tokenizer.
        note: What will happen to it besides: truncation, for one.
    """

    where: str
    parts: Sequence[tuple[str, str]]
    num_tokens: Mapping[str, int]
    note: str = ""


Viewer = Callable[[Row], Seen]


class TaskViewer:
    """Shows rows of a taskset as their workflow would ask them.

    Args:
        chat: Chat format of the model; None shows messages without a template.
        max_prompt_tokens: Longest prompt the model takes; None: no limit is known.
        cuts: What happens to longer ones, for the note.
    """

    def __init__(
        self,
        config: TasksetConfig,
        chat: "ChatFormat | None" = None,
        max_prompt_tokens: int | None = None,
        cuts: str = "masked out",
    ) -> None:
        self._formatter = TaskFormatter(config)
        self._chat = chat
        self._limit = max_prompt_tokens
        self._cuts = cuts

    def __call__(self, row: Row) -> Seen:
        """The row as its workflow asks it; `RowFault` if it can't be a task."""
        task = self._formatter.format(row)
        prompt = self._prompt(task)
        size = len(self._chat.encode(prompt)) if self._chat is not None else len(prompt)
        note = ""
        if self._chat is not None and self._limit is not None and size > self._limit:
            note = f"prompt of {size} tokens, above the limit of {self._limit}: {self._cuts}"
        parts = [("prompt", prompt)]
        if task.truth is not None:
            parts.append(("truth", str(task.truth)))
        return Seen("", parts, {"prompt": size}, note)

    def _prompt(self, task: Task) -> str:
        messages = _messages_of(task)
        if messages is None:
            return str(task.task_desc if task.task_desc is not None else task.raw_task)
        if self._chat is None:
            return "\n".join(f"{m['role']}: {m['content']}" for m in messages)
        return self._chat.render(messages)


def _messages_of(task: Task) -> list[dict[str, Any]] | None:
    """The messages that the task's workflow starts from, if it is of the kind that says so."""
    from trinity.common.models.fake import FakeModel
    from trinity.common.workflows.simple import BaseSimpleWorkflow

    if not task.workflow:
        return _plain_messages(task)
    kind = task.workflow_class()
    if not issubclass(kind, BaseSimpleWorkflow):
        return None
    workflow = kind(task=task, model=FakeModel([]))  # type: ignore[arg-type]  # has its face
    return workflow.format_messages()


def _plain_messages(task: Task) -> list[dict[str, Any]] | None:
    asked = task.task_desc
    if isinstance(asked, list):
        return [dict(message) for message in asked]
    return None if asked is None else [{"role": "user", "content": str(asked)}]


class ExperienceViewer:
    """Shows rows of a data set of experiences as they will be trained on."""

    def __init__(self, formatter: "ExperienceFormatter") -> None:
        self._formatter = formatter

    def __call__(self, row: Row) -> Seen:
        """The row as it is trained on; `RowFault` if it can't be."""
        found, decode = self._formatter.format(row), self._formatter.chat.decode
        prompt = decode(found.tokens[: found.prompt_length].tolist())
        sizes = {"prompt": found.prompt_length}
        if found.chosen is not None and found.rejected is not None:
            pairs = [("chosen", found.chosen.tolist()), ("rejected", found.rejected.tolist())]
            sizes |= {name: len(ids) for name, ids in pairs}
            parts = [("prompt", prompt), *((name, decode(ids)) for name, ids in pairs)]
            return Seen("", parts, sizes)
        ids = found.tokens[found.prompt_length :].tolist()
        sizes |= {"response": len(ids)}
        mask = [True] * len(ids) if found.action_mask is None else found.action_mask.tolist()
        shown = decode(ids) if all(mask) else _marked(ids, mask, decode)
        return Seen("", [("prompt", prompt), ("response", shown)], sizes)


def _marked(ids: list[int], mask: list[bool], decode: Callable[[list[int]], str]) -> str:
    """Text with ⟦ ⟧ around what is trained on."""
    pieces: list[str] = []
    start = 0
    for index in range(1, len(ids) + 1):
        if index == len(ids) or mask[index] != mask[start]:
            text = decode(ids[start:index])
            pieces.append(f"⟦{text}⟧" if mask[start] else text)
            start = index
    return "".join(pieces)


def look(rows: Rows, index: int, viewer: Viewer) -> Seen | BadRow:
    """Row ``index`` as the model will see it, or why it can't."""
    try:
        seen = viewer(rows[index])
    except RowFault as fault:
        return BadRow(rows.where(index), fault.key, fault.reason)
    except BadRowError as error:
        return error.bad_rows[0]
    return Seen(rows.where(index), seen.parts, seen.num_tokens, seen.note)


@dataclass
class Statistics:
    """Figures of a data set.

    Args:
        num_rows: All rows.
        bad_rows: Those that can't be used, and why.
        num_duplicates: Rows whose content equals that of an earlier row.
        duplicates: (where, where it stands first) of some of them.
        lengths: What was measured -> the length of each measured row.
        num_cut: Measured rows that something happens to (see `Seen.note`).
        num_measured: Rows whose lengths were measured; a sample of large data sets.
    """

    num_rows: int
    columns: list[str]
    bad_rows: list[BadRow] = field(default_factory=list)
    num_duplicates: int = 0
    duplicates: list[tuple[str, str]] = field(default_factory=list)
    lengths: dict[str, list[int]] = field(default_factory=dict)
    num_cut: int = 0
    num_measured: int = 0


def statistics(
    rows: Rows,
    check: Callable[[Row], object],
    viewer: Viewer,
    *,
    key: str = "",
    max_measured: int = 5000,
    max_shown: int = 10,
) -> Statistics:
    """Every row is checked and compared; lengths are measured of a random ``max_measured`` rows.

    Args:
        check: Raises `RowFault` for a row that can't be used.
        key: Column by which rows are compared; empty: the whole row.
    """
    found = Statistics(len(rows), rows.columns)
    first: dict[bytes, int] = {}
    for index, row in checked(rows, check):
        if isinstance(row, BadRow):
            found.bad_rows.append(row)
            continue
        mark = _digest(row, key)
        earlier = first.setdefault(mark, index)
        if earlier != index:
            found.num_duplicates += 1
            if len(found.duplicates) < max_shown:
                found.duplicates.append((rows.where(index), rows.where(earlier)))
    _measure(rows, viewer, found, _sample(len(rows), max_measured))
    return found


def _measure(rows: Rows, viewer: Viewer, found: Statistics, indices: Sequence[int]) -> None:
    for index in indices:
        seen = look(rows, index, viewer)
        if isinstance(seen, BadRow):
            continue
        found.num_measured += 1
        found.num_cut += bool(seen.note)
        for name, size in seen.num_tokens.items():
            found.lengths.setdefault(name, []).append(size)


def _sample(size: int, limit: int) -> list[int]:
    if size <= limit:
        return list(range(size))
    return sorted(np.random.default_rng(_SEED).choice(size, limit, replace=False).tolist())


def _digest(row: Row, key: str) -> bytes:
    value = lookup(row, key) if key else sorted(row.items(), key=lambda item: item[0])
    return hashlib.blake2b(repr(value).encode(), digest_size=12).digest()


def histogram(lengths: Sequence[int], num_bins: int = _NUM_BINS) -> list[tuple[int, int, int]]:
    """(from, to, how many) of bins of equal width; both ends belong to a bin."""
    low, high = min(lengths), max(lengths)
    width = max(1, -(-(high - low + 1) // num_bins))
    counts: dict[int, int] = {}
    for length in lengths:
        counts[(length - low) // width] = counts.get((length - low) // width, 0) + 1
    return [
        (low + number * width, low + (number + 1) * width - 1, counts.get(number, 0))
        for number in range(max(counts) + 1)
    ]
