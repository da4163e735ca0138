"""`Task`: one thing for the model to do, and how it is done."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from trinity.common.config.buffer import FormatConfig, GenerationConfig
from trinity.common.rewards import RewardFn

if TYPE_CHECKING:
    from trinity.common.models import ModelWrapper
    from trinity.common.workflows.workflow import Workflow


@dataclass
class Task:
    """One row of a taskset. All values are plain, so that a task travels to any process.

    Args:
        workflow: Name in `WORKFLOWS`, dotted path, or a class.
        reward_fn: Name in `REWARD_FUNCTIONS`, dotted path, or a class; None: the workflow's own.
        raw_task: The row of the data set.
        repeat_times: Runs of this task.
        format_args: Which column of the row holds what.
        rollout_args: Sampling parameters; those that are None are the model's.
        workflow_args, reward_fn_args: Settings of the workflow and of the reward.
        is_eval: Its experiences are measured, not trained on.
        batch_id, task_id: Set by the scheduler.
        index: Where the row stands: ``{"index": row, "taskset_id": set}``.
    """

    workflow: "str | type[Workflow]" = ""
    reward_fn: str | type[RewardFn] | None = None
    raw_task: dict[str, Any] = field(default_factory=dict)
    repeat_times: int = 1
    format_args: FormatConfig = field(default_factory=FormatConfig)
    rollout_args: GenerationConfig = field(default_factory=GenerationConfig)
    workflow_args: dict[str, Any] = field(default_factory=dict)
    reward_fn_args: dict[str, Any] = field(default_factory=dict)
    is_eval: bool = False
    batch_id: int | str = ""
    task_id: int | str = ""
    index: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.format_args, Mapping):
            self.format_args = FormatConfig(**cast(dict, self.format_args))
        if isinstance(self.rollout_args, Mapping):
            self.rollout_args = GenerationConfig(**cast(dict, self.rollout_args))

    @property
    def task_desc(self) -> Any:
        """The prompt column: a text, or a list of messages; None if the row has none."""
        return self.column(self.format_args.prompt_key)

    @property
    def truth(self) -> Any:
        """The right answer, as the row has it; None if it has none."""
        return self.column(self.format_args.response_key)

    def column(self, key: str | None) -> Any:
        """The value at ``key``; a key that is no column may be a dotted path into nested ones."""
        if not key:
            return None
        if key in self.raw_task:
            return self.raw_task[key]
        value: Any = self.raw_task
        for part in key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return None
            value = value[part]
        return value

    def workflow_class(self) -> "type[Workflow]":
        """The class behind ``workflow``.

        Raises:
            UnknownNameError: There is none of that name.
        """
        from trinity.common.workflows.names import WORKFLOWS

        return WORKFLOWS.get(self.workflow) if isinstance(self.workflow, str) else self.workflow

    def to_workflow(
        self, model: "ModelWrapper", auxiliary_models: "list[ModelWrapper] | None" = None
    ) -> "Workflow":
        """A workflow that works on this task with ``model``."""
        return self.workflow_class()(task=self, model=model, auxiliary_models=auxiliary_models)

    def to_dict(self) -> dict[str, Any]:
        """The row of the data set."""
        return self.raw_task
