"""What Python shows of an error, without the frames that only led to the user's code."""

import os
import traceback
from collections.abc import Callable
from pathlib import Path

_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"


def is_of_trinity(file: str) -> bool:
    """Whether a frame of ``file`` is one of ours."""
    return file.startswith(_PACKAGE)


def traceback_without(error: BaseException, is_left_out: Callable[[str], bool]) -> str:
    """The traceback of ``error`` and of what it came from, as Python writes it.

    Where no frame is left, the error alone.

    Args:
        error: What was raised.
        is_left_out: Whether frames of this file are left out.
    """
    shown = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = shown
    has_frames = False
    while part is not None:
        kept = [frame for frame in part.stack if not is_left_out(frame.filename)]
        part.stack = traceback.StackSummary.from_list(kept)
        has_frames = has_frames or bool(kept)
        part = part.__cause__ or part.__context__
    return "".join(shown.format() if has_frames else shown.format_exception_only())
