"""Rows as tasks for the explorer."""

from trinity.buffer.rows import Row, lookup
from trinity.buffer.schema.messages import RowFault, value_of
from trinity.common.config.buffer import FormatConfig, TasksetConfig
from trinity.common.workflows import Task

_PROMPT_TYPES = (str, list, dict)


class TaskFormatter:
    """Makes the tasks of one taskset.

    Only columns that the config names itself must be there: an environment may take all it needs
    from the row in its own way.

    Args:
        taskset_id: Position of the taskset among those of the run.
        is_eval: The tasks measure, and are not trained on.
    """

    def __init__(
        self, config: TasksetConfig, *, taskset_id: int = 0, is_eval: bool = False
    ) -> None:
        self.config = config
        self.taskset_id = taskset_id
        self.is_eval = is_eval

    @classmethod
    def required_keys(cls, config: FormatConfig) -> dict[str, str]:
        """Columns that every row must have: the config's key for it -> its name."""
        return {name: getattr(config, name) for name in _named(config)}

    def format(self, row: Row, index: int = 0) -> Task:
        """The task of row ``index``.

        Raises:
            RowFault: A column that the config names is missing, null, empty or no text.
        """
        self.check(row)
        config = self.config
        return Task(
            workflow=_choice(row, config.format.workflow_key) or config.default_workflow_type or "",
            reward_fn=_choice(row, config.format.reward_fn_key) or config.default_reward_fn_type,
            raw_task=row,
            repeat_times=config.repeat_times or 1,
            format_args=config.format,
            rollout_args=config.rollout_args,
            workflow_args=config.workflow_args,
            reward_fn_args=config.reward_fn_args,
            is_eval=self.is_eval,
            index={"index": index, "taskset_id": self.taskset_id},
        )

    def check(self, row: Row) -> None:
        """`RowFault` if the row can't be a task."""
        for name, key in self.required_keys(self.config.format).items():
            value = value_of(row, key)
            if name == "prompt_key" and not isinstance(value, _PROMPT_TYPES):
                raise RowFault(key, f"of type {type(value).__name__}, not text")
            if value in ("", []) or (isinstance(value, str) and not value.strip()):
                raise RowFault(key, "empty")


def _named(config: FormatConfig) -> list[str]:
    return [n for n in ("prompt_key", "response_key") if n in config.model_fields_set]


def _choice(row: Row, key: str) -> str | None:
    """What a row says of its own workflow or reward; None if it says nothing."""
    if not key:
        return None
    try:
        value = lookup(row, key)
    except KeyError:
        return None
    return str(value) if value else None
