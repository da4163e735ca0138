"""Rows of a `verifiers` taskset: what `verifiers_workflow` needs to play a task."""

import itertools
from typing import Any
from urllib.parse import parse_qsl

from trinity.buffer.rows.base import DataError, ListRows, Row
from trinity.buffer.rows.reasoning import number
from trinity.common.extras import needed


def verifiers_rows(spec: str) -> ListRows:
    """The tasks of the taskset that ``spec`` names, as `id` or `id?limit=500&split=train`.

    Besides ``limit``, the first so many tasks, arguments are fields of the taskset's config.

    Raises:
        DataError: There is no such taskset, it refuses an argument, or it never ends and there is
            no limit.
    """
    package = needed("verifiers.v1", "verifiers", "storage_type: verifiers")
    name, _, query = spec.partition("?")
    arguments = {key: number(value) for key, value in parse_qsl(query)}
    limit = arguments.pop("limit", None)
    config = {"id": name, **arguments}
    try:
        kind = package.taskset_config_type(name)
        taskset = package.load_taskset(kind.model_validate(config))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise DataError(f"verifiers can't make {spec!r}: {error}") from error
    if limit is None and not taskset.bounded:
        raise DataError(f"{name!r} has no end: say how many tasks, such as '{name}?limit=1000'.")
    tasks = itertools.islice(taskset, None if limit is None else int(str(limit)))
    return ListRows([_row(config, place, task) for place, task in enumerate(tasks)], name)


def _row(config: Row, place: int, task: Any) -> Row:
    return {"taskset": config, "idx": place, "prompt": task.data.prompt_text or task.key}
