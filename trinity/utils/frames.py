"""What Python shows of an error, without the frames that only led to the user's code."""

import traceback
from collections.abc import Callable


def traceback_without(error: BaseException, is_left_out: Callable[[str], bool]) -> str:
    """The traceback of ``error`` and of what it came from, as Python writes it.

    Args:
        error: What was raised.
        is_left_out: Whether frames of this file are left out.
    """
    shown = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = shown
    while part is not None:
        kept = [frame for frame in part.stack if not is_left_out(frame.filename)]
        part.stack = traceback.StackSummary.from_list(kept)
        part = part.__cause__ or part.__context__
    return "".join(shown.format())
