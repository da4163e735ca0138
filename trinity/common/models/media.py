"""Where images and videos stand in a text: `<image>` and `<video>` in it, or before it."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from trinity.common.models.video import frames_of

IMAGE_MARK, VIDEO_MARK = "<image>", "<video>"
NUM_FRAMES = 8
"""Pictures that a video is shown as, unless somebody says otherwise."""

_MARKS = re.compile(f"({IMAGE_MARK}|{VIDEO_MARK})")

Media = Mapping[str, Sequence[Sequence[object]]]
"""Mark -> the pictures that each of its places in the text stands for."""


def media_of(images: Any, videos: Any, num_frames: int = NUM_FRAMES) -> Media:
    """The pictures of a row's two columns: one thing, a list, or None.

    A list of pictures is one video, a list of files several.

    Raises:
        ValueError: A video can't be read.
    """
    return {
        IMAGE_MARK: [[image] for image in _listed(images)],
        VIDEO_MARK: [frames_of(video, num_frames) for video in _videos(videos)],
    }


def check_media(text: str, images: Any, videos: Any) -> None:
    """`ValueError` if ``text`` has not as many places as there are images and videos.

    Nothing is decoded.
    """
    parts_of(
        text, {IMAGE_MARK: [[]] * len(_listed(images)), VIDEO_MARK: [[]] * len(_videos(videos))}
    )


def parts_of(text: str, media: Media) -> list[dict[str, Any]]:
    """Text and images of a message, in the order in which the text has them.

    Raises:
        ValueError: The text has marks, but not as many as there are things to show.
    """
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


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _videos(found: Any) -> list[Any]:
    is_frames = isinstance(found, list) and bool(found) and not isinstance(found[0], (str, list))
    return [found] if is_frames else _listed(found)
