"""Loggers of the parts of a run: a file each in ``$TRINITY_LOG_DIR``, warnings on screen too."""

import logging
import os
import sys
from contextlib import suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TextIO

from trinity.utils.host import own_host

LOG_DIR_ENV = "TRINITY_LOG_DIR"
LOG_LEVEL_ENV = "TRINITY_LOG_LEVEL"
LOG_NODE_IP_ENV = "TRINITY_LOG_NODE_IP"

_FORMAT = "%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s"
_TIME_FORMAT = "%m-%d %H:%M:%S"
_MAX_BYTES = 64 * 2**20
_ROOT = "trinity.part"


class _Terminal(logging.StreamHandler):
    """Writes to what `sys.stderr` is at that moment: a live display takes its place for a time."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]  # looked up, not kept
        return sys.stderr


class _File(RotatingFileHandler):
    """A log that can't be written to, as on a full disk, is told of once and ends nothing."""

    _is_told = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # logging's name
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._is_told:
            self._is_told = True
            text = f"{self.baseFilename} can't be written to: {error.strerror or error}."
            sys.stderr.write(f"{text} Lines are missing.\n")

    def close(self) -> None:
        with suppress(OSError):  # of lines that are still to be written
            super().close()


class _PrefixedLines(logging.Formatter):
    """Gives every line of a record its prefix, so that a filter by line keeps tracebacks whole."""

    def format(self, record: logging.LogRecord) -> str:
        lines = super().format(record).splitlines() or [""]
        message = record.getMessage().splitlines() or [""]
        prefix = lines[0].removesuffix(message[0])
        return "\n".join([lines[0], *(prefix + line for line in lines[1:])])


def get_logger(name: str = "trinity", level: str | None = None) -> logging.Logger:
    """The logger of the part ``name``: writes ``<name>.log``, and warnings to the terminal.

    Without TRINITY_LOG_DIR (a part used outside a run) all goes to the terminal. A second call
    for the same name gives the same logger, moved to the folder that is set by then.

    Args:
        level: "DEBUG" ... "ERROR"; None: TRINITY_LOG_LEVEL, or what an earlier call set.
    """
    logger = logging.getLogger(f"{_ROOT}.{name}")
    logger.propagate = False
    path = _log_path(name)
    is_new = getattr(logger, "trinity_path", "unset") != path
    if level or is_new:
        logger.setLevel((level or os.environ.get(LOG_LEVEL_ENV) or "INFO").upper())
    if is_new:
        for handler in list(logger.handlers):
            logger.removeHandler(handler)
            handler.close()
        for handler in _handlers(path):
            handler.setFormatter(_PrefixedLines(_FORMAT, _TIME_FORMAT))
            logger.addHandler(handler)
        logger.trinity_path = path  # type: ignore[attr-defined]  # our own mark
    return logger


def _log_path(name: str) -> Path | None:
    folder = os.environ.get(LOG_DIR_ENV)
    if not folder:
        return None
    node = own_host() if os.environ.get(LOG_NODE_IP_ENV) else ""
    return Path(folder) / node / f"{name}.log"


def _handlers(path: Path | None) -> list[logging.Handler]:
    terminal = _Terminal()
    if path is None:
        return [terminal]
    path.parent.mkdir(parents=True, exist_ok=True)
    terminal.setLevel(logging.WARNING)
    return [_File(path, maxBytes=_MAX_BYTES, backupCount=3), terminal]
