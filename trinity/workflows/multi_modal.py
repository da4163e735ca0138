"""`simple_mm_workflow`: one question about pictures or videos."""

import re
from typing import Any

from trinity.common.models.video import frames_of
from trinity.common.workflows import SimpleWorkflow
from trinity.common.workflows.simple import Messages

IMAGE_MARK, VIDEO_MARK = "<image>", "<video>"
_MARKS = re.compile(f"({IMAGE_MARK}|{VIDEO_MARK})")
_NUM_FRAMES = 8


class SimpleMMWorkflow(SimpleWorkflow):
    """`simple_workflow` with the images of the column ``format.image_key``, one or a list.

    They stand where the prompt has ``<image>``, else before it. A video of the column
    ``format.video_key`` is `workflow_args.num_frames` (8) images, where the prompt has
    ``<video>``. Needs `explorer.rollout_model.enable_multimodal: true`.
    """

    def format_messages(self) -> Messages:
        messages = super().format_messages()
        images = _listed(self.task.column(self.format_args.image_key))
        count = int(self.task.workflow_args.get("num_frames", _NUM_FRAMES))
        if count < 1:
            raise ValueError(f"workflow_args.num_frames is {count}; it must be 1 or more.")
        videos = self._videos()
        if not images and not videos:
            keys = self.format_args
            raise ValueError(
                f"The row has no image in the column {keys.image_key!r} and no video in the column "
                f"{keys.video_key!r}; set format.image_key or format.video_key."
            )
        media = {
            IMAGE_MARK: [[image] for image in images],
            VIDEO_MARK: [frames_of(video, count) for video in videos],
        }
        asked = next(message for message in messages if message["role"] == "user")
        asked["content"] = _parts(str(asked["content"]), media)
        return messages

    def _videos(self) -> list[Any]:
        """The videos of the row; a list of pictures is one, a list of files several."""
        found = self.task.column(self.format_args.video_key)
        is_frames = (
            isinstance(found, list) and bool(found) and not isinstance(found[0], (str, list))
        )
        return [found] if is_frames else _listed(found)


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _parts(text: str, media: dict[str, list[list[object]]]) -> list[dict[str, Any]]:
    """Text and images in the order in which the text has them."""
    for mark, items in media.items():
        if mark not in text:
            text = mark * len(items) + text
        if text.count(mark) != len(items):
            kind = mark.strip("<>")
            raise ValueError(
                f"The prompt has {text.count(mark)} {mark} marks, the row {len(items)} {kind}s."
            )
    waiting = {mark: iter(items) for mark, items in media.items()}
    parts: list[dict[str, Any]] = []
    for piece in _MARKS.split(text):
        if piece in waiting:
            parts += [{"type": "image", "image": image} for image in next(waiting[piece])]
        elif piece:
            parts.append({"type": "text", "text": piece})
    return parts
