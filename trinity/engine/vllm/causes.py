"""What made vLLM's inner processes fail at their start: they tell it to their log alone."""

import contextlib
import copy
import json
import logging
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_CONFIG = "VLLM_LOGGING_CONFIG_PATH"
_ERROR = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b(?:: .*)?")
_ELSEWHERE = ("root cause", "stack trace")


class VLLMStartError(RuntimeError):
    """vLLM did not start."""


@contextmanager
def telling_the_first_cause() -> Iterator[None]:
    """Start vLLM within; what failed first, in whichever process, is the error's text.

    Its processes log their errors into a file besides, unless the user has a log configuration of
    his own. vLLM's own classes of errors would bring all of vLLM into whoever gets them.
    """
    with tempfile.TemporaryDirectory(prefix="trinity_vllm_") as folder:
        log = Path(folder, "errors.log")
        with _errors_also_to(log):
            try:
                yield
            except Exception as error:  # vLLM raises all kinds
                cause = first_cause(log.read_text(errors="replace")) if log.is_file() else None
                cause = cause or f"{type(error).__name__}: {error}"
                raise VLLMStartError(f"vLLM did not start: {cause}") from error


def first_cause(log: str) -> str | None:
    """The first error that the tracebacks of ``log`` tell of by name; None if they tell none."""
    for line in log.splitlines():
        if _ERROR.fullmatch(line) and not any(text in line for text in _ELSEWHERE):
            return line
    return None


@contextmanager
def _errors_also_to(log: Path) -> Iterator[None]:
    if _CONFIG in os.environ:
        yield
        return
    from vllm.logger import DEFAULT_LOGGING_CONFIG

    config = copy.deepcopy(DEFAULT_LOGGING_CONFIG)
    config["formatters"]["plain"] = {"format": "%(message)s"}
    config["handlers"]["errors"] = {
        "class": "logging.FileHandler",
        "filename": str(log),
        "formatter": "plain",
        "level": "ERROR",
    }
    config["loggers"]["vllm"]["handlers"].append("errors")
    path = log.with_suffix(".json")
    path.write_text(json.dumps(config))
    os.environ[_CONFIG] = str(path)
    try:
        yield
    finally:
        with contextlib.suppress(KeyError):
            del os.environ[_CONFIG]
        _forget_inplace(logging.getLogger("vllm"), log)


def _forget_inplace(logger: logging.Logger, log: Path) -> None:
    """Log no more to ``log`` in this process, once its folder goes.

    A handler that somebody closes meanwhile (`dictConfig` closes all) would open it again, and
    vLLM, which logs the end of its process before it tells requests of it, would fail at that.
    """
    for handler in list(logger.handlers):
        if isinstance(handler, logging.FileHandler) and handler.baseFilename == str(log):
            logger.removeHandler(handler)
            handler.close()
