"""Videos as pictures: frames at even distances, for models that read images."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trinity.common.extras import needed

if TYPE_CHECKING:
    from PIL.Image import Image


def frames_of(source: object, count: int) -> list[object]:
    """``count`` pictures of a video from start to end, or all of a shorter one.

    Args:
        source: A file, bytes, ``{"path": ...}`` or ``{"bytes": ...}``: an animated picture, or
            what PyAV decodes. A list of pictures is a video too.

    Raises:
        ValueError: It is none of these, holds no picture, or is in the network.
        MissingExtraError: It takes PyAV, which is not installed.
    """
    if isinstance(source, Sequence) and not isinstance(source, (str, bytes)):
        return [source[place] for place in _places(len(source), count)]
    if isinstance(source, Mapping):  # as `datasets` stores files
        source = source.get("bytes") or source.get("path")
    if isinstance(source, str) and "://" in source:
        raise ValueError(f"{source[:80]!r} is in the network; give a file or the bytes.")
    if not isinstance(source, (str, bytes)):
        raise ValueError(f"A video can't be read from a {type(source).__name__}.")
    found = _of_picture(source, count) or _of_video(source, count)
    if not found:
        raise ValueError("A video holds no picture.")
    return list(found)


def _places(size: int, count: int) -> list[int]:
    """The middles of ``count`` equal parts of ``size`` frames."""
    if size <= count:
        return list(range(size))
    return [(2 * part + 1) * size // (2 * count) for part in range(count)]


def _of_picture(source: str | bytes, count: int) -> list[bytes]:
    """Frames of an animated GIF, PNG or WebP; nothing of what is no picture."""
    pillow = needed("PIL.Image", "video", "videos", package="pillow")
    try:
        with pillow.open(io.BytesIO(source) if isinstance(source, bytes) else source) as picture:
            found = []
            for place in _places(getattr(picture, "n_frames", 1), count):
                picture.seek(place)
                found.append(_png(picture))
            return found
    except pillow.UnidentifiedImageError:
        return []
    except OSError as error:
        raise ValueError(f"A video can't be read: {error}") from error


def _of_video(source: str | bytes, count: int) -> list[bytes]:
    av = needed("av", "video", "videos")
    try:
        size = sum(1 for _ in _decoded(av, source))
        wanted = set(_places(size, count))
        return [_png(f.to_image()) for i, f in enumerate(_decoded(av, source)) if i in wanted]
    except av.error.FFmpegError as error:
        raise ValueError(f"A video can't be read: {error}") from error


def _decoded(av: Any, source: str | bytes) -> Iterator[Any]:
    """All frames; many containers don't say how many there are."""
    with av.open(io.BytesIO(source) if isinstance(source, bytes) else source) as container:
        if not container.streams.video:
            raise ValueError("A video holds no picture.")
        yield from container.decode(video=0)


def _png(picture: Image) -> bytes:
    out = io.BytesIO()
    picture.convert("RGB").save(out, "PNG")
    return out.getvalue()
