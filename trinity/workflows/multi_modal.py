"""`simple_mm_workflow`: one question about pictures or videos."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import PositiveInt

from trinity.common.models.media import NUM_FRAMES, media_of, parts_of
from trinity.common.workflows import SimpleWorkflow
from trinity.common.workflows.simple import Messages


class SimpleMMWorkflow(SimpleWorkflow):
    """`simple_workflow` with the images of the column ``format.image_key``, one or a list.

    They stand where the prompt has ``<image>``, else before it. A video of the column
    ``format.video_key`` is `workflow_args.num_frames` (8) images, where the prompt has
    ``<video>``. Needs `explorer.rollout_model.enable_multimodal: true`.
    """

    argument_types: ClassVar[Mapping[str, Any]] = {"num_frames": PositiveInt}

    def format_messages(self) -> Messages:
        messages = super().format_messages()
        count = int(self.task.workflow_args.get("num_frames", NUM_FRAMES))
        if count < 1:
            raise ValueError(f"workflow_args.num_frames is {count}; it must be 1 or more.")
        keys = self.format_args
        media = media_of(self.task.column(keys.image_key), self.task.column(keys.video_key), count)
        if not any(media.values()):
            raise ValueError(
                f"The row has no image in the column {keys.image_key!r} and no video in the column "
                f"{keys.video_key!r}; set format.image_key or format.video_key."
            )
        asked = next(message for message in messages if message["role"] == "user")
        asked["content"] = parts_of(str(asked["content"]), media)
        return messages
