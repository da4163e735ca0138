"""`simple_mm_workflow`: one question about pictures."""

from typing import Any

from trinity.common.workflows import SimpleWorkflow
from trinity.common.workflows.simple import Messages

IMAGE_MARK = "<image>"


class SimpleMMWorkflow(SimpleWorkflow):
    """`simple_workflow` with the images of the column ``format.image_key``, one or a list.

    They stand where the prompt has ``<image>``, else before it. Needs
    `explorer.rollout_model.enable_multimodal: true`.
    """

    def format_messages(self) -> Messages:
        messages = super().format_messages()
        found = self.task.column(self.format_args.image_key)
        images = found if isinstance(found, list) else [found]
        if found is None or not images:
            raise ValueError(
                f"The row has no image in the column {self.format_args.image_key!r}; set "
                "format.image_key."
            )
        asked = next(message for message in messages if message["role"] == "user")
        asked["content"] = _parts(str(asked["content"]), images)
        return messages


def _parts(text: str, images: list[Any]) -> list[dict[str, Any]]:
    """Text and images in the order in which the text has them."""
    pieces = text.split(IMAGE_MARK)
    if len(pieces) == 1:
        pieces = [*[""] * len(images), text]
    if len(pieces) != len(images) + 1:
        raise ValueError(
            f"The prompt has {len(pieces) - 1} {IMAGE_MARK} marks, the row {len(images)} images."
        )
    parts: list[dict[str, Any]] = []
    for place, piece in enumerate(pieces):
        if piece:
            parts.append({"type": "text", "text": piece})
        if place < len(images):
            parts.append({"type": "image", "image": images[place]})
    return parts
