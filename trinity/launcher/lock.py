"""One run of a job at a time: a locked file that names who holds it."""

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trinity.common.errors import TrinityError
from trinity.utils.log import get_logger

_NO_LOCKS = (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL)


class JobRunsError(TrinityError):
    """The same job is running already."""

    exit_code = 2


@contextmanager
def job_lock(folder: Path, role: str) -> Iterator[None]:
    """Hold ``<folder>/.lock_<role>`` for the time of the block. A dead holder holds nothing.

    On a file system without locks the block runs unguarded, and the log says so.

    Raises:
        JobRunsError: Somebody holds it; says which process, where and since when.
    """
    path = folder / f".lock_{role}"
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise JobRunsError(_who(file.read(), folder, role)) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            get_logger("launcher").warning("%s can't be locked (%s).", folder, error.strerror)
        file.truncate(0)
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
        file.write(json.dumps(holder))
        file.flush()
        yield


def _who(text: str, folder: Path, role: str) -> str:
    try:
        holder = json.loads(text)
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder["since"]))
        who = f"process {holder['pid']} on {holder['host']}, since {since}"
    except (ValueError, KeyError):
        who = "another process"
    return (
        f"The {role} of the job in {folder} is running already: {who}. Wait for it or end it, or "
        "set another `name`."
    )
