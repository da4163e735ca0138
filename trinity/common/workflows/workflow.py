"""`Workflow`: the base of all workflows, and which of its methods is the one that runs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from trinity.utils.threads import run_sync

if TYPE_CHECKING:
    from trinity.common.experience import Experience
    from trinity.common.models import ModelWrapper
    from trinity.common.workflows.task import Task


class Workflow:
    """Lets a model work on one task; gives the experiences of it.

    A subclass writes `run` (it then has a thread of its own and may block) or `run_async`, in
    which the experiences of one run are made, scored and returned. `__init__` -> `run` once for
    each run, unless it can do more:

    - ``can_repeat``: one run makes the experiences of all repeats; `set_repeat_times` tells how
      many. The flag holds for the class whose run method it stands beside: a subclass with a
      run method of its own runs once for each repeat unless it says ``can_repeat`` again.
    - ``can_reset``: an instance is used again for other tasks, after `reset`.

    With ``needs_history`` it works on the replies that `explorer.rollout_model.enable_history`
    records, and refuses a model that keeps none.

    Args:
        model: The model that is trained; its history is this run's alone.
        auxiliary_models: Other models: judges, teachers.
    """

    can_reset: ClassVar[bool] = False
    can_repeat: ClassVar[bool] = False
    is_async: ClassVar[bool] = False
    needs_history: ClassVar[bool] = False
    argument_types: ClassVar[Mapping[str, Any]] = {}
    """Types of `workflow_args` that are checked before a run; a base's hold too."""

    def __init__(
        self,
        *,
        task: Task,
        model: ModelWrapper,
        auxiliary_models: list[ModelWrapper] | None = None,
    ) -> None:
        if self.needs_history and not model.model_config.enable_history:
            raise ValueError(
                f"{type(self).__qualname__} works on recorded replies: set "
                "explorer.rollout_model.enable_history to true."
            )
        self.task = task
        self.model = model
        self.auxiliary_model_wrappers = list(auxiliary_models or [])
        self.repeat_times = 1
        self.run_id_base = 0
        self.logger = logging.getLogger("trinity.workflow")

    @classmethod
    def all_argument_types(cls) -> dict[str, Any]:
        """`argument_types`, with those of its bases."""
        declared: dict[str, Any] = {}
        for base in reversed(cls.__mro__):
            declared |= vars(base).get("argument_types", {})
        return declared

    @property
    def auxiliary_models(self) -> list[Any]:
        """OpenAI clients of the auxiliary models: async ones if the workflow is."""
        if type(self).runs_async():
            return [m.get_openai_async_client() for m in self.auxiliary_model_wrappers]
        return [m.get_openai_client() for m in self.auxiliary_model_wrappers]

    @property
    def rollout_args(self) -> dict[str, Any]:
        """Sampling parameters that this task sets, for ``self.model.chat(..., **rollout_args)``."""
        return self.task.rollout_args.model_dump(exclude_none=True, exclude={"n"})

    def set_repeat_times(self, repeat_times: int, run_id_base: int) -> None:
        """Make the next run stand for ``repeat_times`` runs, numbered from ``run_id_base``."""
        self.repeat_times, self.run_id_base = repeat_times, run_id_base

    def reset(self, task: Task) -> None:
        """Take up another task (``can_reset`` only)."""
        self.task = task

    def run(self) -> list[Experience]:
        """The experiences of this run."""
        if type(self).runs_async():
            return run_sync(self.run_async())
        raise NotImplementedError(f"{type(self).__qualname__} has neither run nor run_async.")

    async def run_async(self) -> list[Experience]:
        """The experiences of this run."""
        raise NotImplementedError(f"{type(self).__qualname__} has no run_async.")

    @classmethod
    def runs_async(cls) -> bool:
        """Whether `run_async` is what the class means: it is the one overridden last."""
        sync_at, async_at = defined_at(cls, "run"), defined_at(cls, "run_async")
        return async_at < sync_at or (async_at == sync_at and cls.is_async)

    @classmethod
    def repeats_at_once(cls) -> bool:
        """Whether one run stands for all repeats (see ``can_repeat``)."""
        runs_at = min(defined_at(cls, "run"), defined_at(cls, "run_async"))
        return cls.can_repeat and defined_at(cls, "can_repeat") <= runs_at

    @property
    def resettable(self) -> bool:
        return self.can_reset

    @property
    def repeatable(self) -> bool:
        return self.repeats_at_once()

    @property
    def asynchronous(self) -> bool:
        return self.runs_async()


def defined_at(cls: type, name: str) -> int:
    """How many classes up from ``cls`` the attribute is defined."""
    return next(depth for depth, base in enumerate(cls.__mro__) if name in vars(base))
