"""`MultiTurnWorkflow`: a conversation becomes one experience."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trinity.common.workflows.workflow import Workflow
from trinity.utils.metrics import numbers
from trinity.utils.threads import run_sync

if TYPE_CHECKING:
    from trinity.common.experience import Experience, TruncateStatus

Messages = list[dict[str, Any]]


class MultiTurnWorkflow(Workflow):
    """A workflow that talks in turns and turns the whole talk into one experience.

    All turns of the model are trained on; what it was told in between is context.
    """

    def process_messages_to_experience(
        self,
        messages: Messages,
        reward: float,
        info: Mapping[str, Any] | None = None,
        truncate_status: TruncateStatus | None = None,
    ) -> Experience:
        """`process_messages_to_experience_async` for a workflow that is not async."""
        return run_sync(
            self.process_messages_to_experience_async(messages, reward, info, truncate_status)
        )

    async def process_messages_to_experience_async(
        self,
        messages: Messages,
        reward: float,
        info: Mapping[str, Any] | None = None,
        truncate_status: TruncateStatus | None = None,
    ) -> Experience:
        """The conversation as one experience with ``reward``.

        A conversation that is too long is cut, marked ``response_truncated`` and given reward 0.
        Numbers in ``info`` become metrics too.
        """
        experience = await self.model.convert_messages_to_experience_async(messages)
        experience.truncate_status = experience.truncate_status or truncate_status
        is_cut = experience.truncate_status == "response_truncated"
        experience.reward = 0.0 if is_cut else float(reward)
        experience.info |= dict(info or {})
        experience.metrics |= numbers(info or {})
        return experience
