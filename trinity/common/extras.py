"""Packages that not every installation has: imported when they are asked for."""

import warnings
from importlib import import_module
from typing import Any

from trinity.common.errors import MissingExtraError


def needed(module: str, extra: str, wanted_by: str = "", *, package: str = "") -> Any:
    """A module of an optional package.

    Args:
        extra: What of trinity brings the package.
        wanted_by: Who asks for it, for the message.
        package: Its name at the package index, where it is not that of the module.

    Raises:
        MissingExtraError: It is not installed.
        ImportError: It is, but something that it needs is not.
    """
    top = module.partition(".")[0]
    try:
        with warnings.catch_warnings():
            # The compiler's, of source that nobody here can mend: shown at the first import.
            warnings.simplefilter("ignore", SyntaxWarning)
            return import_module(module)
    except ImportError as error:
        if error.name and error.name.partition(".")[0] != top:
            raise
        raise MissingExtraError(package or top, extra, wanted_by) from None
